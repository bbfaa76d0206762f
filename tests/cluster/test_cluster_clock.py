"""Schedules whose times are known by hand."""

import pytest

from pipedejavu.cluster import ClusterJob, RateRow, ScheduleOptions, Server, outcomes, simulate_cluster, summarise
from pipedejavu.facts import FaultsError, InputError
from tests.cluster.case import GIB, job, server


def ends(jobs: list[ClusterJob], servers: list[Server], **options: object) -> dict[str, float]:
    chosen = ScheduleOptions(**{"start_s": 0.0, **options})  # type: ignore[arg-type]
    return {done.name: done.end_s for done in outcomes(simulate_cluster(jobs, servers, chosen))}


def test_fifo_runs_in_the_order_of_arrival() -> None:
    jobs = [job("b", 5, arrival_s=1), job("a", 10), job("c", 2, arrival_s=2)]
    assert ends(jobs, [server()]) == {"a": 10, "b": 15, "c": 17}
    assert ends(jobs, [server(gpus=2)]) == {"a": 10, "b": 6, "c": 8}


def test_a_large_job_blocks_the_queue_unless_others_may_pass() -> None:
    jobs = [job("a", 10), job("large", 4, 1, gpus=2), job("small", 3, 2)]
    assert ends(jobs, [server(gpus=2)]) == {"a": 10, "large": 14, "small": 17}
    assert ends(jobs, [server(gpus=2)], backfill=True) == {"a": 10, "large": 14, "small": 5}


def test_the_shortest_job_preempts_at_the_next_tick() -> None:
    jobs = [job("long", 100), job("short", 10, arrival_s=7)]
    assert ends(jobs, [server()], policy="srtf", round_s=5) == {"long": 110, "short": 20}
    assert ends(jobs, [server()], policy="fifo", round_s=5) == {"long": 100, "short": 110}


def test_a_preempted_job_pays_for_its_checkpoint_and_its_start() -> None:
    jobs = [job("long", 100, checkpoint_bytes=3_000), job("short", 10, arrival_s=7)]
    costs = {"start_s": 2.0, "disk_bytes_per_s": 1000.0}
    # It starts in 2 s, runs from 2 to 10, and continues at 22 after 2 s, 3 s to write and 3 s to read.
    course = simulate_cluster(jobs, [server()], ScheduleOptions(policy="srtf", round_s=5, **costs))
    assert [done.end_s for done in outcomes(course)] == [22 + 8 + 92, 22]
    assert summarise(course).num_preemptions == 1
    assert summarise(course).overhead_share == pytest.approx((2 + 2 + 8) / 122)


def test_las_shares_a_gpu_by_turns() -> None:
    done = ends([job("a", 10), job("b", 10)], [server()], policy="las", round_s=1)
    assert done == {"a": 19, "b": 20}


def test_the_earliest_deadline_comes_first() -> None:
    jobs = [job("a", 10), job("b", 10, deadline_s=15), job("c", 10, deadline_s=12)]
    course = simulate_cluster(jobs, [server()], ScheduleOptions(policy="deadline", start_s=0))
    assert [(done.end_s, done.misses_deadline) for done in outcomes(course)] == [(30, False), (20, True), (10, False)]


def test_a_job_waits_for_those_before_it() -> None:
    jobs = [job("second", 3, after=("first",)), job("first", 4, arrival_s=2)]
    assert ends(jobs, [server(gpus=2)]) == {"first": 6, "second": 9}


def test_parts_of_a_gpu_are_shared() -> None:
    jobs = [job(name, 10, gpus=share) for name, share in (("a", 0.5), ("b", 0.5), ("c", 0.3))]
    assert ends(jobs, [server()]) == {"a": 10, "b": 10, "c": 20}


SENSITIVE = (RateRow(cores=1, steps_per_s=0.25), RateRow(cores=4, steps_per_s=1), RateRow(cores=6, steps_per_s=2))
INSENSITIVE = (RateRow(cores=1, steps_per_s=1),)


def test_tuned_allocation_gives_cores_to_the_job_that_needs_them() -> None:
    jobs = [job("cores", 20, rates=SENSITIVE), job("plain", 20, rates=INSENSITIVE)]
    assert ends(jobs, [server(gpus=2)]) == {"cores": 20, "plain": 20}
    assert ends(jobs, [server(gpus=2)], allocation="tuned") == {"cores": 10, "plain": 20}


