"""Queues with processes and a clock that are not real."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.cluster import POLICIES, ClusterJob, QueuedJob, RateRow, ScheduleOptions, check_queue, decide
from pipedejavu.facts import InputError
from pipedejavu.job_queue import QueueRunner, QueueState
from pipedejavu.job_queue.queue_state import JobEntry
from tests.cluster.case import server
from tests.job_queue.fake_processes import CrashError, FakeProcesses, World


def job(name: str, steps: float = 10, arrival_s: float = 0, gpus: int = 1, most: int | None = None) -> ClusterJob:
    rates = tuple(RateRow(gpus=n, cores=0, steps_per_s=n) for n in range(gpus, (most or gpus) + 1))
    return ClusterJob(
        name=name, model="zoo:mlp", steps=steps, arrival_s=arrival_s, gpus=gpus, most_gpus=most, rates=rates
    )


def run_queue(
    jobs: list[ClusterJob],
    world: World,
    *,
    retries: int = 1,
    keep: Callable[[], None] = lambda: None,
    **options: object,
) -> QueueState:
    """Runs a queue; a new scheduler goes on from the stored state whenever one crashes."""
    chosen = ScheduleOptions(**{"start_s": 0.0, "round_s": 5.0, **options})  # type: ignore[arg-type]
    stored = [QueueState(began_at=0.0, entries=tuple(JobEntry(job=each) for each in jobs)).to_json()]

    def store(state: QueueState) -> None:
        keep()
        stored[0] = state.to_json()
        world.told |= {entry.job.name for entry in state.entries if entry.is_over}
        keep()

    while True:
        state = QueueState.from_json(stored[0])
        about = server(gpus=world.num_devices, cores=world.num_devices)
        runner = QueueRunner(state, [about], chosen, FakeProcesses(world), store, lambda _: None, retries)
        try:
            runner.run()
        except CrashError:
            continue
        assert QueueState.from_json(stored[0]) == runner.state
        return runner.state


def spans(state: QueueState) -> dict[str, list[tuple[float, float, int]]]:
    return {e.job.name: [(s.start_s, s.end_s, len(s.devices)) for s in e.spans] for e in state.entries}


class Steady(Random):
    """Processes that train at once and stop at once."""

    def choice(self, values: list[float]) -> float:  # type: ignore[override]
        return values[0]


def steady(num_devices: int = 1) -> World:
    return World(num_devices, Steady(0), 0.0, 0.0)


def test_jobs_follow_each_other_on_one_device() -> None:
    state = run_queue([job("a", 10), job("b", 5, 1)], steady())
    assert spans(state) == {"a": [(0, 10, 1)], "b": [(10, 15, 1)]}
    assert [entry.waited_s(15) for entry in state.entries] == [0, 9]


def test_a_shorter_job_preempts_once_a_round_has_passed() -> None:
    state = run_queue([job("long", 100), job("short", 10, 7)], steady(), policy="srtf")
    assert spans(state) == {"long": [(0, 7, 1), (17, 110, 1)], "short": [(7, 17, 1)]}
    assert [entry.num_preemptions for entry in state.entries] == [1, 0]


def test_an_elastic_job_grows_and_gives_back() -> None:
    state = run_queue([job("elastic", 100, most=3), job("b", 10, 12, gpus=2)], steady(3))
    assert spans(state) == {"elastic": [(0, 5, 1), (5, 12, 3), (12, 17, 1), (17, 40, 3)], "b": [(12, 17, 2)]}
    assert state.entries[0].num_preemptions == 0


def test_a_job_that_does_not_stop_is_killed() -> None:
    class Stubborn(Steady):
        def choice(self, values: list[float]) -> float:  # type: ignore[override]
            return values[-1] if len(values) > 2 else values[0]

    world = World(1, Stubborn(0), 0.0, 0.0)
    state = run_queue([job("long", 200), job("short", 10, 7)], world, policy="srtf")
    assert spans(state) == {"long": [(0, 97, 1), (107, 307, 1)], "short": [(97, 107, 1)]}


def test_a_job_that_is_killed_too_often_fails_and_its_followers_do_not_start() -> None:
    follower = job("after").replace(after=("a",))
    world = World(1, Random(0), 1.0, 0.0)
    state = run_queue([job("a"), follower], world)
    assert [(entry.state, entry.num_retries, entry.reason) for entry in state.entries] == [
        ("failed", 1, "SIGKILL"), ("failed", 0, "job 'a', which it waits for, has failed"),
    ]  # fmt: skip
    assert world.num_kills == 2


def test_a_stop_signal_stops_the_jobs_and_keeps_the_queue() -> None:
    world = steady()
    jobs = [job("a", 10), job("b", 5)]
    stored: list[QueueState] = []
    processes = FakeProcesses(world)
    options = ScheduleOptions(start_s=0.0)
    first = QueueState(began_at=0.0, entries=tuple(JobEntry(job=each) for each in jobs))

    def stop_at_once(state: QueueState) -> None:
        stored.append(state)
        processes.stop_number = 15 if state.entries[0].pid else processes.stop_number

    runner = QueueRunner(first, [server()], options, processes, stop_at_once, lambda _: None)
    runner.run()
    assert [entry.state for entry in runner.state.entries] == ["waiting", "waiting"]
    assert not world.alive
    again = QueueRunner(stored[-1], [server()], options, FakeProcesses(world), stored.append, lambda _: None)
    again.run()
    assert [entry.state for entry in again.state.entries] == ["ended", "ended"]


JOBS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 40), st.integers(1, 3), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(JOBS, st.sampled_from(sorted(POLICIES)), st.integers(0, 2**32), st.booleans(), st.sampled_from([0.0, 0.1]))
def test_no_job_is_lost_or_runs_twice(
    drawn: list[tuple[int, int, int, int, bool]], policy: str, seed: int, backfill: bool, kill_share: float
) -> None:
    """Whatever is killed at any time; the laws of devices and orders are checked where processes start."""
    jobs = []
    for number, (steps, arrival_s, gpus, more, follows) in enumerate(drawn):
        one = job(f"j{number}", steps, arrival_s, gpus, gpus + more if more else None)
        jobs.append(one.replace(after=(f"j{number - 1}",)) if follows and number else one)
    world = World(3, Random(seed), kill_share, 0.05)
    world.kill_share = kill_share if seed % 2 else 0.0
    state = run_queue(jobs, world, retries=1000, keep=world.maybe_crash, policy=policy, backfill=backfill)
    assert {entry.state for entry in state.entries} == {"ended"}
    assert {*world.ended} == {each.name for each in jobs}
    assert not world.alive
    for entry in state.entries:
        assert world.saved[entry.job.name] == pytest.approx(entry.job.work)
        assert all(before.end_s <= after.start_s for before, after in zip(entry.spans, entry.spans[1:], strict=False))


def test_two_jobs_on_one_device_are_a_broken_state() -> None:
    entries = [JobEntry(job=job(name), state="running", devices=(0,)) for name in "ab"]
    with pytest.raises(ValueError, match="device 0 is held by two jobs"):
        QueueState(began_at=0.0, entries=tuple(entries))


def test_devices_are_numbered_through_all_servers() -> None:
    options, servers = ScheduleOptions(start_s=0.0), [server("s", gpus=1), server("t", gpus=2)]
    queue = [QueuedJob(job("pair", gpus=2), 10, is_ready=True), QueuedJob(job("one"), 10, is_ready=True)]
    assert decide(queue, servers, options).starts == {0: (1, 2), 1: (0,)}
    assert decide(queue, servers, options, lost={0}).starts == {0: (1, 2)}
    held = [queue[0]._replace(devices=(1, 2)), queue[1]]
    assert decide(held, servers, options) == ((), {1: (0,)}, False)
    check_queue([job("pair", gpus=2)], servers, options)
    with pytest.raises(InputError, match="asks for 3 devices, and the most on one node are 2 of kind 'g'"):
        check_queue([job("three", gpus=3)], servers, options)
    with pytest.raises(InputError, match="uses up to 3 devices, and the most of one node are 2"):
        check_queue([job("elastic", most=3)], servers, options)


def test_jobs_wait_for_nodes_that_come_back() -> None:
    world, told = steady(), list[str]()
    processes = FakeProcesses(world)
    processes.lost = lambda: frozenset({0})  # type: ignore[method-assign]
    state = QueueState(began_at=0.0, entries=(JobEntry(job=job("a")),))
    runner = QueueRunner(state, [server()], ScheduleOptions(), processes, lambda _: None, told.append)
    runner.run()
    assert runner.state.entries[0].state == "waiting"
    assert told == ["the jobs that are left fit on no node that is left; repeat the command when nodes are back"]
