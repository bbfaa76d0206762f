"""Searchers against each other: gap to the best known estimate, time and feasibility, over models, machines and memory.

Run with `python bench/search.py`; `--quick` leaves the clusters out, `--only TEXT` takes the rows that hold it,
`--chains` compares cuts by gradients with the best of the same chain of devices. `--brute-force FOLDER` holds `auto`
against an independent brute force on the `*graph.txt` profiles of PipeDream in a folder, from memory that just fits to
plenty; seconds are of the CPU.
`auto` is the whole search, plans simulated; all others fill a pool with estimates, which is what gaps compare.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
from brute_force import BruteForce, blocks_of, describe

from pipedejavu.facts import Cost, Device, Edge, Host, Link, Machine, Profile, Unit, UnitTime, read_profile
from pipedejavu.search import SearchOptions, dp, exhaustive, gradient_descent, mcmc, search
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.search.subspace import subspaces

GIB = 2**30
FLOP_PER_S = 1e14
"""Of a GPU of speed 1, reached."""
BUDGET_S = 3.0
"""Of each searcher but `dp`, which ends by itself."""
FEW = 20_000
"""Candidates up to which the optimum is known by looking at each."""


def gpu(name: str, speed: float, host: str = "host") -> Device:
    kind = f"x{speed:g}"
    return Device(name=name, kind=kind, type="gpu", host=host, memory_bytes=80 * GIB)


def cpu(host: str = "host") -> Device:
    return Device(name=f"{host}-cpu", kind="cpu", type="cpu", host=host, memory_bytes=512 * GIB)


def computer(speeds: list[float], hosts: int = 1, between: float = 0.0) -> Machine:
    per_host = len(speeds) // hosts
    devices = [gpu(f"g{n}", speed, f"h{n // per_host}") for n, speed in enumerate(speeds)]
    devices += [cpu(f"h{n}") for n in range(hosts)]
    links = [Link(source="g*", target="g*", scope="same-host", bytes_per_s=100e9, latency_s=5e-6)]
    links += [Link(scope="same-host", bytes_per_s=20e9, latency_s=1e-5)]
    if hosts > 1:
        wires = ("out:{source_host}", "in:{target_host}")
        links += [Link(scope="other-host", bytes_per_s=between, latency_s=2e-5, wires=wires)]
    names = tuple(Host(name=f"h{n}") for n in range(hosts))
    return Machine(name="bench", hosts=names, devices=tuple(devices), links=tuple(links))


SPEEDS = {"cpu": 0.01, "x1": 1.0, "x0.5": 0.5, "x0.1": 0.1}


def unit(name: str, flop: float, parameters: float, saved: float, sent: float, speeds: dict[str, float]) -> Unit:
    times = {}
    for kind, speed in speeds.items():
        forward = Cost(fixed_s=20e-6 / min(speed, 1.0), per_sample_s=flop / (FLOP_PER_S * speed))
        backward = Cost(fixed_s=40e-6 / min(speed, 1.0), per_sample_s=2 * flop / (FLOP_PER_S * speed))
        update = parameters / (2e9 if kind == "cpu" else 5e10 * speed)
        times[kind] = UnitTime(forward=forward, backward=backward, recompute=forward, update_s=update)
    size = round(parameters)
    return Unit(
        name=name,
        times=times,
        num_parameters=size,
        parameter_bytes=2 * size,
        gradient_bytes=2 * size,
        optimizer_bytes=12 * size,
        activation_bytes=saved,
        boundary_bytes=sent,
    )


def vgg16(speeds: dict[str, float]) -> Profile:
    """Convolutions with much work and few weights, then linear layers with little and many."""
    units, side, inputs = [], 224, 3
    for block, (width, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]):
        for n in range(count):
            weights, pixels = 9 * inputs * width, side * side
            sent = 2.0 * width * pixels / (4 if n == count - 1 else 1)
            units.append(unit(f"conv{block}.{n}", 2 * weights * pixels, weights, 4.0 * width * pixels, sent, speeds))
            inputs = width
        side //= 2
    for n, (a, b) in enumerate([(25088, 4096), (4096, 4096), (4096, 1000)]):
        units.append(unit(f"linear{n}", 2 * a * b, a * b, 4.0 * b, 2.0 * b, speeds))
    return Profile(name="vgg16", units=tuple(units))


def resnet50(speeds: dict[str, float]) -> Profile:
    units = [unit("stem", 2.4e8, 9408, 6e6, 1.6e6, speeds)]
    for stage, (width, count) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        pixels = (56 >> stage) ** 2
        for n in range(count):
            weights = 17 * width * width
            units.append(
                unit(
                    f"block{stage}.{n}",
                    2 * weights * pixels,
                    weights,
                    24.0 * width * pixels,
                    8.0 * width * pixels,
                    speeds,
                )
            )
    units.append(unit("head", 4e6, 2048 * 1000, 1e4, 2e3, speeds))
    return Profile(name="resnet50", units=tuple(units))


def gnmt(speeds: dict[str, float]) -> Profile:
    """Sixteen recurrent layers; every decoder layer reads the encoder's output too."""
    width, length = 1024, 50
    sent = 2.0 * width * length
    units = [unit("embedding", 1e6, 32000 * width, sent, sent, speeds)]
    units += [
        unit(f"lstm{n}", 16.0 * width * width * length, 8 * width * width, 8 * sent, sent, speeds) for n in range(16)
    ]
    units.append(unit("softmax", 2.0 * width * 32000 * length, width * 32000, 4.0 * 32000 * length, sent, speeds))
    names = [u.name for u in units]
    edges = [Edge(source=a, target=b) for a, b in pairwise(names)]
    edges += [Edge(source="lstm7", target=f"lstm{n}") for n in range(9, 16)]
    return Profile(name="gnmt", units=tuple(units), edges=tuple(edges))


