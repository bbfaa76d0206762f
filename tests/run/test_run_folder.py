"""The run folder on a disk that refuses."""

import errno
import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from pipedejavu.run import RunFolder


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


@pytest.mark.parametrize("line", [b"[1]", b"\xff\xfe", b'{"step": "two"}', b'{"elapsed_s": null}', b"[" * 100_000, b""])
def test_lines_of_others_in_the_metrics_are_left_out(tmp_path: Path, line: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(line + b'\n{"step": 1, "elapsed_s": 2.5}\n')
    assert folder.elapsed_s() == 2.5
