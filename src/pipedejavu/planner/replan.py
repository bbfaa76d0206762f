"""Planning while training: the planner is asked again with what was measured, and says whether to switch.

A worker whose passes take k times their forecast has a device that computes k times as long; nothing else is changed.
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
"""The part of a step that another plan must be forecast to save: forecasts are not better than that."""
ASSUMED_START_S = 15.0
"""Of a switch: processes that end, start, import torch and open the model."""
ASSUMED_STATE_BYTES_PER_S = 0.5e9
"""Of a switch: state that is copied, written, verified and read."""
BUDGET_S = 10.0
"""That a search beside training may take."""
CANDIDATES = 20
"""Plans that are looked at for one with a given number of workers."""
SEARCH_SHARE = 0.05
"""The part of the time in which searches may run."""


class PlanSwitch(Record):
    """A plan to go on with from the next checkpoint, what it was planned for, and why."""

    plan: Plan
    profile: Profile
    machine: Machine
    now_s: float
    """What an update of the plan before is forecast to take with the costs that were measured."""
    then_s: float
    reason: str

    @classmethod
    def to(cls, found: RankedPlan, now_s: float, reason: str) -> Self:
        """Returns the switch to a plan that was found."""
        profile, machine = found.profile, found.machine
        return cls(plan=found.plan, profile=profile, machine=machine, now_s=now_s, then_s=found.time_s, reason=reason)

    def row(self, before: str, step: int) -> dict[str, object]:
        """Returns it for the metrics."""
        forecasts = {"before_s": self.now_s, "then_s": self.then_s}
        return {"switched": step, "before": before, "plan": self.plan.name, **forecasts, "reason": self.reason}


def check_replan(options: TrainOptions, plan: Plan) -> None:
    """Raises InputError where a run that may switch to another plan is asked for what it cannot do."""
    asked = "--replan" if options.replan else "--on-oom replan"
    if options.keeps_log:
        raise InputError(f"--audit replays one plan from its beginning, and {asked} may change it; leave one out")
    if options.replan and options.checkpoint_every == 0:
        raise InputError("--replan goes on from a checkpoint, and --checkpoint-every 0 takes none; use --no-replan")
    if plan.version.kind != "sync":
        remedy = "--no-replan" if options.replan else "--on-oom stop"
        raise InputError(f"plan '{plan.name}' has no common moment to switch to another plan; use {remedy}")


def with_measured(program: Program, slowdowns: Sequence[float]) -> tuple[Profile, Machine]:
    """Returns profile and machine with a kind for each worker's device, as many times slower as it was found."""
    profile, machine = program.profile, program.machine
    lag_of: dict[str, float] = {}
    for name, slowdown in zip(program.devices, slowdowns, strict=True):
        lag_of[name] = max(slowdown, lag_of.get(name, 0.0))
    devices, source = [], dict[str, tuple[str, float]]()
    for device in machine.devices:
        slowdown = lag_of.get(device.name, 1.0)
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


def question_of(program: Program, samples: int | None, num_workers: int | None = None) -> SearchOptions:
    """Returns what the planner is asked for a run that goes on: the same batch."""
    found = SearchOptions(batch=sum(program.sizes), samples=samples, is_runnable=True, time_budget_s=BUDGET_S)
    found = found if num_workers is None else found.replace(candidates=CANDIDATES)
    return found if program.plan.reduce.clip == "none" else found.replace(clip="global")


def first_runnable(candidates: Iterable[RankedPlan], num_workers: int | None = None) -> RankedPlan | None:
    """Returns the best plan that the engine runs, with so many workers where that is given."""
    return next(find_runnable(candidates, num_workers), None)


