"""A plan passes where a GPU's allocator gets through it, not where its live tensors alone would fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.analysis import verify
from pipedejavu.facts import Cost, Device, FaultsError, Host, InputError, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import Order, Place, Plan, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import Prediction, check_fit, memory, simulate
from pipedejavu.simulate.allocator import MIB, replay


def unit(name: str, parts: tuple[int, ...], saved: tuple[float, ...] = (), boundary: float = 0.0) -> Unit:
    time = UnitTime(forward=Cost(per_sample_s=1.0), backward=Cost(per_sample_s=2.0), update_s=1.0)
    return Unit(
        name=name,
        times={"gpu": time, "cpu": time},
        parameter_bytes=sum(parts),
        gradient_bytes=sum(parts),
        optimizer_bytes=2 * sum(parts),
        activation_bytes=sum(saved),
        boundary_bytes=boundary,
        parameter_parts=parts,
        activation_parts=saved,
    )


def computer(room: int, count: int = 1, type_: str = "gpu") -> Machine:
    devices = [
        Device(name=f"{type_}{n}", kind=type_, type=type_, host="h", memory_bytes=room + MIB, reserved_bytes=MIB)
        for n in range(count)
    ]
    return Machine(name="m", hosts=(Host(name="h"),), devices=tuple(devices), links=(Link(bytes_per_s=1e9),))


def predicted(plan: Plan, profile: Profile, machine: Machine) -> Prediction:
    program = compile_plan(plan, profile, machine)
    return simulate(program, verify(program))


ONE = preset("ddp").at(workers=1, microbatches=1, samples=1)
THREE = Profile(name="three", units=(unit("u", (3 * MIB,)),))
"""Its live tensors: weights, gradient, two moments, and two copies while it is updated; 18 MiB in a segment of 20."""


def test_what_would_be_reserved_decides_where_live_tensors_fit() -> None:
    assert check_fit(predicted(ONE, THREE, computer(20 * MIB))) == {"gpu0": 20 * MIB}
    with pytest.raises(FaultsError) as caught:
        check_fit(predicted(ONE, THREE, computer(19 * MIB)))
    assert str(caught.value) == (
        "the program of plan 'ddp': the allocator of device 'gpu0' would reserve 20.0 MiB for tensors of 18.0 MiB, and"
        " the device has 19.0 MiB; use more workers, smaller microbatches, recompute, or keep state on the host"
    )


def test_a_cpu_has_no_such_allocator() -> None:
    prediction = predicted(ONE, THREE, computer(19 * MIB, type_="cpu"))
    assert prediction.footprints() == [None]
    assert check_fit(prediction) == {}


def test_without_known_tensors_live_bytes_decide() -> None:
    blind = THREE.replace(units=(THREE.units[0].replace(parameter_parts=()),))
    check_fit(predicted(ONE, blind, computer(19 * MIB)))


def test_free_segments_go_back_before_a_plan_is_refused() -> None:
    # Beside 48 MiB of weights and moments a forward has two segments of 30. The gradient takes part of one; the other
    # is too small for the update's 32 MiB, and makes room for them where there is no more.
    worker = unit("u", (16 * MIB,), saved=(30.0 * MIB,)).replace(forward_work_bytes=30.0 * MIB)
    profile = Profile(name="p", units=(worker,))
    roomy, tight = (predicted(ONE, profile, computer(room)) for room in (140 * MIB, 110 * MIB))
    assert roomy.workers[0].reserved_bytes == 140 * MIB
    assert tight.workers[0].reserved_bytes == 110 * MIB
    check_fit(tight)
    with pytest.raises(FaultsError, match=r"would reserve 140\.0 MiB for tensors of 108\.0 MiB, and .* 109\.0 MiB;"):
        check_fit(predicted(ONE, profile, computer(109 * MIB)))


def test_workers_on_one_gpu_reserve_for_themselves() -> None:
    profile = Profile(name="p", units=(unit("a", (3 * MIB,)), unit("b", (3 * MIB,))))
    plan = preset("1f1b").at(workers=2, microbatches=1, samples=1)
    together = plan.replace(place=plan.place.replace(devices=("gpu0", "gpu0")))
    check_fit(predicted(together, profile, computer(40 * MIB)))
    with pytest.raises(FaultsError, match=r"would reserve 40\.0 MiB for tensors of 36\.0 MiB, and .* has 39\.0 MiB;"):
        check_fit(predicted(together, profile, computer(39 * MIB)))


def test_each_device_of_a_tp_group_reserves_for_its_part() -> None:
    plan = Plan(name="team", place=Place(stage_shards=(2,)), order=Order(kind="step"))
    check_fit(predicted(plan, THREE, computer(20 * MIB, 2)))
    with pytest.raises(FaultsError, match=r"would reserve 40\.0 MiB for tensors of 18\.0 MiB, and .* has 38\.0 MiB;"):
        check_fit(predicted(plan, THREE, computer(19 * MIB, 2)))


@contextmanager
def recorded() -> Iterator[list[list[tuple[float, float, list[float]]]]]:
    """Notes what is replayed for each worker, once."""
    seen: list[list[tuple[float, float, list[float]]]] = []

    def note(rows, limit_bytes=None):
        if limit_bytes is not None:
            seen.append(rows)
        return replay(rows) if limit_bytes is None else replay(rows, limit_bytes)

    with patch.object(memory, "replay", note):
        yield seen


sizes = st.integers(1, 24 * MIB)
units = st.builds(
    lambda parts, saved, sent: unit("u", tuple(parts), tuple(map(float, saved)), float(sent)),
    st.lists(sizes, min_size=1, max_size=4),
    st.lists(sizes, max_size=4),
    sizes,
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(units, min_size=2, max_size=4),
    st.sampled_from(["1f1b", "gpipe", "pipedream-2bw", "zb-h1"]),
    st.integers(1, 4),
    st.floats(1.0, 1.5),
)
def test_a_plan_passes_where_each_replay_stays_within_its_device(drawn, name, microbatches, spare) -> None:
    profile = Profile(name="p", units=tuple(u.replace(name=f"u{n}") for n, u in enumerate(drawn)))
    plan = preset(name).at(workers=2, microbatches=microbatches, samples=1)
    live = max(w["device"] for w in predicted(plan, profile, computer(2**50, 2)).peaks())
    room = int(spare * live)
    program = compile_plan(plan, profile, computer(room, 2))
    prediction = simulate(program)
    with recorded() as seen:
        try:
            check_fit(prediction)
            passes = True
        except FaultsError:
            passes = False
    assert len(seen) == 2
    assert passes == all(_gets_through(rows, room) for rows in seen)
    if passes:
        assert all(worker.peak_bytes <= worker.reserved_bytes <= room for worker in prediction.workers)


def _gets_through(rows: list[tuple[float, float, list[float]]], limit_bytes: float) -> bool:
    try:
        replay(rows, limit_bytes)
    except InputError:
        return False
    return True
