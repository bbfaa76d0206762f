"""Which wire two ranks take, for every kind of rank, and the same whichever comes first."""

from itertools import product

import pytest
import torch

from pipedejavu.engine.wire_choice import WireEnd, WireKind, choose_group_wire, choose_wire
from pipedejavu.engine.wire_end import describe_end, open_listener

CPU = WireEnd(host="a", device="cpu", shares_memory=True)
GPU = WireEnd(
    host="a", device="gpu", gpu="g0", reachable=("g0", "g1"), shares_memory=True, shares_gpu=True, has_nccl=True
)
PEER = GPU.replace(gpu="g1")
ALONE = GPU.replace(gpu="g2", reachable=("g2",))
AWAY = GPU.replace(host="b", gpu="g7", reachable=("g7",))
IPC, NCCL, MEMORY, GLOO = WireKind


@pytest.mark.parametrize(
    ("one", "other", "kind", "reason"),
    [
        (CPU, CPU, MEMORY, "the ranks are processes of one host and are not all on GPUs"),
        (CPU, GPU, MEMORY, "the ranks are processes of one host and are not all on GPUs"),
        (GPU, GPU, IPC, "the ranks share one GPU"),
        (GPU, PEER, IPC, "the ranks map each other's GPU memory"),
        (GPU, ALONE, NCCL, "the ranks have different GPUs and cannot map each other's GPU"),
        (GPU, AWAY, NCCL, "the ranks have different GPUs and are not processes of one host"),
        (GPU, PEER.replace(shares_gpu=False), NCCL, "the ranks have different GPUs and cannot map each other's GPU"),
        (GPU, GPU.replace(shares_gpu=False), MEMORY, "are processes of one host and cannot map each other's GPU"),
        (GPU, ALONE.replace(has_nccl=False), MEMORY, "are processes of one host and cannot map each other's GPU"),
        (GPU, AWAY.replace(has_nccl=False), GLOO, "the ranks are not processes of one host"),
        (GPU, CPU.replace(host="b"), GLOO, "the ranks are not processes of one host"),
        (CPU, CPU.replace(host="b"), GLOO, "the ranks are not processes of one host"),
        (CPU, CPU.replace(shares_memory=False), GLOO, "this system has no memory files or no abstract sockets"),
    ],
)
def test_two_ranks_take_the_fastest_wire_that_both_have(one, other, kind, reason):
    assert choose_wire(one, other) == choose_wire(other, one)
    assert choose_wire(one, other).kind == kind
    assert reason in choose_wire(one, other).reason


def test_two_ranks_on_one_gpu_never_take_nccl():
    """NCCL refuses them, whatever else they lack."""
    for memory, gpu, host in product((True, False), (True, False), ("a", "b")):
        other = GPU.replace(shares_memory=memory, shares_gpu=gpu, host=host)
        assert choose_wire(GPU, other).kind != NCCL


def test_a_group_takes_what_all_of_its_members_have():
    assert choose_group_wire([GPU, PEER, GPU]).kind == IPC
    assert choose_group_wire([GPU, PEER, CPU]).kind == MEMORY
    assert choose_group_wire([GPU, PEER, AWAY]).kind == NCCL
    assert choose_group_wire([GPU, GPU, AWAY]).kind == GLOO  # two on one GPU, and not all of one host
    assert choose_group_wire([GPU, PEER, CPU.replace(host="b")]).kind == GLOO


def test_what_a_rank_tells_is_read_back_and_another_process_of_this_host_shares_memory():
    listener = open_listener()
    end = describe_end(torch.device("cpu"), listener)
    assert WireEnd.from_json(end.to_json()) == end
    assert end.shares_memory
    assert choose_wire(end, end.replace(name="another")).kind == MEMORY
    assert not describe_end(torch.device("cpu"), None).shares_memory
    assert listener.accept([]) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_can_be_shared_by_two_ranks():
    listener = open_listener()
    end = describe_end(torch.device("cuda", 0), listener)
    listener.close()
    assert end.shares_gpu
    assert choose_wire(end, end).kind == IPC
