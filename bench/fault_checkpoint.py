"""Faults of checkpoints that need no training run: processes killed while they save, damaged files, a full disk."""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from pipedejavu.store import Checkpoint, CheckpointDir, CheckpointError, Saver

Tensors = dict[str, torch.Tensor]


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def flip(data: bytearray, luck: random.Random) -> bytes:
    data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
    return bytes(data)


def cut_off(data: bytearray, luck: random.Random) -> bytes:
    return bytes(data[: luck.randrange(len(data))])


def checkpoints_alone(kills: int, luck: random.Random) -> Iterator[str]:
    """Yields the rows of the table."""
    whole, lost = kill_while_saving(kills, luck)
    yield (
        f"| SIGKILL while a process saves 4 MiB again and again | {kills} | {whole} times the newest is whole;"
        f" {lost} finished checkpoints lost |"
    )
    yield f"| one bit flipped, in any file | {10 * kills} | {damage(10 * kills, luck, flip)} noticed |"
    yield f"| cut off, any file anywhere | {kills} | {damage(kills, luck, cut_off)} noticed |"
    kept = fill_disk(kills // 5, luck)
    if kept is not None:
        yield f"| disk full while saving | {kills // 5} | {kept} times the one before is whole, and said so |"


def kill_while_saving(kills: int, luck: random.Random) -> tuple[int, int]:
    """Kills a process that saves without a pause; returns how often a whole checkpoint was there, and how many lost."""
    whole = lost = 0
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint_dir, done = CheckpointDir(folder), os.pipe()
            _save(checkpoint_dir, 1)
            child = os.fork()
            if not child:
                for step in range(2, 10**6):
                    _save(checkpoint_dir, step)
                    os.write(done[1], step.to_bytes(4, "little"))
            time.sleep(luck.uniform(0.0, 0.2))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(done[1])
            with os.fdopen(done[0], "rb") as pipe:
                data = pipe.read()
            last = int.from_bytes(data[-4:], "little") if data else 1
            told: list[str] = []
            checkpoint_dir.collect()
            found = checkpoint_dir.newest(told.append)
            is_right = found is not None and not told and same(found.tensors(found.names()), _state(found.step))
            whole += is_right
            lost += found is None or found.step < last
    return whole, lost


def damage(trials: int, luck: random.Random, change: Callable[[bytearray, random.Random], bytes]) -> int:
    """Damages any file of a checkpoint; returns how often that was noticed."""
    noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint_dir = CheckpointDir(folder)
        saver = Saver(checkpoint_dir, tell=lambda _: None)
        saver.save(2, {f"w{n}": torch.randn(50) for n in range(4)}, lambda: {"samples": 0})
        saver.wait()
        files = sorted(checkpoint_dir.folder(2).iterdir())
        for _ in range(trials):
            path = luck.choice(files)
            whole = path.read_bytes()
            path.write_bytes(change(bytearray(whole), luck))
            try:
                Checkpoint(checkpoint_dir.folder(2)).verify()
            except CheckpointError:
                noticed += 1
            path.write_bytes(whole)
        Checkpoint(checkpoint_dir.folder(2)).verify()
    return noticed


def fill_disk(trials: int, luck: random.Random) -> int | None:
    """Saves to a disk with too little room; returns how often the checkpoint before stayed whole and was said to."""
    kept = 0
    for _ in range(trials):
        folder = Path(tempfile.mkdtemp())
        size = luck.randint(9 * 2**20, 12 * 2**20)  # one checkpoint has 4 MiB; two fit, and a part of the third
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            return None
        try:
            checkpoint_dir, told = CheckpointDir(folder / "checkpoints"), []
            saver = Saver(checkpoint_dir, tell=told.append)
            for step in (1, 2, 3):
                saver.save(step, _state(step), lambda: {"samples": 0})
                saver.wait()
            found = checkpoint_dir.newest(told.append)
            is_whole = found is not None and found.step == 2 and same(found.tensors(found.names()), _state(2))
            is_clean = not list(checkpoint_dir.path.glob("*.tmp")) and len(told) == 1 and "No space left" in told[0]
            kept += is_whole and is_clean
        finally:
            subprocess.run(["umount", str(folder)], check=True)
            folder.rmdir()
    return kept


def _state(step: int) -> Tensors:
    return {f"w{n}": torch.full((2**16,), float(step)) for n in range(16)}


def _save(checkpoint_dir: CheckpointDir, step: int) -> None:
    saver = Saver(checkpoint_dir, tell=lambda _: None)
    saver.save(step, _state(step), lambda: {"samples": step})
    saver.wait()
