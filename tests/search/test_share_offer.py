"""A whole model on the CPU beside a pipeline of GPUs: where it pays, its share of the batch, and that it trains."""

from pathlib import Path

import pytest

from pipedejavu.facts import Machine, Profile, Tie
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import RankedPlan, SearchOptions, SearchResult, search
from pipedejavu.simulate import simulate
from tests.search.case import ROOM, machine, profile

GIB = 2**30


def model(cpu: float, boundary: float = 1.0) -> Profile:
    """Four units of 3 ms and 1 GiB of state; a device of 2.5 GiB holds two of them, and the CPU is `cpu` as fast."""
    return profile([1e-3] * 4, {"fast": 1.0, "cpu": cpu}, weights=GIB // 4, saved=GIB / 64, boundary=boundary)


def small(host_room: int = ROOM, gpus: int = 2, within: float = 1e12) -> Machine:
    return machine(["fast"] * gpus, room=5 * GIB // 2, host_room=host_room, within=within)


def ask(asked: Profile, place: Machine, batch: int = 200) -> SearchResult:
    return search(asked, place, SearchOptions(batch=batch, is_runnable=True))


def coarse(result: SearchResult) -> list[RankedPlan]:
    return [c for c in result.candidates if c.plan.place.cpu_replicas and c.plan.place.workers > 1]


def test_a_cpu_half_as_fast_as_one_of_two_gpus_trains_a_fifth_of_the_batch() -> None:
    # A GPU takes 6 ms of a sample's 12, the CPU 24 for all of it. As a third stage it would take one unit of four in
    # 6 ms, and the GPU with two of the others would be no faster than before.
    ranked = ask(model(0.5), small()).best
    assert ranked is not None
    place, feed = ranked.plan.place, ranked.plan.feed
    assert (place.workers, place.replicas, place.cpu_replicas) == (2, 1, 1)
    assert ranked.plan.cut.bounds == (2,)
    assert feed.shares == (0.8, 0.2)
    assert ranked.is_runnable
    # 160 samples at 6 ms, and the first one's way through the other stage; 40 at 24 ms take less.
    assert ranked.time_s == pytest.approx(161 * 6e-3, rel=1e-3)
    assert "without the CPU at 1.21 s" in " ".join(ranked.reasons)


@pytest.mark.parametrize("within", [1e12, 1e9, 4e8])
def test_no_other_share_is_faster(within: float) -> None:
    """Transfers of a pipeline count: they make the CPU's share larger."""
    place, asked = small(within=within), model(0.5, boundary=1e6)
    ranked = coarse(ask(asked, place, 64))[0]
    shares = [ranked.plan.feed.replace(shares=(1 - n / 64, n / 64)) for n in range(1, 64)]
    times = [simulate(compile_plan(ranked.plan.replace(feed=feed), asked, place)).makespan_s for feed in shares]
    assert ranked.time_s == pytest.approx(min(times))


@pytest.mark.parametrize("cpu", [1e-3, 0.02])
def test_a_cpu_that_is_much_slower_trains_nothing(cpu: float) -> None:
    # A thousandth cannot add anything; of 0.02, a sample takes as long as the pipeline for half of the batch.
    result = ask(model(cpu), small(), 200 if cpu < 0.01 else 40)
    assert result.candidates
    assert not coarse(result)
    assert result.candidates[0].plan.num_workers == 2


def test_a_host_with_too_little_memory_for_the_model_trains_nothing() -> None:
    # State of 4 GiB, and 1/16 GiB of a sample's activations.
    for room, is_used in ((4 * GIB, False), (5 * GIB, True)):
        result = ask(model(0.5), small(host_room=room))
        assert result.candidates
        assert bool(coarse(result)) == is_used
        assert all(need.share <= 1 for c in result.candidates for need in c.memory)


def test_replicas_of_a_pipeline_and_tied_weights_have_cpus_beside_them() -> None:
    asked = model(0.5).replace(ties=(Tie(units=("u0", "u3"), size_bytes=GIB // 8),))
    ranked = coarse(ask(asked, small(gpus=4)))[0]
    place = ranked.plan.place
    assert place.workers * place.replicas == 4
    assert sum(ranked.plan.feed.shares or ()) == pytest.approx(1.0)
    # Four GPUs take 3 ms of a sample and the CPU 24: a ninth is 22.2 of 200 samples.
    assert 200 * (ranked.plan.feed.shares or (0.0,))[-1] in (21.0, 22.0, 23.0)


def test_a_plan_with_a_cpu_beside_a_pipeline_trains_what_its_replay_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from pipedejavu.launch import audit_run, plan_run, train
    from pipedejavu.run import TrainOptions

    if torch.cuda.is_available():
        pytest.skip("this host has GPUs, so nothing stands in for them")
    ranked = coarse(ask(model(0.5), small(), 30))[0]
    options = TrainOptions(model="mlp", data="random:64", dtype="float64", keeps_log=True, steps=3, optimizer="sgd")
    options, program, _ = plan_run(options, ranked.plan, ranked.machine)
    assert [sum(part) for part in program.parts] == [24, 6]
    done = train(options, program, str(tmp_path / "run"))
    assert max(audit_run(done).values()) < 1e-12  # a few units in the last place, for each of the updates
