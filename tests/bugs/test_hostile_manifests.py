"""Manifests whose seal is right and whose numbers are absurd: refused at once, with a sentence."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pipedejavu.store import Checkpoint, CheckpointDir, CheckpointError, Saver


def resealed(folder: Path, **changes: Any) -> Checkpoint:
    """Changes the entry of a tensor in a sealed manifest, and seals it again."""
    path = folder / "manifest.json"
    plain = json.loads(path.read_bytes())
    plain.pop("seal")
    plain["tensors"]["weight/a"].update(changes)
    rest = json.dumps(plain).encode()[1:]
    path.write_bytes(b'{"seal": "%s",\n' % sha256(rest).hexdigest().encode() + rest)
    return Checkpoint(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint_dir = CheckpointDir(tmp_path)
    saver = Saver(checkpoint_dir, tell=pytest.fail)
    saver.save(1, {"weight/a": torch.ones(2, 3)}, lambda: {"samples": 3})
    saver.wait()
    return checkpoint_dir.folder(1)


def test_shapes_of_thousands_of_digits_are_refused_before_they_are_multiplied(folder: Path) -> None:
    """Their product took 73 s."""
    with pytest.raises(CheckpointError, match=r"tensors\.weight/a\.shape"):
        resealed(folder, shape=[10**4000 - 1] * 500)
    with pytest.raises(CheckpointError, match="at most 64"):
        resealed(folder, shape=[1] * 10_000)


@pytest.mark.parametrize("shape", [[0, 2**63], [2**63, 0], [0, 2**62, 2**62], [2**40, 2**40, 0], [2**62, 4]])
def test_shapes_that_torch_cannot_have_are_refused(folder: Path, shape: list[int]) -> None:
    with pytest.raises(CheckpointError, match=r"shape|does not fit"):
        resealed(folder, shape=shape)


def test_an_empty_tensor_is_still_read(tmp_path: Path) -> None:
    checkpoint_dir = CheckpointDir(tmp_path)
    saver = Saver(checkpoint_dir, tell=pytest.fail)
    saver.save(1, {"weight/a": torch.empty(0, 7, 2), "weight/b": torch.tensor(1.5)}, lambda: {"samples": 3})
    saver.wait()
    found = Checkpoint(checkpoint_dir.folder(1))
    found.verify()
    assert found.tensor("weight/a").shape == (0, 7, 2)
    assert found.tensor("weight/b").item() == 1.5


@pytest.mark.parametrize("changes", [{"offset": 2**70}, {"offset": 10**4000}, {"dtype": "F99"}, {"file": "../x"}])
def test_other_fields_of_a_tensor_are_bounded(folder: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        resealed(folder, **changes)
