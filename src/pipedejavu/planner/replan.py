"""Replanning during a run: searches again with measured costs, and decides whether to switch plans.

If a worker's passes take k times their forecast, its device is taken to be k times slower; all other costs stay.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self

from pipedejavu.engine import check_runnable
from pipedejavu.facts import InputError, Machine, Profile, Record, format_bytes, format_seconds
from pipedejavu.health.failure import ShortageError, WorkerError
from pipedejavu.plan import Plan
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.throughput import ThroughputMonitor
from pipedejavu.search import RankedPlan, SearchOptions, nothing_fits, search
from pipedejavu.simulate import simulate

MARGIN = 0.1
"""The fraction of a step that another plan must save; forecasts are not more accurate than that."""
ASSUMED_START_S = 15.0
"""Time of a switch for processes to end, start, import torch and open the model."""
ASSUMED_STATE_BYTES_PER_S = 0.5e9
"""Rate at which a switch copies, writes, verifies and reads state."""
BUDGET_S = 10.0
"""Time limit of a search during training."""
CANDIDATES = 20
"""Plans to rank when one with a given number of workers is needed."""
SEARCH_SHARE = 0.05
"""Fraction of the training time in which searches may run."""


class PlanSwitch(Record):
    """A plan that a run continues with from its next checkpoint, with its profile, machine and reason."""

    plan: Plan
    profile: Profile
    machine: Machine
    now_s: float
    """Forecast time per update of the current plan, with measured costs."""
    then_s: float
    """Forecast time per update of the new plan."""
    reason: str

    @classmethod
    def to(cls, best: RankedPlan, before: Plan, now_s: float, reason: str) -> Self:
        """Returns the switch to a plan from a search; its units are compiled if they were before."""
        profile, machine = best.profile, best.machine
        plan = best.plan.replace(is_compiled=before.is_compiled and not best.plan.splits_backward)
        return cls(plan=plan, profile=profile, machine=machine, now_s=now_s, then_s=best.time_s, reason=reason)

    def row(self, before: str, step: int) -> dict[str, object]:
        """Returns the line for the metrics; `before` is the name of the current plan."""
        forecasts = {"before_s": self.now_s, "then_s": self.then_s}
        return {"switched": step, "before": before, "plan": self.plan.name, **forecasts, "reason": self.reason}


def check_replan(options: TrainOptions, plan: Plan) -> None:
    """Raises InputError if a run that may switch plans has options that rule that out."""
    option = "--replan" if options.replan else "--on-oom replan"
    if options.keeps_log:
        raise InputError(f"--audit replays one plan from its beginning, and {option} may change it; leave one out")
    if options.replan and options.checkpoint_every == 0:
        raise InputError("--replan goes on from a checkpoint, and --checkpoint-every 0 takes none; use --no-replan")
    if plan.version.kind != "sync":
        remedy = "--no-replan" if options.replan else "--on-oom stop"
        raise InputError(f"plan '{plan.name}' has no common moment to switch to another plan; use {remedy}")


def with_measured(program: Program, slowdowns: Sequence[float]) -> tuple[Profile, Machine]:
    """Returns profile and machine with one device kind per worker, slowed down by the worker's measured factor."""
    profile, machine = program.profile, program.machine
    slowdown_of: dict[str, float] = {}
    for name, slowdown in zip(program.devices, slowdowns, strict=True):
        slowdown_of[name] = max(slowdown, slowdown_of.get(name, 0.0))
    devices, source = [], dict[str, tuple[str, float]]()
    for device in machine.devices:
        slowdown = slowdown_of.get(device.name, 1.0)
        kind = f"{device.kind.partition('@')[0]}@{device.name}" if slowdown != 1.0 else device.kind
        source[kind] = (device.kind, slowdown)
        devices.append(device.replace(kind=kind))
    units = [
        unit.replace(
            times=unit.times
            | {k: unit.times[o].times(slowdown) for k, (o, slowdown) in source.items() if o in unit.times}
        )
        for unit in profile.units
    ]
    return profile.replace(units=tuple(units)), machine.replace(devices=tuple(devices))


