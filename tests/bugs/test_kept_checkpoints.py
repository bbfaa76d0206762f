"""Checkpoints that cannot be read are not lost: only damage that is proved sets one aside, and nothing deletes it."""

import errno
import os
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from torch import nn

from pipedejavu.facts import write_file
from pipedejavu.session import Checkpoints, Trainer
from pipedejavu.store import Checkpoint, CheckpointDir, CheckpointError, Saver
from tests.cli.test_main import say


def save(checkpoint_dir: CheckpointDir, *steps: int) -> None:
    saver = Saver(checkpoint_dir, tell=pytest.fail)
    for step in steps:
        saver.save(step, {"weight/w": torch.full((4,), float(step))}, lambda: {"samples": 0})
    saver.wait()


def seal_anew(folder: Path, **changes) -> None:
    """Gives a checkpoint a manifest whose seal is right."""
    manifest = Checkpoint(folder).manifest.model_copy(update=changes)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())


def flip(folder: Path) -> None:
    path = folder / "part-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(inside.relative_to(path)): inside.read_bytes() for inside in sorted(path.rglob("*")) if inside.is_file()
    }


def newer(checkpoint_dir: CheckpointDir, _: pytest.MonkeyPatch) -> None:
    """A program of next year wrote it, with a field that no one knows yet."""
    path = checkpoint_dir.folder(20) / "manifest.json"
    seal_anew(checkpoint_dir.folder(20), schema_version=2, facts={"of": "next year"})
    rest = path.read_bytes().partition(b"\n")[2].replace(b'"facts"', b'"deeds"')
    path.write_bytes(b'{"seal": "%s",\n' % sha256(rest).hexdigest().encode() + rest)


def refuse(number: int):
    def inject(checkpoint_dir: CheckpointDir, monkeypatch: pytest.MonkeyPatch) -> None:
        part, read = checkpoint_dir.folder(20) / "part-00000.safetensors", os.open

        def fail(path, *arguments, **more):
            if path == part:
                raise OSError(number, os.strerror(number), str(path))
            return read(path, *arguments, **more)

        monkeypatch.setattr(os, "open", fail)

    return inject


def rename(checkpoint_dir: CheckpointDir, _: pytest.MonkeyPatch) -> None:
    shutil.copytree(checkpoint_dir.folder(20), checkpoint_dir.folder(40))


STOPS = {
    "a newer schema": (
        newer,
        "has schema version 2 and this program reads 1; use the version of pipedejavu that wrote",
    ),
    "no permission": (refuse(errno.EACCES), "part-00000.safetensors: Permission denied"),
    "an I/O error": (refuse(errno.EIO), "part-00000.safetensors: Input/output error"),
    "another step's name": (rename, "step-40 has the manifest of step 20: it was renamed or copied there"),
}


@pytest.mark.parametrize("name", STOPS)
def test_what_is_not_proved_to_be_damaged_stops_and_stays(name: str, tmp_path: Path, monkeypatch) -> None:
    checkpoint_dir, (inject, reason) = CheckpointDir(tmp_path), STOPS[name]
    save(checkpoint_dir, 10, 20)
    before = tree(tmp_path)
    inject(checkpoint_dir, monkeypatch)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint_dir.newest(pytest.fail)
    with pytest.raises(CheckpointError, match=reason):
        Checkpoints(tmp_path).load(nn.Linear(2, 2))
    monkeypatch.undo()
    after = tree(tmp_path)
    assert before.keys() <= after.keys()
    assert checkpoint_dir.steps() == ([10, 20, 40] if name == "another step's name" else [10, 20])
    assert not list(tmp_path.glob("*.bad*"))


def test_a_renamed_checkpoint_survives_later_saves(tmp_path: Path) -> None:
    checkpoint_dir = CheckpointDir(tmp_path)
    save(checkpoint_dir, 10, 20)
    checkpoint_dir.folder(10).rename(checkpoint_dir.folder(15))
    save(checkpoint_dir, 30, 40, 50)
    assert checkpoint_dir.steps() == [15, 40, 50]


