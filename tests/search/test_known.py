"""Plans that are known to be best, and those that published planners found."""

from itertools import pairwise

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import Cost, FaultsError, Machine, Profile, Unit, UnitTime, read_machine
from pipedejavu.plan import preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import RankedPlan, SearchOptions, search
from pipedejavu.zoo import estimate_profile
from tests.search.case import machine, profile

GIB = 2**30


def best(model: Profile, place: Machine, **options: object) -> RankedPlan:
    """The best plan under the order that the cut was chosen for; others may be simulated beside it."""
    candidates = search(model, place, SearchOptions.model_validate({"is_runnable": True, **options})).candidates
    return next(c for c in candidates if c.plan.order.kind in ("step", "1f1b"))


def heavy(count: int, speeds: dict[str, float] | None = None) -> Profile:
    """Units alike whose gradients are too large to be added up, so that a pipeline is what is left."""
    return profile([1e-3] * count, speeds, weights=10**9, boundary=1.0)


@pytest.mark.parametrize("stages", [2, 4])
def test_equal_devices_and_equal_units_give_equal_cuts(stages: int) -> None:
    ranked = best(heavy(4 * stages), machine(["fast"] * stages, within=1e9), batch=64)
    assert ranked.plan.cut.bounds == tuple(range(4, 4 * stages, 4))


@pytest.mark.parametrize("units", [12, 22])
def test_a_device_ten_times_slower_gets_its_share_of_units_or_nothing(units: int) -> None:
    model = heavy(units, {"fast": 1.0, "slow": 0.1})
    ranked = best(model, machine(["fast", "slow"], within=1e9), batch=1000, samples=1)
    if units == 12:  # one unit on the slow device takes 10 ms, eleven on the fast one 11: with a share it is faster
        assert ranked.plan.place.workers == 2
        lengths = [b - a for a, b in pairwise((0, *(ranked.plan.cut.bounds or ()), units))]
        kinds = [ranked.machine.device(n).kind for n in ranked.plan.place.devices or ("gpu0", "gpu1")]
        assert dict(zip(kinds, lengths, strict=True)) == {"fast": 11, "slow": 1}
    else:
        lengths = [b - a for a, b in pairwise((0, *(ranked.plan.cut.bounds or ()), units))]
        assert sorted(lengths) == [2, 20]
    few = best(heavy(2, {"fast": 1.0, "slow": 0.1}), machine(["fast", "slow"], within=1e9), batch=16)
    assert few.plan.num_workers == 1  # a unit would take ten times as long there


def test_shares_of_a_batch_follow_the_speeds() -> None:
    model = profile([1e-3] * 4, {"fast": 1.0, "slow": 0.25})
    ranked = best(model, machine(["fast", "slow"]), batch=10)
    assert ranked.plan.feed.kind == "share"
    assert ranked.plan.feed.shares == (0.8, 0.2)


def test_a_slow_link_between_hosts_gets_the_border_of_the_pipeline_and_a_fast_one_does_not() -> None:
    model = profile([1e-3] * 8, weights=10**6, boundary=100.0)
    slow = best(model, machine(["fast"] * 4, hosts=2, within=1e12, between=1e6), batch=64)
    hosts = [slow.machine.device(n).host for n in slow.plan.place.devices or ("gpu0", "gpu1", "gpu2", "gpu3")]
    assert slow.plan.cut.bounds == (4,)
    assert slow.plan.place.replicas == 2
    assert hosts in (["h0", "h1"] * 2, ["h1", "h0"] * 2)  # pipelines cross, replicas of a stage are neighbours
    fast = best(model, machine(["fast"] * 4, hosts=2, within=1e12, between=1e12), batch=64)
    assert fast.plan.cut.kind == "whole"
    assert fast.plan.place.replicas == 4


VGG16 = [
    ("conv2", 22.307, 24.613, 1644167168, 7168),
    ("relu3", 4.446, 5.553, 1644167168, 0),
    ("conv4", 46.201, 113.33, 1644167168, 147712),
    ("relu5", 4.455, 5.311, 1644167168, 0),
    ("pool6", 3.795, 5.579, 411041792, 0),
    ("conv7", 15.155, 39.648, 822083584, 295424),
    ("relu8", 2.359, 2.738, 822083584, 0),
    ("conv9", 22.062, 53.379, 822083584, 590336),
    ("relu10", 2.513, 2.62, 822083584, 0),
    ("pool11", 2.211, 2.788, 205520896, 0),
    ("conv12", 10.814, 18.335, 411041792, 1180672),
    ("relu13", 1.377, 1.38, 411041792, 0),
    ("conv14", 17.458, 27.023, 411041792, 2360320),
    ("relu15", 1.64, 1.463, 411041792, 0),
    ("conv16", 14.245, 33.888, 411041792, 2360320),
    ("relu17", 1.549, 1.321, 411041792, 0),
    ("pool18", 1.169, 1.513, 102760448, 0),
    ("conv19", 9.249, 14.574, 205520896, 4720640),
    ("relu20", 1.026, 0.696, 205520896, 0),
    ("conv21", 15.359, 21.9, 205520896, 9439232),
    ("relu22", 0.848, 0.679, 205520896, 0),
    ("conv23", 11.775, 28.67, 205520896, 9439232),
    ("relu24", 0.881, 0.642, 205520896, 0),
    ("pool25", 0.802, 0.781, 51380224, 0),
    ("conv26", 5.608, 7.381, 51380224, 9439232),
    ("relu27", 0.784, 0.266, 51380224, 0),
    ("conv28", 4.07, 7.396, 51380224, 9439232),
    ("relu29", 0.463, 0.19, 51380224, 0),
    ("conv30", 4.042, 8.648, 51380224, 9439232),
    ("relu31", 0.455, 0.175, 51380224, 0),
    ("pool32", 0.553, 0.234, 12845056, 0),
    ("view34", 0, 0, 12845056, 0),
    ("linear35", 2.475, 4.575, 2097152, 411058176),
    ("relu36", 0.377, 0.03, 2097152, 0),
    ("dropout37", 0, 0, 2097152, 0),
    ("linear38", 0.709, 0.734, 2097152, 67125248),
    ("relu39", 0.277, 0.032, 2097152, 0),
    ("dropout40", 0, 0, 2097152, 0),
    ("linear41", 0.393, 0.548, 512000, 16388000),
]
"""PipeDream's published profile of VGG-16 for minibatches of 128 on a V100: milliseconds forward and backward, bytes of
the output and of the parameters; without its input and a node that is the shape of a tensor."""