def find_runnable(candidates: Iterable[RankedPlan], num_workers: int | None = None) -> Iterator[RankedPlan]:
    """Yields the plans that the engine runs, with so many workers where that is given."""
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
    """Returns the plan that pays for the `steps` that are left, with costs as they were measured; None where none does.

    It must save more than `MARGIN` of a step, and more in all than the switch takes, of which workers that start take
    `start_s`, or what is assumed of them.
    """
    profile, machine = with_measured(program, slowdowns)
    now_s = simulate(replace(program, profile=profile, machine=machine)).makespan_s
    found = first_runnable(search(profile, machine, question_of(program, samples, num_workers)).candidates, num_workers)
    if (
        found is None
        or found.time_s > (1 - MARGIN) * now_s
        or (now_s - found.time_s) * steps < switch_s(profile, start_s)
    ):
        return None
    worst = max(range(len(slowdowns)), key=lambda worker: max(slowdowns[worker], 1 / slowdowns[worker]))
    times = f"worker {worst} on {program.devices[worst]} takes {slowdowns[worst]:.1f} times its forecast"
    gain = f"forecast {format_seconds(found.time_s)} a step instead of {format_seconds(now_s)}"
    return PlanSwitch.to(found, now_s, f"{times}: the run goes on under plan '{found.plan.name}', {gain}")


def relieve(
    program: Program, shortage: ShortageError, samples: int | None = None, num_workers: int | None = None
) -> PlanSwitch:
    """Returns a plan for the memory that was found; raises WorkerError where no plan fits that.

    It needs a tenth less than the plan that failed was forecast to, too. Where the worker had got what was forecast,
    forecasts are too low, on all devices of its kind; otherwise its own device has less than it says.
    """
    machine, own = program.machine, program.machine.device(program.devices[shortage.worker])
    prediction = simulate(program)
    worker = prediction.workers[shortage.worker]
    forecast = worker.reserved_bytes or worker.peak_bytes  # what a GPU's worker has got is what it reserved
    room = round(min(shortage.found_bytes, (1 - MARGIN) * forecast))
    is_too_low = shortage.found_bytes >= forecast
    devices = (
        d.replace(memory_bytes=min(d.memory_bytes, d.reserved_bytes + room))
        if d.name == own.name or (is_too_low and d.kind == own.kind)
        else d
        for d in machine.devices
    )
    smaller, question = machine.replace(devices=tuple(devices)), question_of(program, samples, num_workers)
    has, got = format_bytes(own.memory_bytes - own.reserved_bytes), format_bytes(shortage.found_bytes)
    figures = f"{format_bytes(forecast)} were forecast of {has}, and {got} were found"
    what = f"worker {shortage.worker} on {own.name} ran out of memory: {figures}"
    found = first_runnable(search(program.profile, smaller, question).candidates, num_workers)
    if found is None:
        raise WorkerError(f"{what}; {nothing_fits(program.profile, smaller, question)}")
    need = max(found.memory, key=lambda memory: memory.share)
    times = f"{format_seconds(found.time_s)} a step instead of {format_seconds(prediction.makespan_s)}"
    fits = f"{format_bytes(need.need_bytes)} on {need.device}, {times}"
    return PlanSwitch.to(found, prediction.makespan_s, f"{what}; plan '{found.plan.name}' would fit ({fits})")


def switch_s(profile: Profile, start_s: float | None = None) -> float:
    """Returns what a switch is taken to cost."""
    size = sum(unit.parameter_bytes + unit.optimizer_bytes for unit in profile.units)
    return (ASSUMED_START_S if start_s is None else start_s) + size / ASSUMED_STATE_BYTES_PER_S


class Replanner:
    """Looks at the pace of a run, and asks the planner again in a thread beside it.

    `ask` takes multiples of the forecast and returns a switch that pays; `turn` is called with it, once.
    """

    def __init__(
        self,
        pace: ThroughputMonitor,
        ask: Callable[[Sequence[float]], PlanSwitch | None],
        turn: Callable[[PlanSwitch], None],
    ):
        self.pace, self.ask, self.turn = pace, ask, turn
        self._next_s = 0.0
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Asks where the pace has left its band, unless that was asked a moment ago."""
        if (self._thread and self._thread.is_alive()) or time.monotonic() < self._next_s:
            return
        slowdowns = self.pace.departure()
        if slowdowns is not None:
            self._thread = threading.Thread(target=self._ask, args=(slowdowns,), name="pilot", daemon=True)
            self._thread.start()

    def _ask(self, slowdowns: Sequence[float]) -> None:
        begun_s = time.monotonic()
        with suppress(InputError):
            switch = self.ask(slowdowns)
            if switch is not None:
                self._next_s = float("inf")
                self.turn(switch)
                return
        self._next_s = time.monotonic() + (time.monotonic() - begun_s) / SEARCH_SHARE