def test_damaged_ones_are_kept_under_names_of_their_own(tmp_path: Path) -> None:
    checkpoint_dir, told = CheckpointDir(tmp_path), []
    save(checkpoint_dir, 1)
    for _ in range(3):
        save(checkpoint_dir, 2)
        flip(checkpoint_dir.folder(2))
        found = checkpoint_dir.newest(told.append)
        assert found is not None
        assert found.step == 1
    save(checkpoint_dir, 3, 4, 5)
    assert {path.name for path in tmp_path.glob("*.bad*")} == {"step-2.bad", "step-2.bad-2", "step-2.bad-3"}
    assert told[2].startswith(
        "checkpoint step-2 cannot be used and is set aside as step-2.bad-3: tensor 'weight/w' in "
    )


def test_no_loop_begins_at_step_0_unless_it_is_told_to(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load(model, optimizer) == (0, 0)
    checkpoints.save(model, optimizer, step=3)
    checkpoints.wait()
    flip(tmp_path / "step-3")
    before = tree(tmp_path)
    reason = r"none of them can be used; step-3: .* does not have its hash.*allow_restart=True\) begins at step 0"
    trainer = Trainer(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), loss, sample=(torch.ones(4, 2), torch.ones(4, 2))
    )
    for load in (lambda: checkpoints.load(model, optimizer), lambda: trainer.load(tmp_path)):
        with pytest.raises(CheckpointError, match=reason):
            load()
        assert tree(tmp_path) == before
    assert checkpoints.load(model, optimizer, allow_restart=True) == (0, 0)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-3.bad"]
    with pytest.raises(CheckpointError, match="has held checkpoints, and none of them can be used"):
        trainer.load(tmp_path)
    assert trainer.load(tmp_path, allow_restart=True) == 0


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((output - targets) ** 2).sum()


def test_a_save_that_was_killed_does_not_hinder_the_next_of_its_step(tmp_path: Path) -> None:
    checkpoint_dir = CheckpointDir(tmp_path)
    (checkpoint_dir.staging_dir(7) / "part-00000.safetensors").write_bytes(b"half of it")
    save(checkpoint_dir, 7)
    assert checkpoint_dir.steps() == [7]


def test_export_only_reads(tmp_path: Path) -> None:
    checkpoint_dir, command = CheckpointDir(tmp_path / "run" / "checkpoints"), ("export", str(tmp_path / "run"))
    save(checkpoint_dir, 1, 2)
    flip(checkpoint_dir.folder(2))
    before = tree(tmp_path / "run")
    done = say(*command, str(tmp_path / "out"))
    assert done.code == 0
    assert "checkpoint step-2 cannot be used: tensor 'weight/w' in " in done.stderr
    assert tree(tmp_path / "run") == before
    seal_anew(checkpoint_dir.folder(1), schema_version=2)
    done = say(*command, str(tmp_path / "again"))
    assert done.code == 2
    assert "has schema version 2" in done.stderr
    done = say("runs", str(tmp_path / "run"))  # whose options are gone
    assert (done.code, done.stdout) == (2, "")
    assert "options.json: No such file or directory" in done.stderr


def test_a_file_is_on_the_disk_when_its_write_returns(tmp_path: Path, monkeypatch) -> None:
    synced: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (synced.append(str(Path(f"/proc/self/fd/{file}").readlink())), sync(file))
    )
    write_file(tmp_path / "a.json", "{}")
    file, folder = synced
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}/a\.json\.[0-9a-f]{{16}}\.tmp", file)
    assert folder == str(tmp_path)
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "b.json").symlink_to(tmp_path / "elsewhere")
    write_file(tmp_path / "b.json", "{}")
    assert (tmp_path / "elsewhere").read_text() == "precious"
    assert not (tmp_path / "b.json").is_symlink()
