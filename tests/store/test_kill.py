"""A save that is killed, cut off from its power or out of space, at every point: a whole checkpoint is always there."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.store import CheckpointDir, Saver
from pipedejavu.store.checkpoint import Checkpoint
from tests.processes import ROOT

STEPS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
"""All that saving asks of the system."""


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((500,), float(step)), "b": torch.arange(7) + step}


def save(checkpoint_dir: CheckpointDir, step: int) -> list[str]:
    told: list[str] = []
    saver = Saver(checkpoint_dir, tell=told.append)
    saver.save(step, weights(step), lambda: {"samples": step, "loss": float(step)})
    saver.wait()
    return told


def check(path: Path, allowed: set[int]) -> int:
    """Returns the step of the newest checkpoint, which must be whole and what was saved."""
    checkpoint_dir = CheckpointDir(path)
    found = checkpoint_dir.newest(lambda text: pytest.fail(text))
    assert found is not None
    assert found.step in allowed
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in weights(found.step).items())
    return found.step


@pytest.fixture
def checkpoint_dir(tmp_path: Path) -> CheckpointDir:
    made = CheckpointDir(tmp_path / "base")
    for step in (1, 2, 3):
        assert save(made, step) == []
    assert made.steps() == [1, 2, 3]  # the best, and the newest two; the next save deletes the second
    return made


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from pipedejavu.store import CheckpointDir
from tests.store.test_kill import STEPS, check, save

torch.set_num_threads(1)
base, work = map(Path, sys.argv[1:])

def die_at(last, halves):
    count = 0
    def counted(name, call):
        def run(*args, **kwargs):
            nonlocal count
            count += 1
            if count == last:
                if halves and name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return run
    for name in STEPS:
        setattr(os, name, counted(name, getattr(os, name)))

seen = []
for halves in (False, True):
    for last in range(1, 1000):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        child = os.fork()
        if not child:
            die_at(last, halves)
            save(CheckpointDir(work), 4)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        seen.append(check(work, {3, 4}))
        latest = (work / "LATEST").read_text().strip()
        assert (work / latest).is_dir(), latest
        CheckpointDir(work).collect()
        assert not list(work.glob("*.tmp"))
        save(CheckpointDir(work), 5)
        check(work, {5})
        if status == 0:
            break
print(len(seen), seen.count(3), seen.count(4))
"""


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(checkpoint_dir: CheckpointDir, tmp_path: Path) -> None:
    """Real SIGKILLs before every call to the system, and in the middle of every write."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(checkpoint_dir.path), str(tmp_path / "work")],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    points, before, after = map(int, done.stdout.split())
    assert points == before + after
    assert before > 10
    assert after > 10


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("name", ["write", "fsync", "rename", "mkdir"])
def test_a_disk_that_refuses_costs_a_checkpoint_and_nothing_else(
    checkpoint_dir: CheckpointDir, monkeypatch, name, fault
) -> None:
    """At every such call: what was there stays, the half is removed, a sentence says why, the next save is whole."""
    call, failures = getattr(os, name), 0
    for last in range(1, 100):
        count = 0

        def counted(*args, at: int = last, **kwargs):
            nonlocal count
            count += 1
            if count == at:
                raise OSError(fault, os.strerror(fault))
            return call(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, counted)
            told = save(checkpoint_dir, 10 + last)
        if count < last:
            break
        newest = check(checkpoint_dir.path, {*range(10 + last + 1), 3})
        if newest != 10 + last:
            failures += 1
            assert f"the checkpoint of step {10 + last} was not saved: {os.strerror(fault)}" in told[0]
            assert told[0].endswith(f"training goes on, and the last one is of step {newest}")
            assert len(told) == 1
            assert not list(checkpoint_dir.path.glob("step-*.tmp"))
        elif told:
            said = os.strerror(fault)
            assert told in (
                [f"the checkpoint of step {newest} was saved, but LATEST does not name it: {said}"],
                [f"the checkpoint of step {newest} was written, but {said}; older ones are kept"],
            )
    assert failures >= 1
    assert save(checkpoint_dir, 200) == []
    check(checkpoint_dir.path, {200})


def test_a_full_disk_says_so_and_keeps_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        checkpoint_dir = CheckpointDir(folder / "checkpoints")
        assert save(checkpoint_dir, 1) == []
        told: list[str] = []
        saver = Saver(checkpoint_dir, tell=told.append)
        saver.save(2, {"big": torch.zeros(2**20)}, lambda: {"samples": 2})
        saver.wait()
        assert told == [
            "the checkpoint of step 2 was not saved: No space left on device (worker 0 had 4.0 MiB to write);"
            " training goes on, and the last one is of step 1"
        ]
        check(checkpoint_dir.path, {1})
        assert save(checkpoint_dir, 3) == []  # what the failed one had taken is free again
        check(checkpoint_dir.path, {3})
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# A power cut: what was not synced may be lost, names and contents apart.


@dataclass
class Node:
    """A file or a folder: as a reader sees it, and as the disk has it."""

    entries: dict[str, "Node"] | None = None
    content: bytes = b""
    durable: "dict[str, Node] | bytes" = b""

    @classmethod
    def of(cls, path: Path) -> "Node":
        if path.is_file():
            return cls(None, path.read_bytes(), path.read_bytes())
        entries = {child.name: cls.of(child) for child in path.iterdir()}
        return cls(entries, b"", dict(entries))

    def sync(self) -> None:
        self.durable = self.content if self.entries is None else dict(self.entries)

    def left(self, has_names: bool) -> "Left":
        """Returns what a power cut leaves: contents that were synced, under the names of now or under those synced."""
        if self.entries is None:
            assert isinstance(self.durable, bytes)
            return self.durable
        assert isinstance(self.durable, dict)
        return {name: node.left(has_names) for name, node in (self.entries if has_names else self.durable).items()}


Left = bytes | dict[str, "Left"]


def put(left: Left, path: Path) -> Path:
    if isinstance(left, bytes):
        path.write_bytes(left)
    else:
        path.mkdir()
        for name, inside in left.items():
            put(inside, path / name)
    return path


@dataclass
class Disk:
    """Follows what is asked of the system, and after each call is asked what a power cut would leave."""

    path: Path
    after: Callable[["Disk"], object]
    root: Node = field(init=False)
    files: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = Node.of(self.path)

    def at(self, path: str | Path) -> tuple[Node, str]:
        node, *names = self.root, *Path(path).relative_to(self.path).parts
        for name in names[:-1]:
            assert node.entries is not None
            node = node.entries[name]
        return node, names[-1] if names else ""

    def follow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename", "replace", "mkdir")}

        def opened(path, flags, *rest, **kwargs):
            file = calls["open"](path, flags, *rest, **kwargs)
            if str(path).startswith(str(self.path)):
                folder, name = self.at(path)
                if flags & os.O_CREAT and folder.entries is not None:
                    folder.entries[name] = Node()
                self.files[file] = folder.entries[name] if name and folder.entries is not None else folder
            return file

        def wrote(file, data):
            count = calls["write"](file, data)
            if file in self.files:
                self.files[file].content += bytes(data[:count])
                self.after(self)
            return count

        def synced(file):
            calls["fsync"](file)
            self.files[file].sync()
            self.after(self)

        def renamed(name):
            def run(old, new, **kwargs):
                calls[name](old, new, **kwargs)
                (source, own), (target, new_name) = self.at(old), self.at(new)
                assert source.entries is not None
                assert target.entries is not None
                target.entries[new_name] = source.entries.pop(own)
                self.after(self)

            return run

        def made(path, *rest, **kwargs):
            calls["mkdir"](path, *rest, **kwargs)
            folder, name = self.at(path)
            assert folder.entries is not None
            folder.entries[name] = Node({}, b"", {})
            self.after(self)

        def removed(path, **kwargs):
            folder, name = self.at(path)
            assert folder.entries is not None
            folder.entries.pop(name, None)
            self.after(self)

        for name, call in {"open": opened, "write": wrote, "fsync": synced, "mkdir": made}.items():
            monkeypatch.setattr(os, name, call)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, renamed(name))
        monkeypatch.setattr(shutil, "rmtree", removed)


def test_a_power_cut_at_any_point_leaves_a_whole_checkpoint(
    checkpoint_dir: CheckpointDir, tmp_path: Path, monkeypatch
) -> None:
    cuts: list[Left] = []
    with monkeypatch.context() as patch:
        Disk(
            checkpoint_dir.path, lambda disk: cuts.extend(disk.root.left(has_names) for has_names in (False, True))
        ).follow(patch)
        assert save(checkpoint_dir, 4) == []
    assert len(cuts) > 20
    for half in (cuts[::2], cuts[1::2]):
        seen = []
        for number, left in enumerate(half):
            path = put(left, tmp_path / f"cut{number}")
            seen.append(check(path, {3, 4}))
            Checkpoint(path / (path / "LATEST").read_text().strip()).verify()
            shutil.rmtree(path)
        assert seen == sorted(seen)  # what is once on the disk stays
        assert set(seen) == {3, 4}
