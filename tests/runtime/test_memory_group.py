"""Sums through shared memory: all members get the bits of the sum in the order of the members."""

import random
import socket
import threading
import time

import pytest
import torch

from pipedejavu.runtime import memory_group
from pipedejavu.runtime.memory_group import MemoryGroup
from pipedejavu.runtime.peer_socket import LostPeerError, PeerSocket


def make_groups(size):
    peers = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one + 1, size):
            peers[one][other], peers[other][one] = map(PeerSocket, socket.socketpair())
    return [MemoryGroup(member, peers[member]) for member in range(size)]


def together(call, size):
    """Runs a call per member side by side; returns what each returned or raised."""
    results = [None] * size

    def run(member):
        try:
            results[member] = call(member)
        except Exception as error:
            results[member] = error

    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_members_get_the_bits_of_the_sum_in_their_order(size, dtype, monkeypatch):
    """Vectors of many sizes, in parts, in turn, with members that are late at random."""
    monkeypatch.setattr(memory_group, "PART_BYTES", 1 << 17)
    groups = make_groups(size)
    counts = [1, 0, 5, 16_384, 3, 200_001, 2, 50_000, 50_000]

    def vector(member, n):
        drawn = torch.randn(counts[n], generator=torch.Generator().manual_seed(100 * n + member), dtype=torch.float64)
        return (drawn * 1000).to(dtype)

    def member(member):
        pauses = random.Random(member)
        totals = []
        for n in range(len(counts)):
            time.sleep(pauses.random() * 2e-3)
            totals.append(groups[member].add_up(vector(member, n)))
        return totals

    results = together(member, size)
    for n in range(len(counts)):
        parts = torch.stack([vector(m, n) for m in range(size)])
        wide = parts.float() if dtype == torch.bfloat16 else parts
        total = wide[0].clone()
        for part in wide[1:]:
            total += part
        for totals in results:
            assert torch.equal(totals[n], total.to(dtype))
        if size < 4:  # workers that are threads sum this way, for more members in another order
            assert torch.equal(total.to(dtype), parts.sum(0))


def test_shape_strides_and_scalars():
    groups = make_groups(2)
    given = torch.arange(12.0).view(3, 4).t()
    results = together(lambda m: (groups[m].add_up(given * (m + 1)), groups[m].add_up(torch.tensor(float(m)))), 2)
    for total, scalar in results:
        assert torch.equal(total, given * 3)
        assert torch.equal(scalar, torch.tensor(1.0))


def test_a_ring_is_counted():
    groups = make_groups(2)
    together(lambda m: groups[m].add_up(torch.ones(4, dtype=torch.float64)), 2)
    assert [group.traffic.total() for group in groups] == [(2, 32)] * 2


COUNTS = [[[0, 3, 1], [7, 2, 0], [0, 0, 5]], [[0] * 3] * 3, [[0, 0, 40_000], [1, 0, 0], [20_000, 9, 0]]]
"""Rows from each of three members to each: few, none, and more than a region holds."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_scattered_gathered_and_exchanged_in_the_order_of_the_members(dtype, monkeypatch):
    monkeypatch.setattr(memory_group, "PART_BYTES", 1 << 17)
    groups, lengths = make_groups(3), [1, 0, 7, 60_001, 2]

    def rows(member, n, count):
        drawn = torch.randn(count, 2, generator=torch.Generator().manual_seed(100 * n + member), dtype=torch.float64)
        return (drawn * 1000).to(dtype)

    def member(member):
        pauses, results = random.Random(member), []
        for n, length in enumerate(lengths):
            time.sleep(pauses.random() * 2e-3)
            scattered = groups[member].reduce_scatter(rows(member, n, 3 * length))
            results.append((scattered, groups[member].all_gather(scattered)))
        return results, [groups[member].all_to_all(rows(member, 0, sum(c[member])), c) for c in COUNTS]

    results = together(member, 3)
    for n, length in enumerate(lengths):
        first, *others = [rows(m, n, 3 * length) for m in range(3)]
        total = first.float() if dtype == torch.bfloat16 else first
        for other in others:
            total = total + other
        total = total.to(dtype)
        for position, (pairs, _) in enumerate(results):
            assert torch.equal(pairs[n][0], total[position * length : (position + 1) * length])
            assert torch.equal(pairs[n][1], total)
    for n, counts in enumerate(COUNTS):
        sent = [rows(m, 0, sum(counts[m])).split(counts[m]) for m in range(3)]
        for position, (_, exchanged) in enumerate(results):
            assert torch.equal(exchanged[n], torch.cat([parts[position] for parts in sent]))


def test_collectives_count_the_least_that_must_be_sent():
    groups = make_groups(2)
    eight = torch.ones(8, dtype=torch.float64)
    calls = [
        lambda group: group.reduce_scatter(eight),
        lambda group: group.all_gather(eight),
        lambda group: group.all_to_all(eight, [[8, 0], [5, 3]]),
    ]
    totals = []
    for call in calls:
        together(lambda m, call=call: call(groups[m]), 2)
        totals.append([group.traffic.total() for group in groups])
    assert totals == [[(1, 32)] * 2, [(2, 96)] * 2, [(3, 96), (3, 136)]]


def test_a_member_that_is_gone_ends_the_wait_of_the_others():
    groups = make_groups(3)
    groups[2].close()
    results = together(lambda m: groups[m].add_up(torch.ones(10)), 2)
    assert all(isinstance(result, LostPeerError) for result in results)


def test_members_whose_calls_differ_are_told():
    groups = make_groups(2)
    together(lambda m: groups[m].add_up(torch.ones(10)), 2)
    groups[0]._meetings += 1
    results = together(lambda m: groups[m].add_up(torch.ones(10)), 2)
    assert "rank 1 is at meeting 3 of a group, and this is 4" in str(results[0])
