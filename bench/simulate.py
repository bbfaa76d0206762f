"""Speed of the simulator: actions a second, growth with the program, memory, and what symmetry saves.

Prints ratios measured side by side in one run: python bench/simulate.py [--quick]
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from pipedejavu.analysis import build_graph, verify
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import Plan, preset
from pipedejavu.program import compile
from pipedejavu.simulate import simulate

T = TypeVar("T")


class Row(NamedTuple):
    """Seconds of each phase of one program."""

    actions: int
    compile_s: float
    graph_s: float
    clock_s: float
    summary_s: float
    verify_s: float


def main() -> None:
    quick = "--quick" in sys.argv
    print("1F1B with transfers, 64 workers; microseconds for each action")
    print(
        f"{'microbatches':>12} {'actions':>10} {'compile':>8} {'graph':>8} {'clock':>8} {'memory':>8} {'verify':>8}",
        end="",
    )
    print(f" {'graph+clock':>14} {'clock alone':>14} {'RSS so far':>11}")
    for microbatches in (64, 128, 256) if quick else (128, 512, 2048, 4096):
        row = measure(pipeline(64, microbatches), machine(64))
        times = [f"{1e6 * t / row.actions:8.2f}" for t in row[1:]]
        both = row.actions / (row.graph_s + row.clock_s)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{microbatches:12} {row.actions:10} {' '.join(times)}", end="")
        print(f" {both:10.0f}/s {row.actions / row.clock_s:12.0f}/s {rss:7.2f} GiB")

    print("\nShared wires (every transfer of a host over one interface), 16 workers × 128 microbatches")
    alone = measure(pipeline(16, 128), machine(16))
    shared = measure(pipeline(16, 128), machine(16, wires=("nic:{source_host}",)))
    print(f"clock: {alone.actions / alone.clock_s:.0f}/s alone, {shared.actions / shared.clock_s:.0f}/s shared")

    print("\nSymmetric replicas: 16 workers × 256 microbatches, one pipeline against 64 (1,024 workers)")
    one = measure(pipeline(16, 256), machine(16))
    many = measure(pipeline(16, 256, replicas=64), machine(1024))
    total = [sum(r[1:4]) for r in (one, many)]
    print(f"compile + graph + clock: {total[0]:.3f} s against {total[1]:.3f} s, ratio {total[1] / total[0]:.2f}")


def pipeline(workers: int, microbatches: int, replicas: int = 1) -> Plan:
    return preset("1f1b").at(workers=workers, microbatches=microbatches, replicas=replicas)


def machine(count: int, wires: tuple[str, ...] = ("{source}>{target}",)) -> Machine:
    devices = tuple(
        Device(name=f"gpu{n}", kind="gpu", type="gpu", host=f"host{n // 8}", memory_bytes=2**50) for n in range(count)
    )
    hosts = tuple(Host(name=f"host{n}") for n in range((count + 7) // 8))
    link = Link(latency_s=1e-5, bytes_per_s=1e10, wires=wires)
    return Machine(name="bench", hosts=hosts, devices=devices, links=(link,))


def profile(units: int) -> Profile:
    time_ = UnitTime(forward=Cost(fixed_s=1e-3), backward=Cost(fixed_s=2e-3), update_s=1e-4)
    sizes = {"parameter_bytes": 10**7, "gradient_bytes": 10**7, "optimizer_bytes": 6 * 10**7}
    return Profile(
        name="bench",
        units=tuple(
            Unit(name=f"u{n}", times={"gpu": time_}, activation_bytes=1e7, boundary_bytes=1e6, **sizes)
            for n in range(units)
        ),
    )


def measure(plan: Plan, on: Machine) -> Row:
    program, compile_s = timed(lambda: compile(plan, profile(plan.place.workers), on))
    graph, graph_s = timed(lambda: build_graph(program))
    prediction, clock_s = timed(lambda: simulate(program, graph))
    _, summary_s = timed(lambda: prediction.workers)
    _, verify_s = timed(lambda: verify(program))
    return Row(program.num_actions, compile_s, graph_s, clock_s, summary_s, verify_s)


def timed(call: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


if __name__ == "__main__":
    main()
