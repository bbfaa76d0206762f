"""Checkpoints on disk: what is written is read again, and nothing else is."""

import json
import os
import random
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pipedejavu.facts import InputError
from pipedejavu.store import Checkpoint, CheckpointDir, CheckpointError, Manifest, Saver
from pipedejavu.store.shard_file import _TYPES


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every type, a number, one without elements, and a view."""
    made = torch.Generator().manual_seed(seed)
    found = {f"type/{name}": torch.randint(0, 2, (3, 5), generator=made).to(dtype) for dtype, name in _TYPES.items()}
    floats = torch.randn(64, 8, generator=made)
    return {**found, "step": torch.tensor(7.0), "nothing": torch.zeros(0, 4), "view": floats.t(), "ä/ö": floats[3:5]}


def save(checkpoint_dir: CheckpointDir, step: int, tensors=None, **about) -> list[str]:
    """Saves and returns what was told."""
    told: list[str] = []
    saver = Saver(checkpoint_dir, tell=told.append)
    saver.save(step, dict(state(step) if tensors is None else tensors), lambda: {"samples": 10 * step, **about})
    saver.wait()
    return told


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[n].dtype == t.dtype and found[n].shape == t.shape and torch.equal(found[n].float(), t.float())
        for n, t in expected.items()
    )


def test_what_is_saved_is_read_again_by_us_and_by_safetensors(tmp_path: Path) -> None:
    checkpoint_dir = CheckpointDir(tmp_path / "c")
    assert save(checkpoint_dir, 3, loss=0.5, plan={"name": "p"}, facts={"seed": 1}) == []
    found = checkpoint_dir.newest(pytest.fail)
    assert found is not None
    assert same(found.tensors(found.names()), state(3))
    assert same(load_file(found.path / "part-00000.safetensors"), state(3))
    about = found.manifest
    assert (about.step, about.samples, about.loss, about.plan, about.facts) == (3, 30, 0.5, {"name": "p"}, {"seed": 1})
    assert (checkpoint_dir.path / "LATEST").read_text() == "step-3\n"
    assert {path.name for path in checkpoint_dir.path.iterdir()} == {"LATEST", "step-3"}
    assert json.loads((found.path / "manifest.json").read_text())["schema_version"] == 1


def test_parts_of_several_ranks_become_one_checkpoint(tmp_path: Path) -> None:
    checkpoint_dir, store = CheckpointDir(tmp_path), torch.distributed.HashStore()
    tensors = state()
    names = sorted(tensors)
    savers = [Saver(checkpoint_dir, rank=rank, store=(store, 3), tell=pytest.fail) for rank in range(3)]
    for step in (1, 2):
        for rank, saver in enumerate(savers):
            saver.save(step, {n: tensors[n] for n in names[rank::3]}, lambda: {"samples": 0})
    for saver in savers:
        saver.wait()
    found = checkpoint_dir.newest(pytest.fail)
    assert found is not None
    assert found.step == 2
    assert len(found.manifest.parts) == 3
    assert same(found.tensors(names), tensors)


def test_a_checkpoint_waits_for_no_rank_that_is_absent_and_is_lost_with_one_that_dies(tmp_path: Path) -> None:
    checkpoint_dir, store, dead = CheckpointDir(tmp_path), torch.distributed.HashStore(), {0}
    told, tensors = list[str](), state()
    names = sorted(tensors)
    savers = [
        Saver(checkpoint_dir, rank=rank, store=(store, 3), tell=told.append, lead=2, is_dead=dead.__contains__)
        for rank in range(3)
    ]

    def save_at(step: int, *ranks: int) -> None:
        for n, rank in enumerate(ranks):
            mine = {name: tensors[name] for name in names[n :: len(ranks)]}
            savers[rank].save(step, mine, lambda: {"samples": 0}, absent=(0,))
        for rank in ranks:
            savers[rank].wait()

    save_at(1, 1, 2)
    assert told == []
    dead.add(1)
    save_at(2, 2)
    assert told == [
        "the checkpoint of step 2 was not saved: worker 1 died before it had written its part; training goes on, and"
        " the last one is of step 1"
    ]
    found = checkpoint_dir.newest(pytest.fail)
    assert found is not None
    assert found.step == 1
    assert sorted(found.manifest.parts) == ["part-00001.safetensors", "part-00002.safetensors"]
    assert same(found.tensors(names), tensors)


def test_the_newest_two_and_the_best_stay(tmp_path: Path) -> None:
    checkpoint_dir = CheckpointDir(tmp_path)
    for step, loss in enumerate((3.0, 1.0, 2.0, 2.5, 2.2, None), start=1):
        assert save(checkpoint_dir, step, {"w": torch.ones(1)}, loss=loss) == []
    assert checkpoint_dir.steps() == [2, 5, 6]


def test_an_old_one_is_deleted_only_when_the_new_one_reads_back(tmp_path: Path, monkeypatch) -> None:
    checkpoint_dir = CheckpointDir(tmp_path)
    for step in (1, 2):
        save(checkpoint_dir, step, {"w": torch.ones(9)})
    commit = CheckpointDir.commit

    def forgetful(self, step, manifest):
        folder = commit(self, step, manifest)
        flip(folder / "part-00000.safetensors", -1, 0)
        return folder

    monkeypatch.setattr(CheckpointDir, "commit", forgetful)
    (told,) = save(checkpoint_dir, 3, {"w": torch.ones(9)})
    assert told.startswith("the checkpoint of step 3 was written, but tensor 'w' in ")
    assert told.endswith("does not have its hash: it was changed on the disk; older ones are kept")
    assert checkpoint_dir.steps() == [1, 2, 3]


def flip(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.fixture(scope="module")
def shelf_of_two(tmp_path_factory) -> CheckpointDir:
    checkpoint_dir = CheckpointDir(tmp_path_factory.mktemp("shelf"))
    for step in (1, 2):
        save(checkpoint_dir, step)
    return checkpoint_dir


def test_every_flipped_bit_is_noticed(shelf_of_two: CheckpointDir) -> None:
    """Of every byte of the manifest and the header, and of many of the data; no bit is a matter of luck."""
    folder, luck = shelf_of_two.folder(2), random.Random(0)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for byte in sorted({*range(0, len(whole), 7), *(luck.randrange(len(whole)) for _ in range(300))}):
            flip(path, byte, luck.randrange(8))
            with pytest.raises(CheckpointError, match="step-2"):
                Checkpoint(folder).verify()
            path.write_bytes(whole)
    Checkpoint(folder).verify()


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors"])
def test_a_checkpoint_that_was_cut_off_is_named_and_the_one_before_it_used(tmp_path: Path, name, kept) -> None:
    checkpoint_dir = CheckpointDir(tmp_path)
    for step in (1, 2):
        save(checkpoint_dir, step)
    path = checkpoint_dir.folder(2) / name
    os.truncate(path, int(path.stat().st_size * kept))
    told: list[str] = []
    found = checkpoint_dir.newest(told.append)
    assert found is not None
    assert same(found.tensors(found.names()), state(1))
    (sentence,) = told
    assert sentence.startswith("checkpoint step-2 cannot be used and is set aside as step-2.bad: ")
    assert name in sentence
    assert checkpoint_dir.steps() == [1]
    save(checkpoint_dir, 2)  # the step comes again
    assert checkpoint_dir.steps() == [1, 2]
    assert (tmp_path / "step-2.bad").exists()


def test_a_flipped_bit_names_its_tensor(tmp_path: Path) -> None:
    checkpoint_dir = CheckpointDir(tmp_path)
    save(checkpoint_dir, 1)
    entry = Checkpoint(checkpoint_dir.folder(1)).manifest.tensors["view"]
    flip(checkpoint_dir.folder(1) / entry.file, entry.offset, 3)
    told: list[str] = []
    assert checkpoint_dir.newest(told.append, allow_restart=True) is None
    assert "tensor 'view' in" in told[0]


def test_what_was_never_finished_is_ignored_and_collected(tmp_path: Path) -> None:
    checkpoint_dir = CheckpointDir(tmp_path)
    save(checkpoint_dir, 1)
    (checkpoint_dir.staging_dir(2) / "part-00000.safetensors").write_bytes(b"half")
    (tmp_path / "LATEST.tmp").write_text("step-2")
    found = checkpoint_dir.newest(pytest.fail)
    assert found is not None
    assert found.step == 1
    checkpoint_dir.collect()
    assert {path.name for path in tmp_path.iterdir()} == {"LATEST", "step-1"}


def test_a_manifest_of_another_schema_is_refused(tmp_path: Path) -> None:
    checkpoint_dir = CheckpointDir(tmp_path)
    save(checkpoint_dir, 1)
    path = checkpoint_dir.folder(1) / "manifest.json"
    path.write_bytes(Checkpoint(checkpoint_dir.folder(1)).manifest.replace(schema_version=2).to_bytes())
    with pytest.raises(CheckpointError, match="has schema version 2 and this program reads 1; use the version of"):
        Checkpoint(checkpoint_dir.folder(1))


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    checkpoint_dir = CheckpointDir(tmp_path)
    save(checkpoint_dir, 1, {"w": torch.ones(4)})
    found = Checkpoint(checkpoint_dir.folder(1)).manifest
    part, entry = found.parts["part-00000.safetensors"], found.tensors["w"]
    for parts, changed, fault in [
        ({"../secret": part}, {"file": "../secret"}, "part '../secret' is no name of a part"),
        (found.parts, {"file": "part-00001.safetensors"}, "is in 'part-00001.safetensors', which is no part"),
        (found.parts, {"shape": (2**40,)}, "tensor 'w' does not fit into 'part-00000.safetensors'"),
        (found.parts, {"shape": (-4,)}, "tensor 'w' does not fit"),
        (found.parts, {"dtype": "O"}, "tensor 'w' has the unknown type 'O'"),
    ]:
        text = found.model_copy(update={"parts": parts, "tensors": {"w": entry.model_copy(update=changed)}})
        with pytest.raises(CheckpointError, match=fault):
            Manifest.from_bytes(Manifest.to_bytes(text), "manifest.json")


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 400))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_manifest_is_read_or_refused(shelf_of_two: CheckpointDir, noise: bytes, start: int, count: int) -> None:
    """Bytes of strangers, sealed as if they were ours: a typed error or a manifest, never anything else."""
    _, _, rest = (shelf_of_two.folder(2) / "manifest.json").read_bytes().partition(b"\n")
    changed = rest[:start] + noise + rest[start + count :]
    sealed = b'{"seal": "%s",\n' % sha256(changed).hexdigest().encode() + changed
    for data in (noise, sealed):
        with suppress(CheckpointError):
            Manifest.from_bytes(data, "manifest.json")


def test_a_type_that_no_file_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a checkpoint cannot hold 'z' of type torch\.complex64; keep it in another"):
        save(CheckpointDir(tmp_path), 1, {"z": torch.zeros(2, dtype=torch.complex64)})
