"""The allocator on paper: rounding, segments, reuse and the limit, as torch's caching allocator documents them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedejavu.facts import InputError
from pipedejavu.simulate.allocator import MIB, Allocator, replay
from pipedejavu.simulate.memory import _cut


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # what is left is too little to be divided off
        (12 * MIB - 512, 12 * MIB, 12 * MIB),
    ],
)
def test_one_tensor_is_rounded_and_has_a_segment(size: int, allocated: int, reserved: int) -> None:
    allocator = Allocator()
    allocator.take(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_small_tensors_share_a_segment_and_large_ones_another() -> None:
    allocator = Allocator()
    for _ in range(4):
        allocator.take(MIB // 2)
    assert allocator.reserved_bytes == 2 * MIB
    for _ in range(10):
        allocator.take(2 * MIB)
    assert allocator.reserved_bytes == (2 + 20) * MIB


def test_what_is_freed_joins_its_neighbours_and_is_used_again() -> None:
    allocator = Allocator()
    blocks = [allocator.take(5 * MIB) for _ in range(4)]
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.give_back(block)
    allocator.take(15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_hole_that_is_too_small_stays_reserved() -> None:
    allocator = Allocator()
    first = allocator.take(12 * MIB)
    allocator.take(12 * MIB)
    allocator.give_back(first)
    allocator.take(14 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (26 * MIB, 38 * MIB)


def test_at_the_limit_free_segments_go_back_before_anything_is_refused() -> None:
    allocator = Allocator(limit_bytes=38 * MIB)
    allocator.give_back(allocator.take(12 * MIB))
    allocator.take(38 * MIB)
    assert allocator.reserved_bytes == 38 * MIB
    with pytest.raises(InputError, match=r"a tensor of 512 B does not fit: 38\.0 MiB of 38\.0 MiB are in use; use"):
        allocator.take(1)


@pytest.mark.parametrize(
    ("size", "most", "tensors"),
    [(10, 4, [4, 4, 2]), (8, 4, [4, 4, 0]), (3, 4, [3]), (5, 0, [5]), (0, 4, [0]), (2**30, 4, [2**26] * 16 + [0])],
)
def test_what_an_action_works_with_is_tensors_of_the_size_of_its_output(size: int, most: int, tensors: list) -> None:
    assert _cut(size, most) == tensors


def test_a_replay_lets_go_before_it_takes() -> None:
    footprint = replay([(0, 1, [30.0 * MIB]), (1, 2, [30.0 * MIB]), (0, 2, [512.0])])
    assert (footprint.allocated_bytes, footprint.reserved_bytes) == (30 * MIB + 512, 32 * MIB)


def test_a_replay_knows_moments_that_differ_in_their_last_digits() -> None:
    moment = 0.1 + 0.2
    assert moment > 0.3
    assert replay([(0.0, moment, [4 * MIB]), (0.3, 1.0, [4 * MIB])]).allocated_bytes == 4 * MIB


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 20), st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=4)),
        max_size=30,
    )
)
def test_what_is_reserved_holds_what_is_allocated_and_that_holds_what_lives(rows) -> None:
    stays = [(float(birth), float(birth + length), [float(s) for s in sizes]) for birth, length, sizes in rows]
    footprint = replay(stays)
    times = {birth for birth, _, _ in stays}
    live = max((sum(sum(s) for b, d, s in stays if b <= t < d) for t in times), default=0)
    assert live <= footprint.allocated_bytes <= footprint.reserved_bytes
    blocks = sum(len(sizes) for _, _, sizes in stays)
    assert footprint.allocated_bytes <= live + blocks * (
        MIB + 512
    )  # a block keeps what is too little to be divided off