def test_tuned_allocation_takes_back_what_others_need() -> None:
    """The first job has six of eight cores until a second one that needs four comes."""
    jobs = [job("a", 20, rates=SENSITIVE), job("b", 20, arrival_s=5, rates=SENSITIVE)]
    done = ends(jobs, [server(gpus=2)], allocation="tuned", round_s=1000)
    assert done == {"a": 15, "b": 25}  # a: 10 updates by 5 s, 10 more at 1 per second
    # With ticks the second job gets the cores that the first gives back, at 15 s.
    assert ends(jobs, [server(gpus=2)], allocation="tuned", round_s=5) == {"a": 15, "b": 20}


def test_an_elastic_job_grows_and_gives_back() -> None:
    rates = tuple(RateRow(gpus=n, cores=0, steps_per_s=n) for n in (1, 2, 3))
    jobs = [job("elastic", 100, most_gpus=3, rates=rates), job("b", 10, arrival_s=20, gpus=2)]
    done = ends(jobs, [server(gpus=3)], round_s=10)
    # 10 updates by 10 s, 30 more by 20 s on three GPUs, until the tick at 30 s another 30; then one GPU until 40 s.
    assert done == {"elastic": 40 + 20 / 3, "b": 40}


def test_servers_are_rented_for_jobs_that_do_not_fit_and_given_back() -> None:
    spare = server("spare", price_per_hour=36.0, is_rented=True)
    options = ScheduleOptions(start_s=0, rent_start_s=5)
    course = simulate_cluster([job("a"), job("b"), job("c", arrival_s=100)], [server(), spare], options)
    assert [done.end_s for done in outcomes(course)] == [10, 15, 110]
    assert [(time.start_s, time.end_s) for time in course.rented] == [(0, 15)]
    assert summarise(course).cost == pytest.approx(15 * 36 / 3600)


def test_max_min_gives_each_job_the_kind_that_helps_it_most() -> None:
    fast, slow = server("new", kind="new"), server("old", kind="old")
    gains = (RateRow(kind="new", cores=0, steps_per_s=10), RateRow(kind="old", cores=0, steps_per_s=1))
    alike = (RateRow(kind="new", cores=0, steps_per_s=1.1), RateRow(kind="old", cores=0, steps_per_s=1))
    jobs = [job("alike", 100, rates=alike), job("gains", 100, arrival_s=1, rates=gains)]
    assert ends(jobs, [fast, slow], policy="fifo")["gains"] == pytest.approx(101)
    assert ends(jobs, [fast, slow], policy="max-min", round_s=10)["gains"] < 30


def test_figures_of_a_schedule() -> None:
    course = simulate_cluster([job("a"), job("b"), job("c", 20)], [server(gpus=2)], ScheduleOptions(start_s=0))
    figures = summarise(course)
    assert (figures.mean_completion_s, figures.median_completion_s, figures.p99_completion_s) == (50 / 3, 10, 30)
    assert (figures.makespan_s, figures.gpu_utilisation) == (30, pytest.approx(40 / 60))
    assert figures.fairness == pytest.approx(3.5**2 / (3 * (1 + 1 + 1.5**2)))


@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        ([job("a", gpus=3)], "job 'a' asks for 3 GPUs, which fits on no server of the cluster (g: 1 with up to 2 GPUs"),
        ([job("a", memory_bytes=65 * GIB)], "job 'a' asks for 1 GPU, 65.0 GiB, which fits on no server"),
        ([job("a"), job("a")], "two jobs are called 'a'"),
        ([job("a", after=("b",))], "job 'a' waits for 'b', which is not among the 1 jobs"),
        ([job("a", after=("b",)), job("b", after=("a",))], "jobs wait for each other in a cycle: a → b → a"),
    ],
)
def test_jobs_that_cannot_run_are_refused(jobs: list[ClusterJob], text: str) -> None:
    with pytest.raises(InputError) as refused:
        simulate_cluster(jobs, [server(gpus=2)])
    assert text in str(refused.value)


def test_options_that_do_not_exist_are_refused_together() -> None:
    with pytest.raises(FaultsError, match=r"(?s)there is no policy 'fif'; did you mean 'fifo'\?.*no packing 'tight'"):
        ScheduleOptions.from_json('{"policy": "fif", "packing": "tight"}', source="the options of schedule")
