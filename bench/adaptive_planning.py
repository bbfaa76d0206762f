"""Planning once, again, by trials and by gradient during a run whose machine changes: python bench/adaptive_planning.py

A run of a GPT on four GPUs is simulated update by update. Halfway its machine changes: a worker becomes slower, the
links do, samples become longer, or nothing does. Every policy sees the times of the workers' passes with noise, never
the machine itself, and pays for each switch of plans what a switch takes. The figure is the time of the whole run,
divided by that of a planner that knows each change at once.

    once        keeps the plan of the forecast
    replan      what `train --replan` does: a new search if a worker leaves its band
    trials      runs the best three plans for some updates, at the start and every 500 updates, and keeps the fastest
    gradient    follows the measured speeds with the differentiable search, every 50 updates
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

from pipedejavu.facts import Machine, Profile, read_machine
from pipedejavu.planner.replan import find_switch, search_options_for, switch_s, with_measured
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import RankedPlan, SearchOptions, search
from pipedejavu.simulate import simulate
from pipedejavu.zoo import estimate_profile

START_S = 15.0
"""Time of a switch without its state."""
WINDOW, BAND, NOISE = 20, 1.2, 0.05
TRIAL, TRY_EVERY, FOLLOW_EVERY = 10, 500, 50
MARGIN = 0.9
"""Another plan is taken if its forecast is below this share of the present one's."""


@dataclass
class World:
    """What the run meets: a profile and a machine per phase, which no policy sees."""

    phases: list[tuple[int, Profile, Machine]]
    """From which update on, and what then holds; speeds of devices are part of the profile."""
    noise: random.Random = field(default_factory=lambda: random.Random(1))
    known: dict[tuple[str, int], tuple[float, list[float]]] = field(default_factory=dict)

    def phase(self, update: int) -> int:
        return max(n for n, (start, _, _) in enumerate(self.phases) if start <= update)

    def step(self, program: Program, update: int) -> tuple[float, list[float]]:
        """Returns the time of an update of a plan, and that of each worker's passes, both with noise."""
        number = self.phase(update)
        key = program.plan.to_json(), number
        if key not in self.known:
            _, profile, machine = self.phases[number]
            real = simulate(compile_plan(program.plan, profile, machine, fold=False))
            self.known[key] = real.makespan_s, [*real.busy_s]
        time_s, busy_s = self.known[key]
        return time_s * self.noise.lognormvariate(0, NOISE), [b * self.noise.lognormvariate(0, NOISE) for b in busy_s]


class Run:
    """A run under one policy: its program, and the time that it has taken."""

    def __init__(self, world: World, batch: int, updates: int):
        self.world, self.updates = world, updates
        _, self.profile, self.machine = world.phases[0]
        options = search_options_for(compile_first(self.profile, self.machine, batch), None)
        self.ranked = search(self.profile, self.machine, options.replace(candidates=3)).candidates
        self.program = compile_plan(self.ranked[0].plan, self.ranked[0].profile, self.ranked[0].machine, fold=False)
        self.options, self.time_s, self.num_switches = options, 0.0, 0
        self.forecast = [*simulate(self.program).busy_s]
        self.recent: list[list[float]] = []
        self.known = [1.0] * len(self.forecast)
        """The slowdown of each worker that the policy has acted on."""

    def step(self, update: int) -> float:
        time_s, busy_s = self.world.step(self.program, update)
        self.time_s += time_s
        self.recent = [*self.recent[-WINDOW + 1 :], busy_s]
        return time_s

    def switch(self, program: Program) -> None:
        """Goes on with another program, after the time that a switch takes."""
        self.program, self.recent = program, []
        self.forecast = [*simulate(program).busy_s]
        self.known = [1.0] * len(self.forecast)
        self.time_s += switch_s(self.profile, START_S)
        self.num_switches += 1

    def slowdowns(self) -> list[float]:
        """Returns how many times its forecast each worker takes, over the window."""
        columns = zip(*self.recent, strict=True)
        return [median(times) / known if known else 1.0 for times, known in zip(columns, self.forecast, strict=True)]


def compile_first(profile: Profile, machine: Machine, batch: int) -> Program:
    """Returns any program of the batch, from which search options are read."""
    best = search(profile, machine, SearchOptions(batch=batch, is_runnable=True)).best
    assert best is not None
    return compile_plan(best.plan, best.profile, best.machine, fold=False)


def once(run: Run, update: int) -> int:
    run.step(update)
    return 1


def replan(run: Run, update: int) -> int:
    run.step(update)
    if len(run.recent) < WINDOW:
        return 1
    slowdowns = run.slowdowns()
    if all(1 / BAND <= slowdown / known <= BAND for slowdown, known in zip(slowdowns, run.known, strict=True)):
        return 1
    found, run.known = find_switch(run.program, slowdowns, run.updates - update, start_s=START_S), slowdowns
    if found is not None:
        run.switch(compile_plan(found.plan, found.profile, found.machine, fold=False))
    return 1


