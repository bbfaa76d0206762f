"""Shares of a batch: how many samples of an update each replica trains, so that the update is over soonest.

Knows crews, what their units take and what the wires carry; the order of single actions is `schedule`'s.
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
    """Samples of an update for each crew, and why."""

    samples: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class ShareEstimate:
    """What an update takes under some shares; the three follow each other."""

    compute_s: float
    sum_s: float
    """Adding up the gradients."""
    update_s: float

    @property
    def total_s(self) -> float:
        """The whole update."""
        return self.compute_s + self.sum_s + self.update_s

    def __str__(self) -> str:
        parts = (self.total_s, self.compute_s, self.sum_s, self.update_s)
        total, compute, adding, update = map(format_seconds, parts)
        return f"{total} ({compute} to compute, {adding} to add up gradients, {update} to update)"


class _Pace(NamedTuple):
    first_s: float
    """One microbatch, there and back."""
    further_s: float
    """What each further one adds."""


def cut_samples(samples: int, most: int) -> tuple[int, ...]:
    """Cuts a crew's samples into as few microbatches of at most `most` as hold them."""
    return cut_evenly(samples, -(-samples // most))


def cut_evenly(samples: int, parts: int) -> tuple[int, ...]:
    """Cuts samples into parts as equal as can be."""
    size, more = divmod(samples, parts or 1)
    return (size + 1,) * more + (size,) * (parts - more)


def divide(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divides a whole number in proportion to weights; what is left goes to the largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    found = [int(part) for part in exact]
    by_rest = sorted(range(len(weights)), key=lambda n: found[n] - exact[n])
    for n in by_rest[: total - sum(found)]:
        found[n] += 1
    return tuple(found)


class ShareSplit:
    """The shares of one plan on one machine: what each would take, and which is best.

    Crews compute at the same time, gradients are added up once all have ended, and then each makes the update. For
    crews of one worker that is what the simulator finds; of a pipeline it is the time of its slowest stage or transfer
    for every microbatch, and of the others once.
    """

    def __init__(
        self, plan: Plan, profile: Profile, machine: Machine, pipelines: Sequence[Pipeline], devices: Sequence[str]
    ):
        self.plan, self.profile, self.machine, self.pipelines, self.devices = plan, profile, machine, pipelines, devices
        self.total = plan.feed.microbatches * plan.feed.samples
        bounds = (0, *(plan.cut.bounds or ()), len(profile.units))
        self.stages = [range(start, end) for start, end in pairwise(bounds)]
        self._paces: dict[tuple[int, int], _Pace] = {}

    def choose(self) -> Shares:
        """Returns the plan's own shares or, where it has none, those with the shortest update."""
        given = self.plan.feed.shares
        if given is not None:
            if len(given) != len(self.pipelines):
                raise InputError(
                    f"the plan has {len(given)} shares for {len(self.pipelines)} replicas; give one for each"
                )
            return Shares(divide(self.total, given), "the plan's shares")
        numbers = range(len(self.pipelines))
        on_devices = [n for n in numbers if n < len(self.pipelines) - self.plan.place.cpu_replicas]
        everyone = self._level(numbers)
        alone = self._level(on_devices)
        others = [self._level([n for n in numbers if n not in on_devices])] if len(on_devices) < len(numbers) else []
        best = min((everyone, alone, *others), key=lambda samples: self.estimate(samples).total_s)
        return Shares(best, self._reason(best, alone, everyone))

    def _reason(self, best: tuple[int, ...], alone: tuple[int, ...], everyone: tuple[int, ...]) -> str:
        taken = self.estimate(best)
        if alone == everyone:
            return f"all end at about the same time; an update is estimated at {taken}"
        if best == alone:
            part = sum(everyone[len(self.pipelines) - self.plan.place.cpu_replicas :])
            return (
                f"the CPU gets none: an update is estimated at {taken}, and with {part} samples on the CPU, its best"
                f" part, at {self.estimate(everyone)}"
            )
        return (
            f"an update is estimated at {taken}, and without the CPU at {format_seconds(self.estimate(alone).total_s)}"
        )

    def estimate(self, samples: Sequence[int]) -> ShareEstimate:
        """Returns what an update takes when each crew trains so many samples."""
        active = [n for n, count in enumerate(samples) if count]
        compute = max(self._compute_s(n, samples[n]) for n in active)
        update = max(self._update_s(n) for n in active)
        return ShareEstimate(compute, self._sum_s(active), update)

    def _level(self, active: Sequence[int]) -> tuple[int, ...]:
        """Gives each crew one sample and then every next one to whoever ends soonest with it.

        Where crews of one worker take no less for more samples, no other shares of these end sooner.
        """
        found = [0] * len(self.pipelines)
        for n in active[: self.total]:
            found[n] = 1
        queue = [(self._compute_s(n, found[n] + 1), n) for n in active]
        heapq.heapify(queue)
        for _ in range(self.total - sum(found)):
            n = queue[0][1]
            found[n] += 1
            heapq.heapreplace(queue, (self._compute_s(n, found[n] + 1), n))
        return tuple(found)

    def _compute_s(self, pipeline: int, samples: int) -> float:
        parts = -(-samples // self.plan.feed.samples)
        size, more = divmod(samples, parts)  # so many microbatches have a sample more than the others
        small, large = self._pace(pipeline, size), self._pace(pipeline, size + 1)
        first = large if more else small
        return more * large.further_s + (parts - more) * small.further_s + first.first_s - first.further_s

    def _pace(self, pipeline: int, samples: int) -> "_Pace":
        """Returns what microbatches of one size take; under 1F1B a stage holds as many as there are from it on."""
        if (pipeline, samples) not in self._paces:
            rows = [(work.at(samples), sent.at(samples)) for work, sent in self._costs[pipeline]]
            behind, further, is_bound = 0.0, 0.0, self.pipelines[pipeline].schedule in ("1f1b", "zb-h1")
            for live, (work, sent) in enumerate(reversed(rows), 1):
                behind += work + 2 * sent
                further = max(further, work, sent, behind / live if is_bound else 0.0)
            self._paces[pipeline, samples] = _Pace(behind, further)
        return self._paces[pipeline, samples]

    @cached_property
    def _costs(self) -> list[list[tuple[Cost, Cost]]]:
        """Of each crew's workers, forward and backward of a microbatch, and sending its output on."""
        found = []
        for pipeline in self.pipelines:
            workers = self._workers(pipeline)
            ends = [*(worker for worker, _ in workers[1:]), None]
            found.append([(self._cost(*row), self._sent(*row, end)) for row, end in zip(workers, ends, strict=True)])
        return found

    def _workers(self, pipeline: Pipeline) -> list[tuple[int, list[int]]]:
        """Returns a crew's workers with the units that each holds."""
        held: dict[int, list[int]] = {}
        for (_, stage), worker in pipeline.homes().items():
            held.setdefault(worker, []).extend(self.stages[stage])
        return list(held.items())

    def _device(self, worker: int) -> Device:
        return self.machine.device(self.devices[worker])

    def _cost(self, worker: int, units: Sequence[int]) -> Cost:
        times = [self.profile.time(self.profile.units[u], self._device(worker).kind) for u in units]
        return Cost().plus(*(cost for time in times for cost in (time.forward, time.backward)))

    def _sent(self, worker: int, units: Sequence[int], end: int | None) -> Cost:
        """Returns what the output of a worker's last unit takes to the next worker."""
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
        """Returns the time to add up gradients, stage by stage, around a ring of those who hold it."""
        total = 0.0
        for stage, units in enumerate(self.stages):
            ring = [self.devices[w] for n in active for (_, s), w in self.pipelines[n].homes().items() if s == stage]
            routes = [self.machine.route(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True) if a != b]
            if routes:
                size, n = sum(self.profile.units[u].gradient_bytes for u in units), len(ring)
                load = max(Counter(wire for route in routes for wire in route.wires).values(), default=1)
                rate = min(route.sum_bytes_per_s for route in routes) / load
                total += 2 * (n - 1) * max(route.sum_latency_s for route in routes) + 2 * (n - 1) / n * size / rate
        return total