def search_options_for(program: Program, samples: int | None, num_workers: int | None = None) -> SearchOptions:
    """Returns the search options for the rest of a run: the same batch size, and the same clipping."""
    precision = program.plan.precision
    options = SearchOptions(
        batch=sum(program.sizes), samples=samples, precision=precision, is_runnable=True, time_budget_s=BUDGET_S
    )
    options = options if num_workers is None else options.replace(candidates=CANDIDATES)
    return options if program.plan.reduce.clip == "none" else options.replace(clip="global")


def first_runnable(candidates: Iterable[RankedPlan], num_workers: int | None = None) -> RankedPlan | None:
    """Returns the best plan that the engine runs, with `num_workers` workers if that is given."""
    return next(find_runnable(candidates, num_workers), None)


def find_runnable(candidates: Iterable[RankedPlan], num_workers: int | None = None) -> Iterator[RankedPlan]:
    """Yields the plans that the engine runs, with `num_workers` workers if that is given."""
    for candidate in candidates:
        if num_workers is not None and candidate.plan.num_workers != num_workers:
            continue
        with suppress(InputError):
            check_runnable(compile_plan(candidate.plan, candidate.profile, candidate.machine, fold=False))
            yield candidate


def find_switch(
    program: Program,
    slowdowns: Sequence[float],
    steps: int,
    samples: int | None = None,
    num_workers: int | None = None,
    start_s: float | None = None,
) -> PlanSwitch | None:
    """Returns the switch that pays over the remaining `steps`, with measured costs; None if no switch does.

    It must save more than `MARGIN` of a step, and over all steps more time than the switch takes. `start_s` is the time
    that starting workers takes; None for an assumed value.
    """
    profile, machine = with_measured(program, slowdowns)
    now_s = simulate(replace(program, profile=profile, machine=machine)).makespan_s
    if revived := _revive(program, profile, machine, slowdowns, now_s):
        is_worth = (now_s - revived.then_s) * steps >= switch_s(profile, start_s)
        return revived if revived.then_s <= (1 - MARGIN) * now_s and is_worth else None
    best = first_runnable(
        search(profile, machine, search_options_for(program, samples, num_workers)).candidates, num_workers
    )
    if best is None or best.time_s > (1 - MARGIN) * now_s or (now_s - best.time_s) * steps < switch_s(profile, start_s):
        return None
    worst = max(range(len(slowdowns)), key=lambda worker: max(slowdowns[worker], 1 / slowdowns[worker]))
    times = f"worker {worst} on {program.devices[worst]} takes {slowdowns[worst]:.1f} times its forecast"
    gain = f"forecast {format_seconds(best.time_s)} a step instead of {format_seconds(now_s)}"
    return PlanSwitch.to(best, program.plan, now_s, f"{times}: the run goes on under plan '{best.plan.name}', {gain}")


def _revive(
    program: Program, profile: Profile, machine: Machine, slowdowns: Sequence[float], now_s: float
) -> PlanSwitch | None:
    """Returns the switch to the shares with which a replica that got no samples gets some, by measured costs.

    None if no replica is idle, if shares are forced, or if leaving it idle is still the fastest.
    """
    plan = program.plan
    if plan.feed.kind != "share" or not plan.feed.is_controlled or all(program.parts):
        return None
    again = compile_plan(plan.replace(feed=plan.feed.replace(shares=None)), profile, machine, fold=False)
    back = [n for n, (now, then) in enumerate(zip(program.parts, again.parts, strict=True)) if then and not now]
    if not back:
        return None
    then_s = simulate(again).makespan_s
    counts = " + ".join(str(sum(part)) for part in again.parts)
    reason = (
        f"workers take {', '.join(f'{slowdown:.1f}' for slowdown in slowdowns)} times their forecast, so replica"
        f" {' and '.join(map(str, back))}, idle so far, gets samples again: {counts}, forecast"
        f" {format_seconds(then_s)} a step instead of {format_seconds(now_s)}"
    )
    return PlanSwitch(plan=again.plan, profile=profile, machine=machine, now_s=now_s, then_s=then_s, reason=reason)


