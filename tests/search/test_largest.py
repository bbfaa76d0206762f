"""The largest batch, and the largest model, that fit."""

import pytest

from pipedejavu.facts import Edge, InputError, Profile
from pipedejavu.search import SearchOptions, exhaustive, find_largest, search
from pipedejavu.search.feasibility import is_feasible
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.planning_problem import problems_of
from tests.search.case import machine, profile


def test_the_largest_batch_of_one_pass_fits_and_a_larger_one_does_not() -> None:
    # Without recomputing, 30 samples of 10 bytes in each of two units fit beside 32 bytes of state on each device.
    model, place = profile([1e-3] * 2, saved=10.0, boundary=0.0), machine(["fast"] * 2, room=640)
    largest = find_largest(model, place, SearchOptions(objective="batch", is_runnable=True))
    assert largest is not None
    best = search(model, place, largest.options).best
    assert best is not None
    assert best.plan.feed.microbatches == 1
    assert best.samples == largest.options.batch >= 60
    assert largest.text == f"a batch of {best.samples} is the largest that fits in one pass, in steps of 2"
    more = largest.options.replace(batch=largest.options.batch + 2 * (1 + largest.options.batch // 64))
    assert search(model, place, more).best is None


def test_a_large_memory_beside_a_device_that_is_too_slow_makes_no_batch_larger() -> None:
    model = profile([1e-3] * 2, {"fast": 1.0, "cpu": 1e-3}, saved=10.0, boundary=0.0)
    options = SearchOptions(objective="batch", is_runnable=True)
    largest = [
        find_largest(model, machine(["fast"], room=640, host_room=room, pcie=1.0), options) for room in (10**3, 10**6)
    ]
    assert largest[0] is not None
    assert largest[1] is not None
    assert largest[0].options.devices == largest[1].options.devices == ("gpu0",)
    best = search(model, machine(["fast"], room=640, host_room=10**6, pcie=1.0), largest[1].options).best
    assert best is not None
    assert best.plan.num_workers == 1
    assert best.machine.device((best.plan.place.devices or ("gpu0",))[0]).type == "gpu"


@pytest.mark.parametrize("room", [50, 60, 64, 68, 70, 100])
def test_what_can_be_held_is_what_looking_at_everything_finds(room: int) -> None:
    model, options = profile([1e-3] * 5, weights=[2, 9, 4, 4, 12], saved=3.0, boundary=1.0), SearchOptions(batch=2)
    place = machine(["fast"] * 2, room=room)
    pool = Pool(options)
    exhaustive.run(pool, [*problems_of(model, place, options)], options)
    assert is_feasible(model, place, options) == bool(pool.plans)


def test_the_largest_model_has_as_many_blocks_as_state_fits() -> None:
    # A block has 16 bytes of state, two ends 8 each; with batches of one, two devices of 100 bytes hold about eleven.
    model = profile([1e-3] * 4, weights=[2, 4, 4, 2], saved=0.0, boundary=0.0)
    units = tuple(u.replace(num_parameters=u.parameter_bytes) for u in model.units)
    place, options = machine(["fast"] * 2, room=100), SearchOptions(objective="blocks", batch=1, is_runnable=True)
    largest = find_largest(model.replace(units=units), place, options)
    assert largest is not None
    blocks = len(largest.profile.units) - 2
    assert blocks == 10  # five of 16 bytes and an end of 8 on each
    assert largest.text == "10 blocks like u1 fit, where the model has 2: 44 parameters"
    assert [u.name for u in largest.profile.units[:5]] == ["u0", "u1", "u2", "u1+1", "u2+1"]
    assert search(largest.profile, place, largest.options).best is not None


def test_blocks_of_a_model_with_skips_cannot_be_counted() -> None:
    model = profile([1e-3] * 3).replace(edges=(Edge(source="u0", target="u2"), Edge(source="u0", target="u1")))
    with pytest.raises(
        InputError, match="pass its units by, so its blocks cannot be multiplied; use --objective batch"
    ):
        find_largest(model, machine(["fast"]), SearchOptions(objective="blocks"))


def test_where_even_the_smallest_does_not_fit_the_remedy_is_told() -> None:
    with pytest.raises(InputError, match="no plan for test with a batch of 1 fits machine 'test'; this would fit: "):
        find_largest(profile([1e-3]), machine(["fast"], room=8), SearchOptions(objective="batch", is_runnable=True))


def test_other_objectives_ask_for_nothing_larger() -> None:
    assert find_largest(profile([1e-3]), machine(["fast"]), SearchOptions()) is None


def test_the_longest_context_is_the_last_that_fits() -> None:
    # 256 tokens keep 10 bytes per sample in each of two units.
    def with_context(tokens: int) -> Profile:
        return profile([1e-3] * 2, saved=10.0 * tokens / 256, boundary=0.0).replace(name=f"{tokens} tokens")

    place = machine(["fast"], room=124)
    options = SearchOptions(objective="context", batch=1, is_runnable=True)
    largest = find_largest(with_context(256), place, options, with_context=with_context)
    assert largest is not None
    tokens = int(largest.profile.name.split()[0])
    assert largest.text == f"a context of {tokens:,} tokens is the longest that fits, in steps of 256"
    assert search(largest.profile, place, largest.options).best is not None
    assert search(with_context(tokens + 256), place, largest.options).best is None


def test_a_context_is_of_a_model_that_can_have_another() -> None:
    with pytest.raises(InputError, match="objective 'context' needs a model whose context can be changed; give it by"):
        find_largest(profile([1e-3]), machine(["fast"]), SearchOptions(objective="context"))
