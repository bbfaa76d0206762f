"""The verb export: a run's newest checkpoint in folders that others read."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.store import CheckpointDir, Saver, import_dcp
from tests.cli.test_main import refused, run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")  # DCP says that it is alone


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    saver = Saver(CheckpointDir(tmp_path / "run" / "checkpoints"), tell=pytest.fail)
    for step in (3, 6):
        tensors = {"weight/a": torch.full((2, 3), float(step)), "state/exp_avg/a": torch.ones(2, 3)}
        saver.save(step, tensors, lambda: {"samples": 0})
        saver.wait()
    return tmp_path / "run"


def test_the_newest_checkpoint_is_what_transformers_read(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    said = run("export", str(saved), str(tmp_path / "new"), "--config", str(tmp_path / "config.json")).stdout
    assert said == f"step 6 of {saved} is in {tmp_path / 'new'}\n"
    weights = load_file(tmp_path / "new" / "model.safetensors")
    assert weights.keys() == {"a"}
    assert torch.equal(weights["a"], torch.full((2, 3), 6.0))
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == {"model_type": "gpt2"}


def test_one_that_is_damaged_is_named_and_the_one_before_it_goes_out(saved: Path, tmp_path: Path) -> None:
    part = next((saved / "checkpoints" / "step-6").glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1])
    done = run("export", str(saved), str(tmp_path / "new"), "--to", "dcp", "--json")
    assert json.loads(done.stdout) == {"folder": str(tmp_path / "new"), "step": 3, "form": "dcp"}
    assert "checkpoint step-6 cannot be used: " in done.stderr
    again = import_dcp(tmp_path / "new", tmp_path / "shelf", allow_pickle=True)
    assert torch.equal(again.tensor("weight/a"), torch.full((2, 3), 3.0))


def test_what_cannot_be_exported_is_refused(saved: Path, tmp_path: Path) -> None:
    new = str(tmp_path / "new")
    assert "has no checkpoint to export; train with --checkpoint-every" in refused("export", str(tmp_path), new)
    assert "--to is hugging or dcp, not 'onnx'" in refused("export", str(saved), new, "--to", "onnx")
    assert "a folder of DCP has no config.json" in refused("export", str(saved), new, "--to", "dcp", "--config", "x")
    assert not Path(new).exists()
