"""Tables of throughput from plans: equal to what a search says, and more of the host only helps plans that use it."""

import pytest

from pipedejavu.cluster import ClusterJob
from pipedejavu.cluster.cluster_job import RateRow
from pipedejavu.cluster.sensitivity import PROCESS_BYTES, machine_part, plan_rates, thinned
from pipedejavu.facts import InputError, Machine, Profile, read_machine
from pipedejavu.search import SearchOptions, search
from pipedejavu.zoo import estimate_profile
from tests.search.case import machine, profile

MODEL = profile([1e-3] * 4, {"fast": 1.0, "slow": 0.5})


def profile_of(part: Machine) -> Profile:
    return MODEL


def hosts_of(where: Machine, cores: int) -> Machine:
    return where.replace(hosts=tuple(host.replace(cores=cores) for host in where.hosts))


def test_rows_are_the_rates_of_the_best_plans() -> None:
    where = hosts_of(machine(["fast"] * 4, hosts=2), 8)
    job = ClusterJob(name="a", model="m", batch=8, steps=10, gpus=1, most_gpus=4)
    rows = {row.gpus: row for row in plan_rates(job, where, profile_of, 3)}
    assert sorted(rows) == [1, 2, 4]  # three GPUs are not divided evenly over two hosts
    two = machine_part(where, ["h0"], 2, 1.0, 1.0)
    assert [device.name for device in two.devices] == ["gpu0", "gpu1"]
    best = search(MODEL, two, SearchOptions(batch=8, candidates=1, is_runnable=True)).best
    assert best is not None
    assert rows[2].steps_per_s == pytest.approx(1 / best.time_s)
    assert rows[1].steps_per_s == pytest.approx(1 / (8 * 12e-3))  # four units, 3 ms each, eight samples
    assert (rows[1].cores, rows[2].cores) == (1, 2)
    assert rows[2].memory_bytes == 2 * PROCESS_BYTES


def test_preparing_samples_limits_a_job_with_few_cores() -> None:
    job = ClusterJob(name="a", model="m", batch=8, steps=10, prepare_s=0.03)
    rows = plan_rates(job, hosts_of(machine(["fast"]), 8), profile_of, 3)
    assert [row.cores for row in rows] == [1, 2, 3]  # 12 ms of the GPU for a sample, 30 ms of a core
    assert [row.steps_per_s for row in rows] == pytest.approx([1 / 0.24, 2 / 0.24, 1 / 0.096])


def test_a_plan_that_uses_the_host_is_slower_with_a_part_of_it() -> None:
    job = ClusterJob(name="a", model="gpt-small", batch=4, steps=10, gpus=0)
    rows = plan_rates(job, read_machine("epyc-7763"), lambda part: estimate_profile("gpt-small", part), 0.5)
    rates = {row.cores: row.steps_per_s for row in rows}
    assert min(rates) == 8
    assert rates[8] < rates[16] < rates[32] < rates[64]


def test_kinds_are_planned_each_by_itself_and_only_those_asked_for() -> None:
    where = machine(["fast", "slow"], hosts=2)
    job = ClusterJob(name="a", model="m", steps=10)
    rates = {row.kind: row.steps_per_s for row in plan_rates(job, where, profile_of, 3)}
    assert rates["fast"] == pytest.approx(2 * rates["slow"])
    assert [row.kind for row in plan_rates(job.replace(kinds=("slow",)), where, profile_of, 3)] == ["slow"]
    assert plan_rates(job.replace(gpus=2), where, profile_of, 3) == ()
    with pytest.raises(InputError, match=r"asks for 0\.5 of a GPU; plans are for whole GPUs, so give its rates"):
        plan_rates(job.replace(gpus=0.5), where, profile_of, 3)


def test_rows_that_are_no_faster_are_left_out() -> None:
    rows = [RateRow(cores=c, memory_bytes=m, steps_per_s=r) for c, m, r in ((1, 9, 1), (2, 5, 1), (2, 9, 1), (3, 9, 2))]
    assert thinned(rows) == (rows[0], rows[1], rows[3])
