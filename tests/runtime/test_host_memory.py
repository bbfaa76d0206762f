"""Slabs: exact sizes, zero at first, tensors one after the other."""

import ctypes
import re
import sys
from pathlib import Path

import pytest
import torch

from pipedejavu.runtime.host_memory import ALIGN_BYTES, Slab, aligned


def make(size_bytes: int) -> Slab:
    def zero(address: int, size: int, progress) -> None:
        ctypes.memset(address, 0, size)
        progress(size)

    return Slab(size_bytes, zero, is_pinned=False, progress=lambda _: None)


def test_tensors_follow_each_other_and_start_again_after_a_rewind() -> None:
    slab = make(aligned(10) + aligned(12))
    first, second = slab.take(5, torch.int16), slab.take(3, torch.float32)
    assert second.data_ptr() - first.data_ptr() == ALIGN_BYTES
    assert not first.any()
    assert not second.any()
    slab.rewind()
    assert slab.take(1, torch.uint8).data_ptr() == first.data_ptr()


def test_a_slab_gives_no_more_than_its_size() -> None:
    slab = make(aligned(4))
    assert slab.take(0, torch.float32).numel() == 0
    slab.take(1, torch.float32)
    with pytest.raises(AssertionError, match="the slab is too small"):
        slab.take(1, torch.float32)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_are_huge_where_the_system_has_them_and_stay_in_this_process() -> None:
    size = 1 << 24
    slab = make(size)
    address = slab.take(size, torch.uint8).data_ptr()
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    spans = {tuple(int(end, 16) for end in text.split(" ", 1)[0].split("-")): text for text in maps if text}
    text = next(text for (start, end), text in spans.items() if start <= address < end)
    flags = next(line for line in text.splitlines() if line.startswith("VmFlags")).split()
    assert "hg" in flags  # advised to be huge
    assert "dc" in flags  # not copied into forked processes
    if "never" not in re.findall(r"\[(\w+)\]", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()):
        assert int(re.search(r"AnonHugePages: +(\d+) kB", text)[1]) > 0  # type: ignore[index]