def vgg16() -> Profile:
    units = []
    for name, forward, backward, sent, size in VGG16:
        time = UnitTime(forward=Cost(fixed_s=forward / 1e3), backward=Cost(fixed_s=backward / 1e3))
        sizes = {"parameter_bytes": size, "gradient_bytes": size, "boundary_bytes": float(sent)}
        units.append(Unit.model_validate({"name": name, "times": {"fast": time}, **sizes}))
    return Profile(name="vgg16", units=tuple(units))


def test_vgg16_on_four_gpus_has_three_replicas_of_its_convolutions_and_one_of_its_linear_layers() -> None:
    # PipeDream adds gradients up after each round of four minibatches; an update of twelve does so three times less
    # often, so its network of 10 Gb/s is a third as fast here.
    place = machine(["fast"] * 4, hosts=4, between=1.25e9 / 3)
    ranked = best(vgg16(), place, batch=12, samples=1)
    assert ranked.plan.place.stage_replicas == (3, 1)
    (bound,) = ranked.plan.cut.bounds or ()
    names = [name for name, *_ in VGG16]
    assert all(name.startswith("linear") <= (n >= bound) for n, name in enumerate(names))
    assert sum(VGG16[n][4] for n in range(bound)) < sum(VGG16[n][4] for n in range(bound, len(names))) / 5


def tight(room: int, pcie: float = 50e9) -> RankedPlan:
    """Units that take 30 ms, 1 GiB of state and 1 GiB of activations in all; updates on the CPU are slow."""
    model = profile([1e-3] * 10, {"fast": 1.0, "cpu": 0.1}, weights=GIB // 40, saved=GIB / 10, boundary=GIB / 1000)
    units = [u.replace(times=u.times | {"cpu": u.times["cpu"].replace(update_s=2e-3)}) for u in model.units]
    place = machine(["fast"], room=room, host_room=2**40, pcie=pcie)
    return best(model.replace(units=tuple(units)), place, batch=1)


def test_tight_memory_switches_on_what_costs_least_first() -> None:
    times = []
    states = []
    for room in (3 * GIB, 17 * GIB // 10, 13 * GIB // 10, GIB // 2):
        ranked = tight(room)
        order, keep = ranked.plan.order, ranked.plan.keep
        times.append(ranked.time_s)
        again = len(order.recompute_units or ()) + 10 * (order.recompute == 1)
        states.append((again, keep.kind, keep.activations))
        assert all(need.share <= 1 for need in ranked.memory)
    assert times == sorted(times)
    assert times[0] < times[-1]
    assert states[0] == (0, "replicated", "device")
    assert states[1] != states[0]
    assert len({*states}) == len(states)


@pytest.mark.parametrize(("pcie", "recomputes"), [(1e12, False), (1e8, True)])
def test_what_is_switched_on_first_depends_on_what_copies_cost(pcie: float, recomputes: bool) -> None:
    # 2 GiB are needed, 1.7 there. Three units compute again in 3 ms; the copies of 0.3 GiB take 0.3 ms, or 3 s.
    ranked = tight(17 * GIB // 10, pcie)
    order, keep = ranked.plan.order, ranked.plan.keep
    assert order.has_recompute == recomputes
    assert (keep.kind == "split" or keep.activations == "host") != recomputes


def test_gems_holds_a_model_with_its_state_on_the_host_that_it_could_not_hold_otherwise() -> None:
    here = read_machine("4xv100-16gb + epyc-7763")
    model = estimate_profile("gpt-6.7b", here)
    gems = preset("gems-master").at(workers=4, microbatches=4, samples=1)
    gems = gems.replace(order=gems.order.replace(recompute=1.0))
    with pytest.raises(FaultsError, match=r"has 15\.2 GiB"):
        verify(compile_plan(gems, model, here))
    hosted = gems.replace(keep=gems.keep.replace(kind="split"), order=gems.order.replace(is_eager=True))
    verify(compile_plan(hosted, model, here))


def test_as_few_units_recompute_as_make_it_fit() -> None:
    model = profile([1e-3] * 10, weights=GIB // 40, saved=GIB / 10, boundary=GIB / 1000)
    rooms = [GIB * part // 100 for part in (210, 190, 150, 125)]
    counts = []
    for room in rooms:
        order = best(model, machine(["fast"], room=room), batch=1).plan.order
        counts.append(len(order.recompute_units or ()) + 10 * (order.recompute == 1))
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert 0 < counts[1] < 10
