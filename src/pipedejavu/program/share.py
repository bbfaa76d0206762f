"""Shares of a batch: how many samples of an update each replica trains on, to make the update as short as possible.

Knows pipelines, the times of their units and the rates of links; knows nothing of the order of single actions.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pipedejavu.facts import Cost, Device, InputError, Machine, Profile, format_seconds
from pipedejavu.plan import Plan
from pipedejavu.program.pipeline import Pipeline


class Shares(NamedTuple):
    """Samples of an update per pipeline, and the reason for them."""

    samples: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class ShareEstimate:
    """The estimated time of an update under given shares: three phases, one after the other."""

    compute_s: float
    sum_s: float
    """The time to sum the gradients."""
    update_s: float

    @property
    def total_s(self) -> float:
        """The time of the whole update."""
        return self.compute_s + self.sum_s + self.update_s

    def __str__(self) -> str:
        parts = (self.total_s, self.compute_s, self.sum_s, self.update_s)
        total, compute, adding, update = map(format_seconds, parts)
        return f"{total} ({compute} to compute, {adding} to add up gradients, {update} to update)"


class _PassTime(NamedTuple):
    """The time of microbatches of one size in one pipeline."""

    first_s: float
    """The forward and backward of one microbatch through all stages."""
    further_s: float
    """What each further microbatch adds."""


def cut_samples(samples: int, most: int) -> tuple[int, ...]:
    """Divides samples into the fewest microbatches of at most `most` samples each."""
    return cut_evenly(samples, -(-samples // most))


def cut_evenly(samples: int, parts: int) -> tuple[int, ...]:
    """Divides samples into parts whose sizes differ by at most one."""
    size, more = divmod(samples, parts or 1)
    return (size + 1,) * more + (size,) * (parts - more)


def divide(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divides a whole number in proportion to weights, rounding by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(weights)), key=lambda n: parts[n] - exact[n])
    for n in by_remainder[: total - sum(parts)]:
        parts[n] += 1
    return tuple(parts)


class ShareSplit:
    """Estimates the shares of one plan on one machine and chooses the best.

    Pipelines compute concurrently, gradients are summed after the last one ends, and then each pipeline updates; a late
    pipeline computes its next share meanwhile. For pipelines of one worker the estimate equals the simulator's. For
    longer ones it counts the slowest stage or transfer once per microbatch, and every other stage once.
    """

    def __init__(
        self, plan: Plan, profile: Profile, machine: Machine, pipelines: Sequence[Pipeline], devices: Sequence[str]
    ):
        self.plan, self.profile, self.machine, self.pipelines, self.devices = plan, profile, machine, pipelines, devices
        self.total = plan.feed.microbatches * plan.feed.samples
        bounds = (0, *(plan.cut.bounds or ()), len(profile.units))
        self.stages = [range(start, end) for start, end in pairwise(bounds)]
        self._pass_times: dict[tuple[int, int], _PassTime] = {}

    def choose(self) -> Shares:
        """Returns the plan's own shares or, if it has none, those with the shortest update."""
        shares = self.plan.feed.shares
        if shares is not None:
            if len(shares) != len(self.pipelines):
                raise InputError(
                    f"the plan has {len(shares)} shares for {len(self.pipelines)} replicas; give one for each"
                )
            return Shares(divide(self.total, shares), "the plan's shares")
        numbers = range(len(self.pipelines))
        on_devices = [n for n in numbers if n < len(self.pipelines) - self.plan.place.cpu_replicas]
        with_all = self._balance(numbers)
        without_cpu = self._balance(on_devices)
        others = [self._balance([n for n in numbers if n not in on_devices])] if len(on_devices) < len(numbers) else []
        best = min((with_all, without_cpu, *others), key=lambda samples: self.estimate(samples).total_s)
        return Shares(best, self._reason(best, without_cpu, with_all))

    def _reason(self, best: tuple[int, ...], without_cpu: tuple[int, ...], with_all: tuple[int, ...]) -> str:
        estimate = self.estimate(best)
        if without_cpu == with_all:
            return f"all end at about the same time; an update is estimated at {estimate}"
        if best == without_cpu:
            part = sum(with_all[len(self.pipelines) - self.plan.place.cpu_replicas :])
            return (
                f"the CPU gets none: an update is estimated at {estimate}, and with {part} samples on the CPU, its best"
                f" part, at {self.estimate(with_all)}"
            )
        alone = format_seconds(self.estimate(without_cpu).total_s)
        return f"an update is estimated at {estimate}, and without the CPU at {alone}"

    def estimate(self, samples: Sequence[int]) -> ShareEstimate:
        """Estimates an update in which pipeline n trains on samples[n] samples."""
        active = [n for n, count in enumerate(samples) if count]
        late = [n for n in active if self._is_late(n)]
        if not late or late == active:
            compute = max(self._compute_s(n, samples[n]) for n in active)
            return ShareEstimate(compute, self._sum_s(active), max(self._update_s(n) for n in active))
        # A late pipeline computes its next share while the others wait for the sum and update.
        on_time = [n for n in active if n not in late]
        update, total = max(self._update_s(n) for n in on_time), self._sum_s(active)
        ends = [self._compute_s(n, samples[n]) for n in on_time]
        ends += [self._compute_s(n, samples[n]) + self._update_s(n) - update - total for n in late]
        return ShareEstimate(max(ends), total, update)

    def _is_late(self, pipeline: int) -> bool:
        """Whether a pipeline computes its share with older weights."""
        version = self.plan.version
        return (
            version.kind == "late"
            and version.delay > 0
            and pipeline >= len(self.pipelines) - self.plan.place.cpu_replicas
        )

    def _rest_s(self, active: Sequence[int]) -> list[float]:
        """Returns how long each pipeline is busy with an update beside its share, if some are late; else zeros."""
        if not any(map(self._is_late, active)) or all(map(self._is_late, active)):
            return [0.0] * len(self.pipelines)
        total = self._sum_s(active)
        return [self._update_s(n) + (0.0 if self._is_late(n) else total) for n in range(len(self.pipelines))]

    def _balance(self, active: Sequence[int]) -> tuple[int, ...]:
        """Gives each active pipeline one sample, then each further sample to the pipeline that would end first.

        This is optimal for pipelines of one worker whose time never falls with more samples.
        """
        samples = [0] * len(self.pipelines)
        for n in active[: self.total]:
            samples[n] = 1
        rest = self._rest_s(active)
        queue = [(rest[n] + self._compute_s(n, samples[n] + 1), n) for n in active]
        heapq.heapify(queue)
        for _ in range(self.total - sum(samples)):
            n = queue[0][1]
            samples[n] += 1
            heapq.heapreplace(queue, (rest[n] + self._compute_s(n, samples[n] + 1), n))
        return tuple(samples)

    def _compute_s(self, pipeline: int, samples: int) -> float:
        parts = -(-samples // self.plan.feed.samples)
        size, more = divmod(samples, parts)  # `more` microbatches have one sample more than the others
        small, large = self._pass_time(pipeline, size), self._pass_time(pipeline, size + 1)
        first = large if more else small
        return more * large.further_s + (parts - more) * small.further_s + first.first_s - first.further_s

    def _pass_time(self, pipeline: int, samples: int) -> _PassTime:
        """Returns the time of microbatches of one size.

        Under 1F1B the k-th stage from the end has at most k microbatches in flight, which bounds its rate.
        """
        if (pipeline, samples) not in self._pass_times:
            rows = [(work.at(samples), sent.at(samples)) for work, sent in self._costs[pipeline]]
            through, further, is_bound = 0.0, 0.0, self.pipelines[pipeline].schedule in ("1f1b", "zb-h1")
            for live, (work, sent) in enumerate(reversed(rows), 1):
                through += work + 2 * sent
                further = max(further, work, sent, through / live if is_bound else 0.0)
            self._pass_times[pipeline, samples] = _PassTime(through, further)
        return self._pass_times[pipeline, samples]

    @cached_property
    def _costs(self) -> list[list[tuple[Cost, Cost]]]:
        """For each pipeline and worker, the cost of a microbatch's forward and backward and of sending its output."""
        costs = []
        for pipeline in self.pipelines:
            workers = self._workers(pipeline)
            ends = [*(worker for worker, _ in workers[1:]), None]
            costs.append([(self._cost(*row), self._sent(*row, end)) for row, end in zip(workers, ends, strict=True)])
        return costs

    def _workers(self, pipeline: Pipeline) -> list[tuple[int, list[int]]]:
        """Returns a pipeline's workers with the units that each holds."""
        held: dict[int, list[int]] = {}
        for (_, stage), worker in pipeline.stage_workers().items():
            held.setdefault(worker, []).extend(self.stages[stage])
        return list(held.items())

    def _device(self, worker: int) -> Device:
        return self.machine.device(self.devices[worker])

    def _cost(self, worker: int, units: Sequence[int]) -> Cost:
        times = [self.profile.time(self.profile.units[u], self._device(worker).kind) for u in units]
        return Cost().plus(*(cost for time in times for cost in (time.forward, time.backward)))

    def _sent(self, worker: int, units: Sequence[int], end: int | None) -> Cost:
        """Returns the cost of sending a worker's outputs to the next worker `end`."""
        passing: dict[int, float] = {}
        for source, target, size in self.profile.links:
            if source <= units[-1] < target:
                passing[source] = max(size, passing.get(source, 0.0))
        if end is None or not passing or self.devices[worker] == self.devices[end]:
            return Cost()
        route = self.machine.route(self.devices[worker], self.devices[end])
        return Cost(fixed_s=route.latency_s, per_sample_s=sum(passing.values()) / route.bytes_per_s)

    def _update_s(self, pipeline: int) -> float:
        return max(
            sum(self.profile.time(self.profile.units[u], self._device(worker).kind).update_s for u in units)
            for worker, units in self._workers(self.pipelines[pipeline])
        )

    def _sum_s(self, active: Sequence[int]) -> float:
        """Returns the time to sum gradients, stage by stage, around a ring of the workers that hold the stage."""
        total = 0.0
        for stage, units in enumerate(self.stages):
            holders = [self.pipelines[n].stage_workers() for n in active]
            ring = [self.devices[worker] for held in holders for (_, s), worker in held.items() if s == stage]
            routes = [self.machine.route(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True) if a != b]
            if routes:
                size, n = sum(self.profile.units[u].gradient_bytes for u in units), len(ring)
                load = max(Counter(wire for route in routes for wire in route.wires).values(), default=1)
                rate = min(route.sum_bytes_per_s for route in routes) / load
                total += 2 * (n - 1) * max(route.sum_latency_s for route in routes) + 2 * (n - 1) / n * size / rate
        return total
