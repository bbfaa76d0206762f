"""The schedules as their papers draw them, and what holds for every size."""

from collections import Counter

import pytest

from pipedejavu.program import SCHEDULES, Slot

P, M = 4, 8


def drawn(picture: str) -> list[str]:
    """Each worker's line of a picture, without its name and spaces."""
    return ["".join(line.split()[1:]) for line in picture.strip().splitlines()]


def printed(order: str, p: int, v: int, m: int, chunks: str = "ab") -> list[str]:
    letters = chunks if v > 1 else [""]
    lines = [SCHEDULES[order](rank, p, v, m) for rank in range(p)]
    return ["".join(f"{kind}{k}{letters[chunk]}" for kind, chunk, k in line) for line in lines]


def test_gpipe_runs_all_forwards_and_then_all_backwards_in_the_opposite_order():
    line = "F0F1F2F3F4F5F6F7B7B6B5B4B3B2B1B0"
    assert printed("gpipe", P, 1, M) == [line] * P


def test_step_finishes_a_microbatch_before_the_next():
    assert printed("step", 1, 2, 2) == ["F0aF0bB0bB0aF1aF1bB1bB1a"]


def test_layer_major_brings_each_chunk_in_once_for_each_direction():
    assert printed("layer-major", 1, 2, 3) == ["F0aF1aF2aF0bF1bF2bB0bB1bB2bB0aB1aB2a"]


def test_1f1b():
    assert printed("1f1b", P, 1, M) == drawn("""
        r0 F0F1F2 F3B0F4B1F5B2F6B3F7B4 B5B6B7
        r1 F0F1 F2B0F3B1F4B2F5B3F6B4F7B5 B6B7
        r2 F0 F1B0F2B1F3B2F4B3F5B4F6B5F7B6 B7
        r3 F0B0F1B1F2B2F3B3F4B4F5B5F6B6F7B7
    """)


def test_1f1b_with_fewer_microbatches_than_workers_clamps_the_warm_up():
    assert printed("1f1b", P, 1, 2) == drawn("""
        r0 F0F1B0B1
        r1 F0F1B0B1
        r2 F0F1B0B1
        r3 F0B0F1B1
    """)


def test_1f1b_without_a_flush_has_the_same_order():
    assert printed("1f1b-async", P, 1, M) == printed("1f1b", P, 1, M)


