"""The run folder on a disk that refuses."""

import errno
import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pipedejavu.facts import InputError
from pipedejavu.train import RunFolder


def steps(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]


@pytest.mark.parametrize("room_bytes", [0, 5])
def test_metrics_wait_for_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
    """A full disk takes nothing, or the beginning of a line."""
    folder, write = RunFolder(tmp_path), os.write
    folder.add_metrics({"step": 1})

    def refuse(file: int, data: bytes) -> int:
        if not room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:room_bytes])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        folder.add_metrics({"step": 2})
        folder.add_metrics({"step": 3})
        assert steps(folder) == [1]
    folder.add_metrics({"step": 4})
    assert steps(folder) == [1, 2, 3, 4]


def test_weights_that_cannot_be_written_leave_the_run_to_go_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "gone")
    with pytest.raises(InputError, match=r"cannot write .*model\.safetensors: .*; make room, and go on with --resume"):
        folder.write_model({"w": torch.zeros(2)})


@pytest.mark.parametrize("line", [b"[1]", b"\xff\xfe", b'{"step": "two"}', b'{"elapsed_s": null}', b"[" * 100_000, b""])
def test_lines_of_others_in_the_metrics_are_left_out(tmp_path: Path, line: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(line + b'\n{"step": 1, "elapsed_s": 2.5}\n')
    assert folder.elapsed_s() == 2.5
