"""Weights that a run begins with: a file, a folder, those of another run, a folder of transformers."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file
from torch import nn

from pipedejavu.facts import InputError
from pipedejavu.launch import RankGroup, audit_run, plan_run, reopen, train
from pipedejavu.launch.init_trial import choose_init
from pipedejavu.plan import preset
from pipedejavu.run import TrainOptions
from pipedejavu.source.initial_weights import load_weights
from pipedejavu.source.model_source import open_task

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": 16}


class Tied(nn.Module):
    """A model whose first and last weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight


def weights_of(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def are_equal(model: nn.Module, weights: dict[str, Any]) -> bool:
    found = weights_of(model)
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in found)


@pytest.mark.parametrize("name", ["first.weight", "last.weight"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_all_parameters_are_taken_tied_ones_under_any_name(name: str, is_folder: bool, tmp_path: Path) -> None:
    other, model = Tied(), Tied()
    other.norm(torch.randn(8, 4))
    kept = {key: tensor for key, tensor in other.state_dict().items() if "weight" not in key or "norm" in key}
    save_file({**kept, name: other.first.weight.detach(), "more": torch.ones(1)}, tmp_path / "some.safetensors")
    load_weights(model, str(tmp_path if is_folder else tmp_path / "some.safetensors"))
    assert are_equal(model, weights_of(other))
    assert torch.equal(model.norm.running_mean, other.norm.running_mean)
    assert model.last.weight is model.first.weight


def test_buffers_need_not_be_there(tmp_path: Path) -> None:
    other, model = Tied(), Tied()
    save_file(weights_of(other), tmp_path / "some.safetensors")
    load_weights(model, str(tmp_path))
    assert are_equal(model, weights_of(other))
    assert not model.norm.running_mean.any()


def test_what_does_not_fit_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    model = Tied()
    before, own = weights_of(model), weights_of(Tied())
    path = tmp_path / "some.safetensors"
    save_file({"first.bias": own["first.bias"]}, path)
    with pytest.raises(
        InputError, match=r"has no 'first\.weight' and 3 more of the model's 5 parameters; give weights"
    ):
        load_weights(model, str(path))
    save_file({**own, "last.bias": torch.ones(5)}, path)
    with pytest.raises(InputError, match=r"^'last\.bias' in .* is \(5,\), and the model's is \(4,\); give weights"):
        load_weights(model, str(path))
    with pytest.raises(InputError, match="there is no such file or folder"):
        load_weights(model, str(tmp_path / "none"))
    torch.save(own, tmp_path / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*pytorch_model\.bin"):
        load_weights(model, str(tmp_path / "pytorch_model.bin"))
    with pytest.raises(InputError, match=r"has its weights in the pickle pytorch_model\.bin"):
        load_weights(model, str(tmp_path))
    assert are_equal(model, before)


OPTIONS = TrainOptions(model="mlp", dtype="float64", steps=2, optimizer="sgd", lr=0.1, checkpoint_every=1)


def go(options: TrainOptions, folder: Path) -> Any:
    options, program, _ = plan_run(options, preset("gpipe").at(workers=2, microbatches=2, samples=4))
    return train(options, program, str(folder))


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another_and_resumes_without_them(tmp_path: Path) -> None:
    made = go(OPTIONS, tmp_path / "first").folder.model
    weights = tmp_path / "weights.safetensors"
    made.rename(weights)
    still = OPTIONS.replace(
        weights=str(weights), lr=1e-300, keeps_log=True
    )  # only weights of 0 are changed by an update
    done = go(still, tmp_path / "still")
    begun = load_file(weights)
    assert all((tensor - begun[name]).abs().max() < 1e-290 for name, tensor in load_file(done.folder.model).items())
    assert max(audit_run(done).values()) < 1e-290

    go(OPTIONS.replace(weights=str(weights)), tmp_path / "run")
    weights.unlink()
    resumed = reopen(str(tmp_path / "run"), RankGroup(), lambda _: None)
    assert resumed is not None
    assert resumed.known is not None
    options = resumed.options(resumed.known.options.replace(steps=3), {"steps"})
    options, program, _ = plan_run(options, resumed.known.plan, start=resumed.start)
    assert train(options, program, str(tmp_path / "run"), resumed.start).folder.model.exists()


def test_candidates_have_weights_of_their_own(tmp_path: Path) -> None:
    options, program, _ = plan_run(OPTIONS.replace(init_candidates=2, init_steps=1), preset("ddp").at(replicas=2))
    with pytest.raises(InputError, match="--weights says what a run begins with"):
        choose_init(options.replace(weights="some"), program, str(tmp_path / "run"), RankGroup())


@needs_transformers
@pytest.mark.filterwarnings("ignore")
def test_folders_of_transformers_are_read_as_it_reads_them(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    other = GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0))
    other.save_pretrained(tmp_path / "whole")
    other.transformer.save_pretrained(tmp_path / "body")  # its names have no 'transformer.', and its head is tied
    model = f"hf:{tmp_path / 'whole'}"
    assert not are_equal(open_task(model).model, weights_of(other))
    for source in ("whole", "body", "whole/model.safetensors"):
        found = open_task(model, data="stdlib", weights=str(tmp_path / source)).model
        assert are_equal(found, weights_of(other)), source
        assert found.training


@needs_transformers
@pytest.mark.filterwarnings("ignore")
def test_weights_of_transformers_that_are_not_all_there_are_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    small, large = (GPT2Config(**{**GPT2, "n_layer": n}, bos_token_id=0, eos_token_id=0) for n in (1, 2))
    GPT2LMHeadModel(small).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**large.to_dict(), "model_type": "gpt2"}))
    with pytest.raises(InputError, match=r"has no 'transformer\.h\.1\..*' and 11 more of a GPT2LMHeadModel"):
        open_task(f"hf:{tmp_path}", data="stdlib", weights=str(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "other.txt")
    with pytest.raises(InputError, match=r"cannot read the weights '.*': .*model\.safetensors"):
        open_task(f"hf:{tmp_path}", data="stdlib", weights=str(tmp_path))
