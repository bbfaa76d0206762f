"""Updates of a fast and a slow worker under synchronous and late shares, where the slow one's times vary: real runs.

    python bench/late_share.py [--updates 60] [--time-ms 40] [--spread 0.2] [--audit]

The workers are threads of this process that run an MLP, and stand in for devices: the first unit also sleeps. The fast
worker has five sixths of each update, the slow one a sixth, and each sleeps as long for its share: the slow one's times
are drawn anew for each share, with quartiles `--spread` from the median. Sleeping takes no core, so the load of this
machine hardly matters. Beside each mean time of an update is the one that the same draws give by arithmetic, without
any cost of updates, sums or threads.
"""

import argparse
import math
import random
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipedejavu.engine import Job, Sgd, audit
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import Version, preset
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan

FAST, SLOW, WIDTH = 10, 2, 32
"""Samples of an update per worker, and the width of the MLP."""
QUARTILE = 0.6745
"""Half of a normal distribution lies within this many standard deviations of its mean."""
VERSIONS = (Version(), Version(kind="late"), Version(kind="late", correction="weight-prediction"),
            Version(kind="late", correction="delay-compensation"), Version(kind="late", delay=4))  # fmt: skip


def factors(updates: int, spread: float) -> list[float]:
    """Returns the slow worker's times in times of their median, by update."""
    source, sigma = random.Random(0), math.log1p(spread) / QUARTILE
    return [math.exp(sigma * source.gauss()) for _ in range(updates)]


class Sleeping(nn.Module):
    """A linear layer that also takes the time of its worker's share, in its forward."""

    def __init__(self, time_s: float, slow: list[float]):
        super().__init__()
        self.linear, self.time_s, self.slow = nn.Linear(WIDTH, WIDTH), time_s, iter(slow)

    def forward(self, x: Tensor) -> Tensor:
        if self.time_s:
            time.sleep(self.time_s * (next(self.slow) if len(x) == SLOW else 1.0))
        return torch.tanh(self.linear(x))


class Samples:
    """Random samples; odd microbatches are the slow worker's."""

    def inputs(self, microbatch: int) -> Tensor:
        return torch.randn(self.length(microbatch), WIDTH, generator=torch.Generator().manual_seed(microbatch))

    def targets(self, microbatch: int) -> Tensor:
        return self.inputs(microbatch)[:, :4].argmax(-1)

    def length(self, microbatch: int) -> int:
        return SLOW if microbatch % 2 else FAST

    def count(self, microbatch: int) -> int:
        return self.length(microbatch)


def program_of(version: Version, updates: int) -> Program:
    devices = (
        Device(name="fast", kind="fast", type="gpu", host="here", memory_bytes=2**40),
        Device(name="slow", kind="slow", type="cpu", host="here", memory_bytes=2**40),
    )
    machine = Machine(name="here", hosts=(Host(name="here"),), devices=devices, links=(Link(bytes_per_s=1e9),))
    passes = {kind: UnitTime(forward=Cost(fixed_s=1.0), backward=Cost(fixed_s=1.0)) for kind in ("fast", "slow")}
    units = tuple(Unit(name=name, times=passes, parameter_bytes=8, gradient_bytes=8) for name in ("first", "last"))
    plan = preset("late-share").at(workers=1, microbatches=1, samples=FAST + SLOW, steps=updates)
    feed = plan.feed.replace(shares=(FAST / (FAST + SLOW), SLOW / (FAST + SLOW)))
    return compile_plan(plan.replace(version=version, feed=feed), Profile(name="mlp", units=units), machine, fold=False)


def ideal_s(delay: int, slow: list[float]) -> float:
    """Returns the mean time of an update, in times of a share, if only shares took time."""
    made, free = [0.0], 0.0  # when each version exists, and when the slow worker ends its share
    for t, factor in enumerate(slow):
        free = max(free, made[max(0, t - delay)]) + factor
        made.append(max(made[t] + 1.0, free))
    return made[-1] / len(slow)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--time-ms", type=float, default=40.0, help="each worker's time for its share")
    parser.add_argument(
        "--spread", type=float, default=0.2, help="quartiles of the slow worker's times, from the median"
    )
    parser.add_argument("--audit", action="store_true", help="replay each run, too")
    asked = parser.parse_args()
    time_s = asked.time_ms / 1000
    print(f"{asked.updates} updates, shares of {asked.time_ms:g} ms; times in shares: mean of an update, by arithmetic")
    for spread in (0.0, asked.spread):
        slow = factors(asked.updates, spread)
        print(f"\nquartiles of the slow worker {spread:.0%} from the median, mean {sum(slow) / len(slow):.3f}")
        first = 0.0
        for version in VERSIONS:
            torch.manual_seed(0)
            units = [("first", Sleeping(time_s, slow)), ("last", nn.Linear(WIDTH, 4))]
            job = Job(units=units, loss=lambda y, t: cross_entropy(y, t, reduction="sum"), optimizer=Sgd(lr=0.1))
            program = program_of(version, asked.updates)
            threads = Threads(program, job, Samples())
            begun = time.perf_counter()
            threads.run()
            update = (time.perf_counter() - begun) / asked.updates / time_s
            outcome = threads.outcome()
            threads.close()
            first, ideal = first or update, ideal_s(version.delay if version.kind == "late" else 0, slow)
            text = f"  {version!s:28}{update:8.3f}{ideal:8.3f}{update / first:8.3f} of synchronous"
            if asked.audit:
                units[0][1].time_s = 0.0
                text += f", audit {max(audit(program, job, Samples(), outcome).values()):.1g}"
            print(text, flush=True)


if __name__ == "__main__":
    main()
