"""Channels and sums of two processes on one GPU: content, order, slots that are reused and grow, late streams."""

import random
import time

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from pipedejavu.facts.message_memory import MOST_SLOTS
from pipedejavu.runtime.cuda_ipc import BLOCK_BYTES, can_share, find_device, visible_gpus
from pipedejavu.runtime.memory_channel import ReceiveEnd, SendEnd
from pipedejavu.runtime.memory_group import MemoryGroup
from pipedejavu.runtime.memory_slot import GpuEnds
from pipedejavu.runtime.peer_socket import Address, PeerListener, connect_peer

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
SIZES = (5, 100_000, 1, 700_000, 0, 3_000_000, 100_000, 100_000, 2)
CYCLES = 2_000_000


def late(source):
    """Delays the current stream or this process at random."""
    if source.random() < 0.4:
        torch.cuda._sleep(int(source.random() * CYCLES))
    if source.random() < 0.2:
        time.sleep(source.random() * 3e-3)


def tensors_of(n):
    generator = torch.Generator("cuda").manual_seed(n)
    whole = torch.randn(SIZES[n % len(SIZES)], 2, generator=generator, device="cuda")
    return whole, whole[:, 1], whole > 0, whole.bfloat16(), torch.tensor(n, device="cuda"), whole.t().double()


def exchange(rank, address):
    """Two ranks send to each other and sum, all on streams of their own; what arrives is compared at the end."""
    ends = GpuEnds(torch.device("cuda", 0), torch.device("cuda", 0))
    if rank == 0:
        peers = [peer for _, peer in sorted(LISTENER[0].accept([(1, n) for n in range(3)]).items())]
    else:
        peers = [connect_peer(address, 1, n) for n in range(3)]
    sender, receiver = SendEnd(peers[rank], ends), ReceiveEnd(peers[1 - rank], ends)
    group = MemoryGroup(rank, {1 - rank: peers[2]}, {1 - rank: ends})
    source, streams = random.Random(rank), [torch.cuda.Stream() for _ in range(3)]
    arrived, sums = [], []
    for n in range(60):
        with torch.cuda.stream(streams[0]):
            late(source)
            sender.send(tensors_of(n))
        with torch.cuda.stream(streams[1]):
            late(source)
            arrived.append(receiver.receive())
        with torch.cuda.stream(streams[2]):
            late(source)
            vector = tensors_of(n)[0].reshape(-1) * (rank + 1)
            sums.append(group.add_up(vector))
    torch.cuda.synchronize()
    for n in range(60):
        expected = tensors_of(n)
        assert [(t.dtype, t.shape) for t in arrived[n]] == [(t.dtype, t.shape) for t in expected]
        assert all(torch.equal(a, b) for a, b in zip(arrived[n], expected, strict=True)), n
        assert torch.equal(sums[n], expected[0].reshape(-1) + expected[0].reshape(-1) * 2), n
    assert len(sender._slots) <= MOST_SLOTS["gpu"]
    sender.flush()
    assert not sender._replaced
    assert all(slot.size_bytes % BLOCK_BYTES == 0 for slot in sender._slots)
    receiver.close()
    sender.close()
    group.close()


LISTENER = []


def run_rank(rank, addresses):
    """The first rank listens; the address passes through a queue, as ranks do it through their process group."""
    if rank == 0:
        LISTENER.append(PeerListener())
        addresses.put(tuple(LISTENER[0].address))
        exchange(0, None)
    else:
        exchange(1, Address(*addresses.get()))


@pytest.mark.parametrize("kind", [pytest.param("gpu", marks=on_gpu)])
def test_two_processes_on_one_gpu_exchange_and_add_up(kind):
    addresses = torch.multiprocessing.get_context("spawn").SimpleQueue()
    start_processes(run_rank, args=(addresses,), nprocs=2, start_method="spawn")


@pytest.mark.parametrize("kind", [pytest.param("gpu", marks=on_gpu)])
def test_a_gpu_is_found_by_its_uuid_and_can_be_shared(kind):
    assert find_device(visible_gpus()[0]) == torch.device("cuda", 0)
    assert find_device("another") is None
    assert can_share(torch.device("cuda", 0))


def test_without_a_gpu_none_is_found():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert visible_gpus() == ()
    assert find_device("any") is None
    assert not can_share(torch.device("cuda", 0))
