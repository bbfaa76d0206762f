"""Laws of a cluster's schedule: for any jobs, servers and policy; and against brute force on small cases."""

from collections import defaultdict
from itertools import pairwise, permutations
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.cluster import POLICIES, ClusterJob, RateRow, ScheduleOptions, Server, outcomes, simulate_cluster
from pipedejavu.cluster.allocation import ALLOCATIONS
from pipedejavu.cluster.cluster_clock import ClusterCourse
from pipedejavu.cluster.max_min import Claim, max_min_shares
from pipedejavu.cluster.server_pool import PACKINGS, ServerPool
from tests.cluster.case import job, server


class CheckedPool(ServerPool):
    """A pool that checks that nothing is given out twice or taken back twice."""

    def _add(self, parts, sign):  # type: ignore[no-untyped-def]
        super()._add(parts, sign)
        for now, whole in zip((self.gpus, self.cores, self.memory), self._all, strict=True):
            assert (now >= 0).all()
            assert (now <= whole).all()


@st.composite
def a_job(draw: st.DrawFn, number: int) -> ClusterJob:
    gpus = draw(st.sampled_from([0, 0.25, 0.5, 1, 1, 2, 4]))
    most = draw(st.sampled_from([None, 2, 4])) if gpus in (1, 2) else None
    counts = range(int(gpus), most + 1) if most else [gpus]
    cores = draw(st.integers(1, 6))
    rates = tuple(
        RateRow(kind=kind, gpus=n, cores=c, memory_bytes=1, steps_per_s=speed * max(n, 0.5) * c)
        for n in counts
        for kind, speed in draw(st.sampled_from([(("*", 1),), (("new", 3), ("old", 1)), (("old", 2),)]))
        for c in {1, cores}
    )
    return job(
        f"j{number}", draw(st.integers(1, 500)), draw(st.integers(0, 60)), gpus=gpus, most_gpus=most, rates=rates,
        checkpoint_bytes=draw(st.integers(0, 5)), after=(f"j{draw(st.integers(0, number - 1))}",)
        if number and draw(st.booleans()) and draw(st.booleans()) else (),
    )  # fmt: skip


@st.composite
def a_case(draw: st.DrawFn) -> tuple[list[ClusterJob], list[Server], ScheduleOptions]:
    jobs = [draw(a_job(n)) for n in range(draw(st.integers(1, 8)))]
    servers = [server("new", 4, "new", cores=8), server("old", draw(st.integers(4, 6)), "old", cores=12)]
    servers.append(server("rent", 4, "new", is_rented=True, price_per_hour=1.0))
    names = {"policy": tuple(POLICIES), "allocation": ALLOCATIONS, "packing": PACKINGS, "backfill": (False, True)}
    chosen = {name: draw(st.sampled_from(values)) for name, values in names.items()}
    costs = {"start_s": draw(st.sampled_from([0.0, 3.0])), "disk_bytes_per_s": 1.0, "round_s": 20.0}
    return jobs, servers, ScheduleOptions(**chosen, **costs)


@settings(max_examples=60, deadline=None)
@given(a_case())
def test_every_schedule_keeps_the_laws(case: tuple[list[ClusterJob], list[Server], ScheduleOptions]) -> None:
    with patch("pipedejavu.cluster.cluster_state.ServerPool", CheckedPool):
        course = simulate_cluster(*case)
    jobs, servers, _ = case
    assert [run.job for run in course.runs] == jobs
    assert all(run.end_s is not None for run in course.runs)
    no_gpu_is_held_twice(course, servers)
    work_is_conserved(course)
    times_are_in_order(course)


def no_gpu_is_held_twice(course: ClusterCourse, servers: list[Server]) -> None:
    changes: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for span in course.spans:
        for part in span.parts:
            assert len(set(part.slots)) == len(part.slots)
            for slot in part.slots:
                assert slot < servers[part.server].gpus
                changes[part.server, slot] += [(span.start_s, part.gpu_milli), (span.end_s, -part.gpu_milli)]
    for moments in changes.values():
        held = 0
        for _, change in sorted(moments):  # what is given back comes before what is taken at the same time
            held += change
            assert 0 <= held <= 1000