def test_chimera():
    assert printed("chimera", P, 2, M, chunks="du") == drawn("""
        r0 F0dF1dF2uB2uF3uB3uB0d F4dB1d F5dF6uB6uF7uB7uB4dB5d
        r1 F0dF2uF1dF3uB2uB0dB3uB1d F4dF6uF5dF7uB6uB4dB7uB5d
        r2 F2uF0dF3uF1dB0dB2uB1dB3u F6uF4dF7uF5dB4dB6uB5dB7u
        r3 F2uF3uF0dB0dF1dB1dB2u F6uB3u F7uF4dB4dF5dB5dB6uB7u
    """)


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_the_directions_of_chimera_never_want_a_worker_at_the_same_slot(p):
    for rank in range(p):
        down = {2 * k + rank for k in range(p // 2)} | {2 * k + 2 * p - 1 - rank for k in range(p // 2)}
        stage = p - 1 - rank
        up = {2 * k + stage for k in range(p // 2)} | {2 * k + 2 * p - 1 - stage for k in range(p // 2)}
        assert not down & up
        assert len([*SCHEDULES["chimera"](rank, p, 2, p)]) == len(down | up)


def test_interleaved():
    assert printed("interleaved", P, 2, M) == drawn("""
        r0 F0aF1aF2aF3aF0bF1bF2bF3bF4aF5aF6aB0bF7aB1bF4bB2bF5bB3bF6bB0aF7bB1aB2aB3aB4bB5bB6bB7bB4aB5aB6aB7a
        r1 F0aF1aF2aF3aF0bF1bF2bF3bF4aB0bF5aB1bF6aB2bF7aB3bF4bB0aF5bB1aF6bB2aF7bB3aB4bB5bB6bB7bB4aB5aB6aB7a
        r2 F0aF1aF2aF3aF0bF1bF2bB0bF3bB1bF4aB2bF5aB3bF6aB0aF7aB1aF4bB2aF5bB3aF6bB4bF7bB5bB6bB7bB4aB5aB6aB7a
        r3 F0aF1aF2aF3aF0bB0bF1bB1bF2bB2bF3bB3bF4aB0aF5aB1aF6aB2aF7aB3aF4bB4bF5bB5bF6bB6bF7bB7bB4aB5aB6aB7a
    """)


def test_interleaved_with_one_chunk_is_1f1b_with_twice_the_warm_up():
    # Megatron's warm-up (v − 1)·p + 2(p − 1 − r) has a factor 2 that 1F1B lacks.
    line = "F0F1F2F3F4F5F6B0F7B1B2B3B4B5B6B7"
    assert printed("interleaved", P, 1, M)[0] == line


def test_zb_h1():
    assert printed("zb-h1", P, 1, M) == drawn("""
        r0 F0F1F2 F3I0W0F4I1W1F5I2W2F6I3W3F7I4W4 I5W5I6W6I7W7
        r1 F0F1 F2I0F3I1W0F4I2W1F5I3W2F6I4W3F7I5W4 I6W5I7W6W7
        r2 F0 F1I0F2I1F3I2W0F4I3W1F5I4W2F6I5W3F7I6W4 I7W5W6W7
        r3 F0I0F1I1F2I2F3I3W0F4I4W1F5I5W2F6I6W3F7I7W4 W5W6W7
    """)


def test_zb_v():
    assert printed("zb-v", P, 2, M) == drawn("""
        r0 F0aF1aF2aF3aF4aF5aF6aF0bI0bW0bF1bI1bW1bF2bI2bW2bF3bI3bW3bF7aI0aW0aF4bI4bW4bI1aW1aF5bI5bW5b\
I2aW2aF6bI6bW6bI3aW3aF7bI7bW7bI4aW4aI5aW5aI6aW6aI7aW7a
        r1 F0aF1aF2aF3aF4aF0bF5aF1bI0bW0bF2bI1bW1bF3bI2bW2bF6aI0aW0aF4bI3bW3bF7aI1aW1aF5bI4bW4bI2aW2a\
F6bI5bW5bI3aW3aF7bI6bW6bI4aI7bI5aW4aI6aW5aI7aW6aW7bW7a
        r2 F0aF1aF2aF0bF3aF1bF4aF2bI0bW0bF3bI1bW1bF5aI0aW0aF4bI2bW2bF6aI1aW1aF5bI3bW3bF7aI2aW2aF6bI4bW4b\
I3aW3aF7bI5bW5bI4aI6bI5aI7bI6aW4aI7aW5aW6bW7bW6aW7a
        r3 F0aF0bF1aF1bF2aF2bF3aF3bI0bW0bF4aI0aW0aF4bI1bW1bF5aI1aW1aF5bI2bW2bF6aI2aW2aF6bI3bW3bF7aI3aW3a\
F7bI4bW4bI4aI5bI5aI6bI6aI7bI7aW4aW5bW6bW7bW5aW6aW7a
    """)


def test_dualpipe_v():
    assert printed("dualpipe-v", P, 2, M) == drawn("""
        r0 F0aF1aF2aF3aF4aF5aF6aF0bI0bW0bF1bI1bW1bF2bI2bW2bF3bF7aB3bF4bB0aB4bF5bB1aB5bF6bB2aB6bF7bB3aB7b\
I4aW4aI5aW5aI6aW6aI7aW7a
        r1 F0aF1aF2aF3aF4aF0bF5aF1bI0bW0bF2bI1bW1bF3bF6aB2bF4bB0aF7aB3bF5bB1aB4bF6bB2aB5bF7bB3aB6bB4a\
I7bI5aW7bI6aW5aI7aW6aW7a
        r2 F0aF1aF2aF0bF3aF1bF4aF2bI0bW0bF3bF5aB1bF4bB0aF6aB2bF5bB1aF7aB3bF6bB2aB4bF7bB3aB5bB4aB6b\
I5aI7bI6aW5aI7aW7bW6aW7a
        r3 F0aF0bF1aF1bF2aF2bF3aF3bF4aB0bF4bB0aF5aB1bF5bB1aF6aB2bF6bB2aF7aB3bF7bB3aB4bB4aB5bB5a\
I6bI6aI7bI7aW6bW6aW7bW7a
    """)


def test_gems_lets_the_two_replicas_take_turns():
    assert printed("gems", P, 2, 4) == ["F0aB0aF1bB1bF2aB2aF3bB3b"] * P


SIZES = [
    (order, p, v, m)
    for order, chunks in {
        "step": (1, 2),
        "gpipe": (1, 2, 3),
        "layer-major": (1, 4),
        "1f1b": (1,),
        "interleaved": (1, 2, 3),
        "zb-h1": (1,),
        "zb-v": (2,),
        "dualpipe-v": (2,),
    }.items()
    for p in (1, 2, 3, 4, 7)
    for v in chunks
    for m in (1, 2, 3, 4, 6, 7, 8, 9, 14, 21)
    if (order != "interleaved" or m % p == 0)
    and (order != "zb-v" or m >= 2 * p - 1)
    and (order != "dualpipe-v" or m >= 2 * p)
]


@pytest.mark.parametrize(("order", "p", "v", "m"), SIZES)
def test_each_chunk_runs_each_microbatch_forward_once_and_backward_once_and_in_that_order(order, p, v, m):
    for rank in range(p):
        check_slots([*SCHEDULES[order](rank, p, v, m)], {(c, k) for c in range(v) for k in range(m)})


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 9, 11])
@pytest.mark.parametrize(("order", "p"), [("gems", 2), ("gems", 4), ("chimera", 2), ("chimera", 4), ("chimera", 8)])
def test_two_directions_divide_the_microbatches_alike_on_every_worker(order, p, m):
    divided = []
    for rank in range(p):
        slots = [*SCHEDULES[order](rank, p, 2, m)]
        pairs = {(s.chunk, s.k) for s in slots}
        check_slots(slots, pairs)
        assert sorted(k for _, k in pairs) == [*range(m)]
        divided.append(pairs)
    assert all(pairs == divided[0] for pairs in divided)
    down = sum(chunk == 0 for chunk, _ in divided[0])
    assert 0 <= down - (m - down) <= 1 + (m % p > 0 and order == "chimera")


def check_slots(slots: list[Slot], pairs: set[tuple[int, int]]) -> None:
    """One F and one B, or one F, I and W, of each pair, each after the one before it."""
    counts = Counter(slots)
    assert set(counts.values()) == {1}
    at = {slot: n for n, slot in enumerate(slots)}
    whole = {(c, k) for kind, c, k in slots if kind == "B"}
    halves = {(c, k) for kind, c, k in slots if kind == "I"}
    assert {(c, k) for kind, c, k in slots if kind == "F"} == pairs
    assert {(c, k) for kind, c, k in slots if kind == "W"} == halves
    assert whole | halves == pairs
    assert not whole & halves
    for c, k in pairs:
        first = at[Slot("B", c, k)] if (c, k) in whole else at[Slot("I", c, k)]
        assert at[Slot("F", c, k)] < first
        assert (c, k) in whole or first < at[Slot("W", c, k)]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (3, 5), (4, 2), (4, 8), (6, 20)])
def test_1f1b_holds_no_more_than_p_minus_rank_microbatches(p, m):
    for rank in range(p):
        live = most = 0
        for kind, _, _ in SCHEDULES["1f1b"](rank, p, 1, m):
            live += 1 if kind == "F" else -1
            most = max(most, live)
        assert most == min(p - rank, m)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (4, 8), (4, 12)])
def test_zb_h1_holds_no_more_than_p_microbatches_on_any_worker(p, m):
    for rank in range(p):
        live = most = 0
        for kind, _, _ in SCHEDULES["zb-h1"](rank, p, 1, m):
            live += {"F": 1, "W": -1}.get(kind, 0)
            most = max(most, live)
        assert most == p