def blocks(name: str, layers: int, width: int, context: int, speeds: dict[str, float], experts: int = 1) -> Profile:
    """A transformer; with experts, every second block has that many sets of weights and computes one of them."""
    values = context * width
    units = [unit("embedding", 1e6, 50000 * width, 2.0 * values, 2.0 * values, speeds)]
    for n in range(layers):
        flop = 2.0 * context * (12 * width * width + 2 * context * width)
        more = 1 + (experts - 1) * 2 / 3 if n % 2 else 1.0
        units.append(unit(f"block{n}", flop, 12 * width * width * more, 34.0 * values, 2.0 * values, speeds))
    units.append(unit("head", 2.0 * values * 50000, 50000 * width, 4.0 * values, 2.0 * values, speeds))
    return Profile(name=name, units=tuple(units))


def t5(speeds: dict[str, float]) -> Profile:
    """An encoder and a decoder, whose layers read the encoder's output too."""
    plain = blocks("t5", 24, 1024, 512, speeds)
    names = [u.name for u in plain.units]
    edges = [Edge(source=a, target=b) for a, b in pairwise(names)]
    edges += [Edge(source="block11", target=f"block{n}") for n in range(13, 24)]
    return plain.replace(edges=tuple(edges))


MODELS: dict[str, Callable[[dict[str, float]], Profile]] = {
    "vgg16": vgg16,
    "resnet50": resnet50,
    "gnmt": gnmt,
    "gpt": lambda speeds: blocks("gpt", 24, 2048, 1024, speeds),
    "gpt-96": lambda speeds: blocks("gpt-96", 96, 12288, 2048, speeds),
    "t5": t5,
    "moe": lambda speeds: blocks("moe", 12, 1024, 512, speeds, experts=8),
}
MACHINES = {
    "4 equal": lambda: computer([1.0] * 4),
    "1,1,.5,.1": lambda: computer([1.0, 1.0, 0.5, 0.1]),
    "gpu+cpu": lambda: computer([1.0]),
    "2 hosts, slow": lambda: computer([1.0] * 4, hosts=2, between=1e9),
    "8x8": lambda: computer([1.0] * 64, hosts=8, between=12.5e9),
    "128x8": lambda: computer([1.0] * 1024, hosts=128, between=50e9),
}
LARGE = ("8x8", "128x8")
"""Where the GPT of 96 layers is planned for, too."""


def tightened(model: Profile, place: Machine) -> Machine:
    """Returns the machine with a bit more memory than the state alone needs when it is spread over its GPUs."""
    gpus = [d for d in place.devices if d.type == "gpu"]
    state = sum(u.parameter_bytes + u.gradient_bytes + u.optimizer_bytes for u in model.units)
    largest = max(u.parameter_bytes + u.gradient_bytes + u.optimizer_bytes for u in model.units)
    saved = sum(u.activation_bytes for u in model.units)
    room = round(1.3 * max(state / len(gpus), largest) + 3 * saved / len(gpus) + 2 * saved / len(model.units))
    devices = tuple(d.replace(memory_bytes=min(room, d.memory_bytes)) if d.type == "gpu" else d for d in place.devices)
    return place.replace(devices=devices)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Profile, Machine, SearchOptions]]:
    for where, make in MACHINES.items():
        if args.quick and where in LARGE:
            continue
        for what, build in MODELS.items():
            if what == "gpt-96" and where not in LARGE:
                continue
            batch = {"8x8": 256, "128x8": 2048}.get(where, 32)
            place = make()
            kinds = {d.kind for d in place.devices}
            speeds = {kind: SPEEDS[kind] for kind in kinds}
            model = build(speeds)
            for memory in ("loose", "tight"):
                name = f"{what} | {where} | {memory}"
                if args.only in name:
                    fitted = tightened(model, place) if memory == "tight" else place
                    options = SearchOptions(batch=batch, is_runnable=where not in LARGE, time_budget_s=60.0)
                    yield name, model, fitted, options


