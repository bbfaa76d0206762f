"""A described GPU and CPU, and large models whose updates are simulated on them.

The CPU's passes take as many times the GPU's as a CPU of 16 cores takes beside a GTX 1650. A small model's time is that
of launches, so studies that train small models take the times of large ones of their kind.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from pipedejavu.analysis import build_graph
from pipedejavu.facts import Cluster, Profile, Unit, compose
from pipedejavu.facts.cluster import HostGroup
from pipedejavu.plan import Cut, Plan, Version, preset
from pipedejavu.planner.profiling import estimate_task
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.action import COMPUTE_KINDS
from pipedejavu.simulate import simulate
from pipedejavu.simulate.action_cost import ActionCosts
from pipedejavu.simulate.chance import QUARTILE
from pipedejavu.simulate.clock import run_clock
from pipedejavu.zoo import build

GPU, CPU, RATIO = "gtx-1650", "core-i7-9700k", 5.0
"""The described devices, and the CPU's time for a sample in times of the GPU."""
SHARES = (RATIO / (1 + RATIO), 1 / (1 + RATIO))
SPREAD, DRAWS = 0.2, 40
"""How far quartiles of the CPU's time for its share are from their median, as a share, where it varies; and draws."""
MACHINE = compose(Cluster(name="pair", hosts=(HostGroup(gpus=(f"1 x {GPU}",), cpu=CPU),)))


@dataclass(frozen=True)
class Large:
    """A large model and its batch, whose times on the described machine are simulated."""

    name: str
    batch: int
    widths: tuple[int, ...] = ()

    @cached_property
    def profile(self) -> Profile:
        """Estimated times; the CPU's passes take RATIO times the GPU's."""
        options: dict[str, Any] = {"widths": self.widths} if self.widths else {}
        task = build(self.name, device="meta", **options)
        profile = estimate_task(self.name, task, self.batch, MACHINE, lambda _: None).profile
        return profile.replace(units=tuple(map(_slowed, profile.units)), error={})

    def chosen_s(self, version: Version, speed: float) -> tuple[str, float]:
        """Returns the shares that a plan chooses and its update's time; both devices compute `speed` times as fast."""

        def faster(unit: Unit) -> Unit:
            times = {
                kind: t.replace(forward=t.forward.times(1 / speed), backward=t.backward.times(1 / speed))
                for kind, t in unit.times.items()
            }
            return unit.replace(times=times)

        profile = self.profile.replace(units=tuple(map(faster, self.profile.units)))
        programs = [
            compile_plan(self.plan(version, steps, shares=None), profile, MACHINE, fold=False) for steps in (16, 8)
        ]
        parts = " + ".join(str(sum(part)) for part in programs[0].parts)
        first_s, second_s = (simulate(program).makespan_s for program in programs)
        return parts, (first_s - second_s) / 8

    def alone_s(self, speed: float) -> float:
        """Returns the time of an update of the GPU alone, if it computes so many times as fast."""
        times = [unit.times[GPU] for unit in self.profile.units]
        return sum((t.forward.at(self.batch) + t.backward.at(self.batch)) / speed + t.update_s for t in times)

    def plan(self, version: Version, steps: int, shares: tuple[float, ...] | None = SHARES) -> Plan:
        """Returns the plan of a synchronisation; all reduce eagerly, so that they differ in nothing else."""
        plan = preset("late-share").at(workers=1, microbatches=1, samples=self.batch, steps=steps)
        return plan.replace(version=version, feed=plan.feed.replace(shares=shares), cut=Cut())

    def update_s(self, version: Version, steps: int) -> float:
        """Returns the simulated time of an update, drains at the ends of rounds included."""
        return simulate(compile_plan(self.plan(version, steps), self.profile, MACHINE, fold=False)).makespan_s / steps

    def varying_s(self, version: Version, steps: int) -> float:
        """Returns the mean time of an update where the CPU's times vary from update to update."""
        program = compile_plan(self.plan(version, steps), self.profile, MACHINE, fold=False)
        graph, source, times = build_graph(program), random.Random(0), []
        works, last = ActionCosts(program).of(graph), len(program.workers) - 1
        for _ in range(DRAWS):
            factors = [math.exp(math.log1p(SPREAD) / QUARTILE * source.gauss()) for _ in range(steps)]
            drawn = [
                work._replace(time_s=work.time_s * factors[a.microbatch // program.update_size])
                if worker == last and (a := program.workers[worker].actions[position]).kind in COMPUTE_KINDS
                else work
                for work, (worker, position) in zip(works, graph.members, strict=True)
            ]
            times.append(max(run_clock(graph, drawn)[1]) / steps)
        return fmean(times)

    def choice(self) -> str:
        """Returns the shares that the plan would choose, and why."""
        plan = self.plan(Version(kind="late"), 2, shares=None)
        program = compile_plan(plan, self.profile, MACHINE, fold=False)
        decision = next(d for d in program.plan.decisions if d.axis == "feed")
        return f"{decision.choice}: {decision.reason}"

    def arrivals(self) -> tuple[float, float]:
        """Returns the time between two gradients of the GPU, which holds the weights, and of the CPU."""
        units, size = self.profile.units, sum(unit.gradient_bytes for unit in self.profile.units)
        route = MACHINE.route(*(device.name for device in MACHINE.devices))
        periods = []
        for kind in (GPU, CPU):
            times = [unit.times[kind] for unit in units]
            periods.append(sum(t.forward.at(self.batch) + t.backward.at(self.batch) for t in times))
        update_s = sum(unit.times[GPU].update_s for unit in units)
        return periods[0] + update_s, periods[1] + 2 * (route.latency_s + size / route.bytes_per_s)


def _slowed(unit: Unit) -> Unit:
    fast = unit.times[GPU]
    slow = unit.times[CPU].replace(forward=fast.forward.times(RATIO), backward=fast.backward.times(RATIO))
    return unit.replace(times=unit.times | {CPU: slow})


LARGE = (Large("mlp", 4096, (784, 4096, 4096, 4096, 10)), Large("vgg19", 128), Large("gpt-10-layers", 24))
"""By model of the accuracy study, the large model of its kind."""
