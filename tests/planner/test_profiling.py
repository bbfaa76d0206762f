"""Profiles of models: what is estimated without memory equals what is measured, byte for byte."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import Job, Sgd
from pipedejavu.facts import InputError, Profile
from pipedejavu.planner import planning
from pipedejavu.planner.profiling import (
    MeasureSetup,
    choose_sizes,
    estimate_model,
    measure_model,
    measure_with,
    this_machine,
)
from pipedejavu.profile import UnitSample

OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 3)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def make():
    loss = nn.CrossEntropyLoss(reduction="sum")
    return Net(), loss, [(torch.ones(6), n % 3) for n in range(5)]
"""


def quiet(text: str) -> None:
    """Tells nobody."""


def check_equal(model: str, samples: int) -> Profile:
    """Compares both ways to a profile; returns what was measured."""
    measured = measure_model(model, samples, quiet)
    estimated = estimate_model(model, samples, this_machine(), quiet)
    assert measured.sizes[-1] == samples
    assert measured.sample == estimated.sample
    assert measured.profile.ties == estimated.profile.ties
    for one, other in zip(measured.profile.units, estimated.profile.units, strict=True):
        assert one.replace(times={}) == other.replace(times={})
        assert one.times["cpu"].forward.at(samples) > 0
    return measured.profile


@pytest.mark.parametrize("model", ["mlp", "vgg-small", "bert-tiny", "seq2seq-tiny"])
def test_bytes_are_equal_both_ways(model: str) -> None:
    check_equal(model, 2)


def test_a_model_of_ones_own_is_cut_for_every_size(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    profile = check_equal(f"{tmp_path / 'own.py'}:make", 8)  # more than there are samples
    assert [unit.name for unit in profile.units] == ["layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert profile.units[1].times == profile.units[2].times


def test_one_sample_is_measured_unless_the_model_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert measure_model(f"{tmp_path / 'own.py'}:make", 4, quiet).sizes == (2, 4)  # batch statistics
    measured = measure_model("mlp", 4, quiet)
    assert measured.sizes == (1, 2, 4)
    assert {1, 2, 4} in [set(unit.times["cpu"].forward.measured_s) for unit in measured.profile.units]


def test_a_config_of_hugging_face_is_profiled_both_ways(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 18}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_equal(f"hf:{tmp_path}", 4)


def test_sequences_are_as_long_as_asked_or_as_the_config_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": 700}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, machine = f"hf:{tmp_path}", this_machine()
    assert measure_model(model, 1, quiet).sample == "128 int64"
    assert estimate_model(model, 1, machine, quiet).sample == "700 int64"
    assert estimate_model(model, 1, machine, quiet, context=512).sample == "512 int64"
    with pytest.raises(InputError, match="--context is 701, and the configuration has 1 to 700 positions"):
        estimate_model(model, 1, machine, quiet, context=701)
    assert estimate_model("gpt-tiny", 1, machine, quiet, context=64).sample == "64 int64"


def test_a_model_of_any_size_is_estimated(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 64}
    config |= {"num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    units = estimate_model(f"hf:{tmp_path}", 1, this_machine(), quiet).profile.units
    # Of a block: queries and outputs, keys and values, three matrices of the wide layer, two norms.
    block = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert sum(unit.num_parameters for unit in units) == 2 * block + 2 * 128256 * 8192 + 8192


def test_one_sample_and_parts_of_the_size_asked_for() -> None:
    assert [choose_sizes(n) for n in (1, 2, 3, 4)] == [(3, 2, 1), (1, 3, 2), (1, 2, 3), (1, 2, 4)]
    assert [choose_sizes(n) for n in (6, 8, 32)] == [(1, 2, 3, 6), (1, 2, 4, 8), (1, 8, 16, 32)]
    with pytest.raises(InputError, match="a batch has at least one sample, not 0"):
        choose_sizes(0)


def test_a_part_of_a_cpu_is_measured_while_the_others_work(monkeypatch) -> None:
    monkeypatch.setattr(planning, "num_cores", lambda: 4)
    machine = this_machine()
    cpus = tuple(d.replace(most_workers=4) for d in machine.devices if d.type == "cpu")
    ways = planning.measure_setups(machine.replace(devices=cpus))
    assert {way.kind: (way.threads, way.beside) for way in ways} == {"cpu": (4, 0), "cpu/2": (2, 2), "cpu/4": (1, 3)}


def test_samples_are_made_with_the_threads_of_each_way() -> None:
    unit_sample = UnitSample([("only", nn.Linear(3, 3))], torch.randn(2, 3), torch.randn(2, 3), nn.functional.mse_loss)
    ways = [MeasureSetup(f"{count} threads", torch.device("cpu"), count) for count in (1, 2)]
    job, threads = Job(units=unit_sample.units, loss=unit_sample.loss, optimizer=Sgd(lr=0.1)), list[int]()
    profile = measure_with("own", [unit_sample], job, ways, quiet, lambda _: threads.append(torch.get_num_threads()))
    assert threads == sorted(threads)
    assert {*threads} == {1, 2}
    assert profile.batch.keys() == {"1 threads", "2 threads"}