def relieve(
    program: Program, shortage: ShortageError, samples: int | None = None, num_workers: int | None = None
) -> PlanSwitch:
    """Returns the switch to a plan that fits the memory the failed worker could get; raises WorkerError if none fits.

    The plan also needs a tenth less than the failed plan's forecast. If the worker got at least what was forecast,
    forecasts are too low on all devices of its kind; otherwise its device has less memory than it states.
    """
    machine, device = program.machine, program.machine.device(program.devices[shortage.worker])
    prediction = simulate(program)
    worker = prediction.workers[shortage.worker]
    forecast = worker.reserved_bytes or worker.peak_bytes  # for a GPU the memory is what its allocator reserved
    limit_bytes = round(min(shortage.found_bytes, (1 - MARGIN) * forecast))
    is_too_low = shortage.found_bytes >= forecast
    devices = (
        d.replace(memory_bytes=min(d.memory_bytes, d.reserved_bytes + limit_bytes))
        if d.name == device.name or (is_too_low and d.kind == device.kind)
        else d
        for d in machine.devices
    )
    smaller, question = machine.replace(devices=tuple(devices)), search_options_for(program, samples, num_workers)
    has, got = format_bytes(device.memory_bytes - device.reserved_bytes), format_bytes(shortage.found_bytes)
    figures = f"{format_bytes(forecast)} were forecast of {has}, and {got} were found"
    what = f"worker {shortage.worker} on {device.name} ran out of memory: {figures}"
    best = first_runnable(search(program.profile, smaller, question).candidates, num_workers)
    if best is None:
        raise WorkerError(f"{what}; {nothing_fits(program.profile, smaller, question)}")
    need = max(best.memory, key=lambda memory: memory.share)
    times = f"{format_seconds(best.time_s)} a step instead of {format_seconds(prediction.makespan_s)}"
    fits = f"{format_bytes(need.need_bytes)} on {need.device}, {times}"
    return PlanSwitch.to(
        best, program.plan, prediction.makespan_s, f"{what}; plan '{best.plan.name}' would fit ({fits})"
    )


def switch_s(profile: Profile, start_s: float | None = None) -> float:
    """Returns the assumed time of a switch."""
    size = sum(unit.parameter_bytes + unit.optimizer_bytes for unit in profile.units)
    return (ASSUMED_START_S if start_s is None else start_s) + size / ASSUMED_STATE_BYTES_PER_S


class Replanner:
    """Watches the throughput of a run, and searches for a better plan in a background thread.

    `find` takes each worker's slowdown against the forecast and returns a switch that pays, if any; `switch` is called
    with it, once.
    """

    def __init__(
        self,
        throughput: ThroughputMonitor,
        find: Callable[[Sequence[float]], PlanSwitch | None],
        switch: Callable[[PlanSwitch], None],
    ):
        self.throughput, self.find, self.switch = throughput, find, switch
        self._next_s = 0.0
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Starts a search if the throughput has left the forecast's band, unless one has just run."""
        if (self._thread and self._thread.is_alive()) or time.monotonic() < self._next_s:
            return
        slowdowns = self.throughput.departure()
        if slowdowns is not None:
            self._thread = threading.Thread(target=self._search, args=(slowdowns,), name="replanner", daemon=True)
            self._thread.start()

    def _search(self, slowdowns: Sequence[float]) -> None:
        start_s = time.monotonic()
        with suppress(InputError):
            switch = self.find(slowdowns)
            if switch is not None:
                self._next_s = float("inf")
                self.switch(switch)
                return
        self._next_s = time.monotonic() + (time.monotonic() - start_s) / SEARCH_SHARE
