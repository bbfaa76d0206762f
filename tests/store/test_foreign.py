"""Weights to and from the folders of others; pickles only where they are allowed, and never their code."""

import json
import os
import pickle
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from pipedejavu.facts import InputError
from pipedejavu.session import Checkpoints
from pipedejavu.store import CheckpointDir, Saver, export_dcp, export_hf, foreign, import_dcp, import_hf

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(torch.float64)


@pytest.fixture
def trained(tmp_path: Path):
    """A model after a step of AdamW, its optimizer, and the checkpoint of both."""
    own = net()
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
    own(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(tmp_path / "own")
    checkpoints.save(own, optimizer, step=1)
    checkpoints.wait()
    return own, optimizer, checkpoints.checkpoint_dir.newest(pytest.fail)


def equal(first, second) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("shard_bytes", [2**30, 200])
def test_weights_go_to_a_hugging_face_folder_and_back(tmp_path: Path, trained, monkeypatch, shard_bytes) -> None:
    monkeypatch.setattr(foreign, "SHARD_BYTES", shard_bytes)
    own, _, checkpoint = trained
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    folder = export_hf(checkpoint, tmp_path / "hf", config=tmp_path / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    assert equal({name: t for file in files for name, t in load_file(file).items()}, own.state_dict())
    if shard_bytes == 200:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == own.state_dict().keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in own.state_dict().values())
        assert len(files) > 1
    else:
        assert [file.name for file in files] == ["model.safetensors"]
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "gpt2"}
    other = net(1)
    import_hf(folder, tmp_path / "shelf")
    assert Checkpoints(tmp_path / "shelf").load(other) == (0, 0)
    assert equal(other.state_dict(), own.state_dict())


def test_a_folder_that_hugging_face_wrote_comes_in(tmp_path: Path) -> None:
    own = net(3)
    save_file(own.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = import_hf(tmp_path, tmp_path / "shelf")
    assert equal(checkpoint.tensors(checkpoint.names()), {f"weight/{n}": t for n, t in own.state_dict().items()})


def test_weights_and_state_go_to_a_dcp_folder_and_back(tmp_path: Path, trained) -> None:
    own, optimizer, checkpoint = trained
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = export_dcp(checkpoint, tmp_path / "dcp")
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in own.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert equal(state["model"], own.state_dict())
    import_dcp(folder, tmp_path / "shelf", allow_pickle=True)
    other = net(1)
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    Checkpoints(tmp_path / "shelf").load(other, again)
    assert equal(other.state_dict(), own.state_dict())
    for one, two in zip(optimizer.state_dict()["state"].values(), again.state_dict()["state"].values(), strict=True):
        assert equal(one, two)


def test_pickles_need_to_be_allowed(tmp_path: Path, trained) -> None:
    own, _, checkpoint = trained
    torch.save(own.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"in the pickle pytorch_model.bin; pass allow_pickle=True if you know where"):
        import_hf(tmp_path, tmp_path / "shelf")
    found = import_hf(tmp_path, tmp_path / "shelf", allow_pickle=True)
    assert equal(found.tensors(found.names()), {f"weight/{n}": t for n, t in own.state_dict().items()})
    with pytest.raises(InputError, match=r"holds pickles, as all folders of .* do; pass allow_pickle=True if you know"):
        import_dcp(export_dcp(checkpoint, tmp_path / "dcp"), tmp_path / "other")


class Evil:
    """Makes a folder where whoever unpickles it stands."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_is_allowed_still_runs_no_code(tmp_path: Path, trained) -> None:
    folder = export_dcp(trained[2], tmp_path / "dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "taken")))
    with pytest.raises(InputError, match=r"is no metadata of torch.distributed.checkpoint \(it asks for posix.mkdir\)"):
        import_dcp(folder, tmp_path / "shelf", allow_pickle=True)
    (tmp_path / "hf").mkdir()
    torch.save({"w": Evil(tmp_path / "taken")}, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(InputError, match="it holds more than tensors, or is broken"):
        import_hf(tmp_path / "hf", tmp_path / "shelf", allow_pickle=True)
    assert not (tmp_path / "taken").exists()
    pickle.loads((folder / ".metadata").read_bytes())  # anyone else's reader would have
    assert (tmp_path / "taken").exists()


@given(st.binary(max_size=300), st.integers(0, 500))
@settings(max_examples=150, deadline=None)
def test_any_metadata_is_read_or_refused(tmp_path_factory, noise: bytes, start: int) -> None:
    path = tmp_path_factory.getbasetemp() / "metadata"
    whole = pickle.dumps({"state_dict_metadata": {}, "storage_data": [1, 2, 3]})
    path.write_bytes(whole[:start] + noise + whole[start + len(noise) :])
    with suppress(InputError):
        foreign._read_metadata(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no file \*.safetensors"),
        ({"model.safetensors": b"no header"}, r"cannot read .*model.safetensors"),
        ({"model.safetensors.index.json": b"{}"}, "has no 'weight_map' from names to files"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"w": "../../x.safetensors"}}'},
            "names the file '../../x.safetensors', which is not in the folder",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, files, message) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        import_hf(tmp_path, tmp_path / "shelf")


def test_nothing_is_overwritten(tmp_path: Path, trained) -> None:
    with pytest.raises(InputError, match="is there already; choose another folder"):
        export_hf(trained[2], tmp_path)
    folder = export_hf(trained[2], tmp_path / "hf")
    with pytest.raises(InputError, match="holds checkpoints already; choose another folder"):
        import_hf(folder, tmp_path / "own")
    assert CheckpointDir(tmp_path / "own").steps() == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: "a text", "its metadata does not fit its tensors"),
        (lambda m: without_properties(m), "its metadata does not fit its tensors"),
        (lambda m: with_size(m, (2**40,)), r"'model\.a' has 1099511627776 elements, and its chunks have 6"),
    ],
)
def test_metadata_that_does_not_fit_its_tensors_is_refused(tmp_path: Path, change, message) -> None:
    saver = Saver(CheckpointDir(tmp_path / "own"), tell=pytest.fail)
    saver.save(1, {"weight/a": torch.ones(2, 3)}, lambda: {"samples": 0})
    saver.wait()
    path = export_dcp(CheckpointDir(tmp_path / "own").newest(pytest.fail), tmp_path / "dcp") / ".metadata"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))
    with pytest.raises(InputError, match=message):
        import_dcp(tmp_path / "dcp", tmp_path / "shelf", allow_pickle=True)
    assert not CheckpointDir(tmp_path / "shelf").steps()


def without_properties(metadata):
    del metadata.state_dict_metadata["model.a"].properties
    return metadata


def with_size(metadata, size):
    metadata.state_dict_metadata["model.a"].size = torch.Size(size)
    return metadata
