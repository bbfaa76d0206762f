"""Slabs: exact sizes, zero at first, tensors one after the other."""

import ctypes

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
