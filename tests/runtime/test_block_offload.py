"""Offload during the forward pass: each tensor is copied once, and told from others at its address."""

from collections.abc import Iterator

import pytest
import torch

from pipedejavu.runtime import block_offload
from pipedejavu.runtime.block_offload import BlockOffload, OffloadedTensor
from pipedejavu.runtime.lane import CopyLanes


@pytest.fixture
def lanes() -> Iterator[CopyLanes]:
    lanes = CopyLanes(torch.device("cpu"))
    yield lanes
    lanes.copy_in.close()
    lanes.copy_out.close()


def test_a_tensor_that_several_operations_save_is_copied_once(
    lanes: CopyLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, take = [], OffloadedTensor.take
    monkeypatch.setattr(block_offload, "MIN_BYTES", 0)
    monkeypatch.setattr(OffloadedTensor, "take", lambda copy: taken.append(copy) or take(copy))
    offload, x = BlockOffload(lanes), torch.randn(8, requires_grad=True)
    offload.run(0, torch.nn.Identity(), lambda x: (x.sin() + x.cos()).sum(), x).backward()
    assert len(taken) == 2
    assert taken[0] is taken[1]
    assert torch.equal(x.grad, x.detach().cos() - x.detach().sin())


def test_a_tensor_at_the_address_of_an_earlier_one_is_another(lanes: CopyLanes) -> None:
    memory = bytearray(32)
    first = torch.frombuffer(memory, dtype=torch.float32)
    offloaded = OffloadedTensor(first, lanes)
    offloaded.out.wait_on_host()
    assert offloaded.is_copy_of(first.detach())
    del first
    assert not offloaded.is_copy_of(torch.frombuffer(memory, dtype=torch.float32))
