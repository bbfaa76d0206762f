"""Figures of a schedule: completion times, makespan, utilisation, fairness, deadlines and cost."""

from math import ceil
from statistics import mean, median

from pipedejavu.cluster.cluster_clock import ClusterCourse
from pipedejavu.cluster.job_run import JobRun, JobSpan
from pipedejavu.facts import Record
from pipedejavu.facts.quantity import Seconds


class JobOutcome(Record):
    """When a job ran, and how long it took."""

    name: str
    arrival_s: Seconds
    start_s: Seconds
    end_s: Seconds
    completion_s: Seconds
    """From arrival to end."""
    waited_s: Seconds
    """Time of that in which it held no devices."""
    slowdown: float
    """Completion time, relative to the run time on its fastest kind without waiting; at least 1 s counts as that."""
    num_preemptions: int
    misses_deadline: bool = False


class ScheduleSummary(Record):
    """Figures of a whole schedule."""

    policy: str
    allocation: str
    packing: str
    num_jobs: int
    num_servers: int
    mean_completion_s: Seconds
    median_completion_s: Seconds
    p99_completion_s: Seconds
    makespan_s: Seconds
    """From the first arrival to the last end."""
    mean_wait_s: Seconds
    gpu_utilisation: float
    """Held GPU time over that of the servers that were on, until the last end."""
    core_utilisation: float
    overhead_share: float
    """Part of the held GPU time that went into saving, loading and starting."""
    fairness: float
    """Jain's index of the slowdowns: 1 if all jobs are slowed down alike."""
    most_slowdown: float
    num_preemptions: int
    num_missed_deadlines: int
    cost: float
    """Price of all hours: owned servers until the last end, rented ones while they were on."""
    num_events: int


def outcomes(course: ClusterCourse) -> list[JobOutcome]:
    """Returns what became of each job."""
    held: dict[int, float] = {}
    for span in course.spans:
        held[span.job] = held.get(span.job, 0.0) + span.end_s - span.start_s
    return [_outcome(run, held[run.index], max(course.base_rates[run.index].values())) for run in course.runs]


def _outcome(run: JobRun, held_s: float, rate: float) -> JobOutcome:
    assert run.end_s is not None
    assert run.first_s is not None
    completion = run.end_s - run.job.arrival_s
    return JobOutcome(
        name=run.job.name,
        arrival_s=run.job.arrival_s,
        start_s=run.first_s,
        end_s=run.end_s,
        completion_s=completion,
        waited_s=round(max(0.0, completion - held_s), 6),
        slowdown=completion / max(run.job.work / rate, 1.0),
        num_preemptions=run.num_preemptions,
        misses_deadline=run.job.deadline_s is not None and run.end_s > run.job.deadline_s,
    )


def summarise(course: ClusterCourse) -> ScheduleSummary:
    """Returns the figures of a schedule."""
    jobs = outcomes(course)
    first, last = min(job.arrival_s for job in jobs), max(job.end_s for job in jobs)
    times = sorted(job.completion_s for job in jobs)
    slowdowns = [job.slowdown for job in jobs]
    on_s = list(zip(_on_times(course, first, last), course.servers, strict=True))
    held_gpu_s = sum(_gpus(span) * (span.end_s - span.start_s) for span in course.spans)
    lost_gpu_s = sum(_gpus(span) * span.overhead_s for span in course.spans)
    held_core_s = sum(span.core_s for span in course.spans)
    return ScheduleSummary(
        policy=course.options.policy,
        allocation=course.options.allocation,
        packing=course.options.packing,
        num_jobs=len(jobs),
        num_servers=len(course.servers),
        mean_completion_s=mean(times),
        median_completion_s=median(times),
        p99_completion_s=times[ceil(0.99 * len(times)) - 1],
        makespan_s=last - first,
        mean_wait_s=mean(job.waited_s for job in jobs),
        gpu_utilisation=_share(held_gpu_s, sum(time * server.gpus for time, server in on_s)),
        core_utilisation=_share(held_core_s, sum(time * server.cores_milli / 1000 for time, server in on_s)),
        overhead_share=_share(lost_gpu_s, held_gpu_s),
        fairness=sum(slowdowns) ** 2 / (len(jobs) * sum(s * s for s in slowdowns)),
        most_slowdown=max(slowdowns),
        num_preemptions=sum(job.num_preemptions for job in jobs),
        num_missed_deadlines=sum(job.misses_deadline for job in jobs),
        cost=sum(time / 3600 * server.price_per_hour for time, server in on_s),
        num_events=course.num_events,
    )


def _gpus(span: JobSpan) -> float:
    """Returns the GPUs that a job held in a span."""
    return sum(part.gpu_milli / 1000 * len(part.slots) for part in span.parts)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _on_times(course: ClusterCourse, first_s: float, last_s: float) -> list[float]:
    """Returns how long each server was on."""
    times = [0.0 if server.is_rented else last_s - first_s for server in course.servers]
    for rent in course.rented:
        times[rent.server] += rent.end_s - rent.start_s
    return times