def work_is_conserved(course: ClusterCourse) -> None:
    done: dict[int, float] = defaultdict(float)
    for span in course.spans:
        done[span.job] += span.steps
    for run in course.runs:
        assert done[run.index] == pytest.approx(run.job.work, rel=1e-9)


def times_are_in_order(course: ClusterCourse) -> None:
    ended = {run.job.name: run.end_s for run in course.runs}
    for run in course.runs:
        spans = sorted(span[2:4] for span in course.spans if span.job == run.index)
        assert spans[0][0] >= max([run.job.arrival_s, *(ended[name] or 0 for name in run.job.after)])
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert spans[-1][1] == run.end_s


def list_schedule(lengths: list[int], num_gpus: int) -> float:
    """Returns the mean completion time of jobs started in this order, each on the GPU that is free first."""
    free, total = [0.0] * num_gpus, 0.0
    for length in lengths:
        first = free.index(min(free))
        free[first] += length
        total += free[first]
    return total / len(lengths)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_shortest_first_is_the_best_of_all_orders_and_fifo_is_its_own(lengths: list[int], num_gpus: int) -> None:
    jobs = [job(f"j{n}", length) for n, length in enumerate(lengths)]

    def mean_s(policy: str) -> float:
        course = simulate_cluster(jobs, [server(gpus=num_gpus)], ScheduleOptions(policy=policy, start_s=0))
        return sum(done.end_s for done in outcomes(course)) / len(jobs)

    best = min(list_schedule(list(order), num_gpus) for order in permutations(lengths))
    assert mean_s("srtf") == pytest.approx(best)
    assert mean_s("fifo") == pytest.approx(list_schedule(lengths, num_gpus))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([500, 1000, 2000]), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    ),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_max_min_reaches_the_optimum_of_the_linear_program(
    asked: list[tuple[int, int, int, int]], gpus: tuple[int, int]
) -> None:
    optimise = pytest.importorskip("scipy.optimize")
    claims = [Claim({"a": a, "b": b}, size, count) for a, b, size, count in asked]
    capacity = {"a": 1000 * gpus[0], "b": 1000 * gpus[1]}
    shares = max_min_shares(claims, capacity)
    speeds = [
        sum(share * claim.rates[kind] for kind, share in mine.items()) / max(claim.rates.values())
        for mine, claim in zip(shares, claims, strict=True)
    ]
    num = 2 * len(claims)
    limits, bounds = [], []
    for n, claim in enumerate(claims):
        row = [0.0] * (num + 1)
        row[2 * n], row[2 * n + 1] = 1.0, 1.0
        limits.append(row)
        bounds.append(1.0)
        best = max(claim.rates.values())
        row = [0.0] * num + [1.0]
        row[2 * n], row[2 * n + 1] = -claim.rates["a"] / best, -claim.rates["b"] / best
        limits.append(row)
        bounds.append(0.0)
    for k in range(2):
        sizes = [0.0] * (num + 1)
        for n, claim in enumerate(claims):
            sizes[2 * n + k] = claim.gpu_milli * claim.num_jobs / 1000
        limits.append(sizes)
        bounds.append(gpus[k])
        used = sum(m.get("ab"[k], 0) * c.gpu_milli * c.num_jobs / 1000 for m, c in zip(shares, claims, strict=True))
        assert used <= gpus[k] + 1e-9
    answer = optimise.linprog([0.0] * num + [-1.0], A_ub=limits, b_ub=bounds)
    assert min(speeds) == pytest.approx(-answer.fun, abs=1e-7)
    assert all(sum(mine.values()) <= 1 + 1e-9 for mine in shares)