def measure(
    run: Callable[[Pool, list, SearchOptions], bool], problems: list, options: SearchOptions
) -> tuple[float, float]:
    pool = Pool(options)
    run(pool, problems, options)
    return pool.best, pool.elapsed_s


MOST_SUBSPACES = 4


def chains(args: argparse.Namespace) -> None:
    """Prints how far cuts found by gradients are from the best of the same chain of devices, ordinal and plain."""
    gaps: dict[str, list[float]] = {"ordinal cuts": [], "plain softmax": []}
    for name, model, place, options in cases(args):
        (problem,) = problems_of(model, place, options)
        before = len(gaps["ordinal cuts"])
        alike = [f for f in subspaces(problem, options) if f.sizes == (1,) and len(f.order) == len(problem.devices)]
        for subspace in alike[:: 1 + len(alike) // MOST_SUBSPACES]:
            pool = Pool(options)
            costs = pool.costs(problem, subspace.samples)
            exact = dp.solve(subspace, costs)
            if exact is None or len(exact.stages) == 1:
                continue
            for key, is_plain in (("ordinal cuts", False), ("plain softmax", True)):
                candidate = gradient_descent.descend(subspace, costs, np.random.default_rng(0), is_plain=is_plain)
                score = pool.offer(candidate) if candidate else inf
                gaps[key].append(score / pool.estimate(exact).time_s - 1)
        print(name, {key: f"{max(values[before:]):.2%}" for key, values in gaps.items() if values[before:]}, flush=True)
    for key, values in gaps.items():
        finite = sorted(v for v in values if v < inf)
        middle, most = finite[len(finite) // 2], finite[-1]
        print(
            f"{key}: {len(values)} chains, {len(finite)} feasible; gap in the middle {middle:.2%}, at most {most:.1%};"
            f" within 2 %: {sum(v <= 0.02 for v in values)}"
        )


PLACES = ("equal", "hosts, 10 Gb/s", "hosts, 1 Gb/s", "three kinds")
KIND_SPEEDS = {"a": 1.0, "b": 0.5, "c": 0.25}
MEMORIES = {"just fits": 1.0, "× 1.2": 1.2, "× 1.6": 1.6, "× 2.5": 2.5, "loose": 100.0}
"""Memory of each device, as a multiple of the least in which the brute force has a plan."""


def published(folder: str) -> Iterator[Profile]:
    """Yields PipeDream's profiles by operator and in 16 blocks, with times for all kinds of devices."""
    for path in sorted(Path(folder).glob("*graph.txt")):
        profile = read_profile(str(path), KIND_SPEEDS)
        units = []
        for one in profile.units:
            times = {
                kind: time.replace(forward=time.forward.times(1 / speed), backward=time.backward.times(1 / speed))
                for (kind, time), speed in zip(one.times.items(), KIND_SPEEDS.values(), strict=True)
            }
            times = {kind: time.replace(recompute=time.forward) for kind, time in times.items()}
            units.append(one.replace(times=times))
        profile = profile.replace(name=path.stem.removesuffix("-graph"), units=tuple(units))
        yield profile
        yield blocks_of(profile, 16)


def place_of(name: str, count: int) -> Machine:
    """Returns a machine of GPUs without CPUs: on one host, or on four with one network interface each."""
    kinds = ["a"] * count
    if name == "three kinds":
        kinds = ["a"] * (count // 2) + ["b"] * (count // 4) + ["c"] * (count // 4)
    hosts = 4 if name.startswith("hosts") else 1
    devices = tuple(
        Device(name=f"g{n}", kind=kind, type="gpu", host=f"h{n * hosts // count}", memory_bytes=2**50)
        for n, kind in enumerate(kinds)
    )
    links = [Link(scope="same-host", bytes_per_s=10e9, latency_s=1e-5)]
    if hosts > 1:
        rate = 125e6 if "1 Gb" in name else 1.25e9
        wires = ("out:{source_host}", "in:{target_host}")
        links.append(Link(scope="other-host", bytes_per_s=rate, latency_s=2e-5, wires=wires))
    names = tuple(Host(name=f"h{n}") for n in range(hosts))
    return Machine(name=name, hosts=names, devices=devices, links=tuple(links))


def against_brute_force(args: argparse.Namespace) -> None:
    """Prints `auto` beside the brute force for each profile, machine and memory."""
    print("| profile, units | devices | memory | brute force | auto | ratio | auto's s |\n|" + "---|" * 7)
    ratios, missed, seconds = list[float](), 0, list[float]()
    for profile in published(args.brute_force):
        for place, count in ((place, count) for place in PLACES for count in args.devices):
            if args.only not in f"{profile.name} | {count}, {place}":
                continue
            machine = place_of(place, count)
            brute = BruteForce(profile, machine, 48 if count > 8 else 24)
            least = brute.least_bytes()
            for memory, times in MEMORIES.items():
                limit = round(least * times)
                devices = tuple(device.replace(memory_bytes=limit) for device in machine.devices)
                known = brute.best(limit)
                began = time.process_time()
                answer = search(
                    profile, machine.replace(devices=devices), SearchOptions(batch=brute.batch, is_runnable=True)
                ).best
                used = time.process_time() - began
                if known is None:
                    continue
                ratio = answer.time_s / known.time_s if answer else inf
                ratios, missed = [*ratios, ratio] if answer else ratios, missed + (answer is None)
                seconds.append(used)
                ours = f"{answer.time_s:.4g} s: {describe(answer.plan)}" if answer else "none"
                head = f"| {profile.name}, {len(profile.units)} | {count}, {place} | {memory} ({limit / GIB:.3g} GiB)"
                print(
                    f"{head} | {known.time_s:.4g} s: {describe(known.plan)} | {ours} | {ratio:.3f} | {used:.1f} |",
                    flush=True,
                )
    print(
        f"{len(ratios)} cases: at most {max(ratios):.3f}, above 1.01: {sum(r > 1.01 for r in ratios)}, middle"
        f" {np.median(ratios):.3f}, least {min(ratios):.3f}; not found: {missed}; seconds of the CPU at most"
        f" {max(seconds):.1f}, middle {np.median(seconds):.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--brute-force", metavar="FOLDER")
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--chains", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.brute_force:
        against_brute_force(args)
        return
    if args.chains:
        chains(argparse.Namespace(quick=True, only=args.only))
        return
    searchers = {
        "dp": dp.run,
        "gradient": gradient_descent.run,
        "darts": partial(gradient_descent.run, is_plain=True),
        "mcmc": mcmc.run,
        "flexflow": partial(mcmc.run, is_flexflow=True),
    }
    heads = ["known by", *searchers, "auto: time, of the CPU, simulated / estimated"]
    print("| case | " + " | ".join(heads) + " |\n|" + "---|" * (len(heads) + 1))
    gaps: dict[str, list[float]] = {name: [] for name in searchers}
    for name, model, place, options in cases(args):
        problems = [*problems_of(model, place, options)]
        small = Pool(options)
        is_known = exhaustive.count(small, problems, options, FEW) <= FEW
        found = {}
        if len(place.devices) <= 16:  # a cluster has thousands of subspaces, which only `auto` is meant for
            found = {"dp": measure(dp.run, problems, options)}
            short = options.replace(time_budget_s=BUDGET_S)
            found |= {key: measure(run, problems, short) for key, run in searchers.items() if key != "dp"}
        known = measure(exhaustive.run, problems, options)[0] if is_known else inf
        best = min([known, *(time_s for time_s, _ in found.values())])
        began = time.process_time()
        answer = search(model, place, options)
        used = time.process_time() - began
        row = ["all" if is_known else "best of these"]
        for searcher in searchers:
            if searcher not in found:
                row.append("")
                continue
            score, seconds = found[searcher]
            gap = score / best - 1 if best < inf else 0.0 if score == inf else inf
            gaps[searcher].append(gap)
            row.append(f"none, {seconds:.1f} s" if score == inf else f"{gap:.1%}, {seconds:.1f} s")
        first = answer.best
        text = (
            f"{answer.time_s:.1f} s, {used:.1f} s, {first.time_s / first.estimated_s:.3f}, {first.plan.name}"
            if first
            else "nothing fits"
        )
        print(f"| {name} | " + " | ".join([*row, text]) + " |", flush=True)
    for searcher, values in gaps.items():
        if values:
            finite = [v for v in values if v < inf]
            print(
                f"{searcher}: {len(finite)} of {len(values)} feasible;"
                f" gap at most {max(finite):.1%}, mean {np.mean(finite):.2%};"
                f" within 1 %: {sum(v <= 0.01 for v in values)}, within 2 %: {sum(v <= 0.02 for v in values)}"
            )


if __name__ == "__main__":
    main()
