"""Whole training runs with real processes: what they leave, what they prove, and how they fail."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.facts import InputError, Machine
from pipedejavu.launch import audit_run, plan_run, train
from pipedejavu.plan import preset
from pipedejavu.run import TrainOptions
from pipedejavu.zoo import build


def run(tmp_path: Path, name: str, machine: Machine | None = None, **changes):
    options = TrainOptions(model="mlp", data="random:64", dtype="float64", keeps_log=True, steps=3).replace(**changes)
    sizes = {"microbatches": 4} if preset(name).per_update is None else {}
    grows = preset(name).grows != "none"
    plan = preset(name).at(workers=2 if grows else None, samples=3, **sizes)
    options, program, _ = plan_run(options, plan, machine)
    return train(options, program, str(tmp_path / "run"))


QUICK = ("1f1b", "ddp", "zero-3", "pipedream", "parameter-server")
SLOW = (
    "gpipe", "interleaved", "zb-h1", "zb-v", "gems-mast", "gems-hy", "chimera", "pipedream-2bw", "hippie", "hetpipe",
    "easgd", "easgd-sync", "axonn", "coarse", "hyscale", "fine", "zero-offload", "byteps", "zeno",
    "zero-1", "zero-2", "zero-r",
)  # fmt: skip


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run_with_processes_equals_its_replay(tmp_path, name) -> None:
    done = run(tmp_path, name, optimizer="sgd", lr=0.01)
    # A few units in the last place of weights of size one, for each of the updates.
    assert max(audit_run(done).values()) < 1e-12
    weights = load_file(done.folder.model)
    start = build("mlp").model.state_dict()
    assert weights.keys() == start.keys()
    assert any(not torch.equal(weights[n], start[n].double()) for n in start)
    rows = [json.loads(line) for line in done.folder.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "step" in row] == [1, 2, 3]


@pytest.mark.slow
def test_hogwild_with_processes_learns(tmp_path) -> None:
    """Two processes write one set of weights without a lock; there is no replay, but the loss falls."""
    with pytest.raises(InputError, match="records no versions, so there is nothing to replay; leave --audit out"):
        run(tmp_path, "hogwild")
    done = run(tmp_path, "hogwild", optimizer="sgd", lr=0.01, steps=60, keeps_log=False)
    rows = [json.loads(line) for line in done.folder.metrics.read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 60
    # 6 of 64 samples an update: the last ten updates have seen each sample more than five times.
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_a_run_leaves_its_files_and_no_other_overwrites_them(tmp_path) -> None:
    done = run(tmp_path, "1f1b")
    rows = [json.loads(line) for line in done.folder.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "step" in row] == [1, 2, 3]
    assert all(row["count"] == 12 for row in rows if "step" in row)
    assert [row["saved"] for row in rows if "saved" in row] == [3]
    names = {path.name for path in done.folder.path.iterdir()}
    assert names == {
        "checkpoints", "lock", "machine.json", "measured.json", "metrics.jsonl", "model.safetensors", "options.json",
        "plan.json", "predicted.json", "profile.json", "seal.json",
    }  # fmt: skip
    predicted, measured = done.folder.timeline("predicted"), done.folder.timeline("measured")
    assert sorted(predicted.action) == sorted(measured.action)
    live = [[w.peak_live_microbatches for w in t.workers] for t in (predicted, measured)]
    assert live[0] == live[1] == [2, 1]
    with pytest.raises(InputError, match="holds a run already; go on with --resume, choose another --run-dir"):
        run(tmp_path, "1f1b", steps=1)


@pytest.mark.slow
def test_processes_with_masks_equal_their_replay(tmp_path) -> None:
    done = run(tmp_path, "distreal", model="vgg-small", steps=5, optimizer="sgd", lr=0.01)
    assert max(audit_run(done).values()) < 1e-12


@pytest.mark.slow
def test_every_plan_trains_to_the_same_weights(tmp_path) -> None:
    found = [load_file(run(tmp_path / name, name, optimizer="sgd").folder.model) for name in ("1f1b", "gpipe")]
    assert max(float((found[0][n] - found[1][n]).abs().max()) for n in found[0]) < 1e-12


def test_a_model_without_filters_is_refused_before_anything_starts(tmp_path) -> None:
    with pytest.raises(InputError, match="the model has no convolution whose filters can be left out"):
        run(tmp_path, "distreal")
    assert list(tmp_path.iterdir()) == []


def test_skipping_needs_a_plan_that_can_agree_on_it(tmp_path) -> None:
    with pytest.raises(InputError, match="has no common moment to agree on leaving an update out"):
        run(tmp_path, "pipedream", on_nan="skip")