def trials(run: Run, update: int) -> int:
    if update % TRY_EVERY:
        run.step(update)
        return 1
    times = []
    for n, ranked in enumerate(run.ranked):  # the trials train, too
        go_to(run, ranked)
        times.append(median(run.step(update + n * TRIAL + k) for k in range(TRIAL)))
    go_to(run, run.ranked[times.index(min(times))])
    return TRIAL * len(times)


def go_to(run: Run, ranked: RankedPlan) -> None:
    if ranked.plan != run.program.plan:
        run.switch(compile_plan(ranked.plan, ranked.profile, ranked.machine, fold=False))


def gradient(run: Run, update: int) -> int:
    run.step(update)
    if len(run.recent) < WINDOW or update % FOLLOW_EVERY:
        return 1
    profile, machine = with_measured(run.program, run.slowdowns())
    now_s = simulate(replace(run.program, profile=profile, machine=machine)).makespan_s
    best = search(profile, machine, run.options.replace(searcher="gradient", candidates=1)).best
    left = run.updates - update
    if best and best.time_s < MARGIN * now_s and (now_s - best.time_s) * left > switch_s(run.profile, START_S):
        run.switch(compile_plan(best.plan, best.profile, best.machine, fold=False))
    return 1


def oracle(run: Run, update: int) -> int:
    """Knows the machine of each phase at once, and pays for a switch only if that pays."""
    starts = {start for start, _, _ in run.world.phases[1:]}
    if update in starts:
        _, profile, machine = run.world.phases[run.world.phase(update)]
        now_s = simulate(compile_plan(run.program.plan, profile, machine, fold=False)).makespan_s
        best = search(profile, machine, run.options).best
        if best and (now_s - best.time_s) * (run.updates - update) > switch_s(run.profile, START_S):
            run.switch(compile_plan(best.plan, best.profile, best.machine, fold=False))
    run.step(update)
    return 1


POLICIES: dict[str, Callable[[Run, int], int]] = {
    "knows the change": oracle, "once": once, "replan": replan, "trials": trials, "gradient": gradient
}  # fmt: skip


def worlds(shape: str, machine: Machine, updates: int) -> dict[str, World]:
    """Returns each change, halfway through the run."""
    profile, half = estimate_profile(shape, machine), updates // 2
    kinds = [device.kind for device in machine.devices]
    own = tuple(
        device.replace(kind=f"{kind}@{n}") for n, (device, kind) in enumerate(zip(machine.devices, kinds, strict=True))
    )
    machine = machine.replace(devices=own)

    def with_speeds(*slowdowns: float) -> Profile:
        units = []
        for unit in profile.units:
            times = {d.kind: unit.times[k].times(s) for d, k, s in zip(own, kinds, slowdowns, strict=True)}
            units.append(unit.replace(times=times))
        return profile.replace(units=tuple(units), error={})

    plain = with_speeds(*[1.0] * len(own))
    slow_links = tuple(link.replace(bytes_per_s=link.bytes_per_s / 20, sum_bytes_per_s=None) for link in machine.links)
    return {
        "nothing changes": World([(0, plain, machine)]),
        "a worker becomes half as fast": World([(0, plain, machine), (half, with_speeds(1, 2, 1, 1), machine)]),
        "a worker becomes a fifth as fast": World([(0, plain, machine), (half, with_speeds(1, 5, 1, 1), machine)]),
        "links become 20 times slower": World([(0, plain, machine), (half, plain, machine.replace(links=slow_links))]),
        "samples take twice as long": World([(0, plain, machine), (half, with_speeds(2, 2, 2, 2), machine)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="gpt-medium")
    parser.add_argument("--machine", default="4xa100-40gb")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--updates", type=int, default=4000)
    asked = parser.parse_args()
    print(
        f"{asked.shape} on {asked.machine}, {asked.updates} updates of {asked.batch} samples; time ÷ that of a planner"
        " that knows each change, and switches"
    )
    for name, world in worlds(asked.shape, read_machine(asked.machine), asked.updates).items():
        least, cells = 0.0, []
        for policy, act in POLICIES.items():
            world.noise = random.Random(1)
            run = Run(world, asked.batch, asked.updates)
            update = 0
            while update < asked.updates:
                update += act(run, update)
            least = least or run.time_s
            cells.append(f"{policy} {run.time_s / least:.3f} ({run.num_switches})")
        print(f"  {name:34} {least:8.0f} s: {', '.join(cells[1:])}", flush=True)


if __name__ == "__main__":
    main()
