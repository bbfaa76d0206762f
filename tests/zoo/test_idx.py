import gzip
import random
import struct
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from pipedejavu.facts import InputError
from pipedejavu.zoo.idx import read_idx

BODY = bytes(range(2 * 3 * 4))
GOOD = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 3, 4) + BODY
PACKED = gzip.compress(GOOD, mtime=0)


def written(folder: Path, content: bytes) -> Path:
    path = folder / "some-idx3-ubyte"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [GOOD, PACKED, gzip.compress(GOOD[:9], mtime=0) + gzip.compress(GOOD[9:], mtime=0)])
def test_a_file_is_read_plain_or_compressed(content: bytes, tmp_path: Path) -> None:
    assert torch.equal(read_idx(written(tmp_path, content), 3), torch.arange(24, dtype=torch.uint8).view(2, 3, 4))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "begins with nothing, but an IDX file of bytes in 3 dimensions begins with 00000803"),
        (b"\x00\x00\x08\x01" + GOOD[4:], "begins with 00000801, but an IDX file"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "begins with 00000d03, but an IDX file"),
        (GOOD[:10], "ends inside its header of 3 sizes; get the file again"),
        (GOOD[:-1], "says that it holds 2×3×4 bytes, but has only 23"),
        (GOOD + b"x", "says that it holds 2×3×4 bytes, but has more"),
        (GOOD[:4] + b"\xff" * 12, "says that it holds 4294967295×4294967295×4294967295 bytes; 1 to"),
        (GOOD[:4] + bytes(12), "says that it holds 0×0×0 bytes; 1 to 2147483648 can be read"),
        (PACKED[:-12], "ends in the middle of its gzip stream"),
        (PACKED[:10] + b"\xff" * 30, "is not valid gzip"),
        (b"\x1f\x8b\x00", "gzip"),
        (b"\x80\x04]\x94.", "begins with 80045d94"),
    ],
)
def test_a_broken_file_says_what_is_wrong(content: bytes, text: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(InputError) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)
    assert text in str(caught.value)


def test_a_header_that_lies_costs_no_memory(tmp_path: Path) -> None:
    """A plain file ends; a gzip could hold it, so that what it may promise is bounded."""
    for count, fault in ((1 << 5, "but has only 24"), (1 << 11, "2048×1024×1024 bytes, more than 100 times its own")):
        content = GOOD[:4] + struct.pack(">3I", count, 1 << 10, 1 << 10) + BODY
        with pytest.raises(InputError, match=fault):
            read_idx(written(tmp_path, gzip.compress(content)), 3)
        with pytest.raises(InputError, match="but has only 24"):
            read_idx(written(tmp_path, content), 3)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*nowhere: No such file"):
        read_idx(tmp_path / "nowhere", 3)


@pytest.mark.parametrize("start", [GOOD, PACKED])
def test_chance_never_brings_another_error(start: bytes, tmp_path: Path) -> None:
    draw = random.Random(0)
    num_refused = 0
    for _ in range(300):
        content = bytearray(start)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        del content[draw.choice([len(content), draw.randrange(len(content))]) :]
        try:
            assert read_idx(written(tmp_path, bytes(content)), 3).numel() > 0
        except InputError:
            num_refused += 1
    assert num_refused > 100
