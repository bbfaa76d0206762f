"""Speed of the engine, side by side in one run: a hand-written loop, torch's own pipelining, and torch's DDP.

    python bench/engine.py [--width 512] [--samples 32] [--steps 30] [--workers 2 4]

Every contender trains the same blocks on the same batches with plain SGD, a process for each worker and one thread in
each. Contenders take turns step by step in the same processes, from a barrier, so that they see the same machine; a
step takes as long as its slowest rank. Medians of all steps after a warm-up, and the fastest step. Also what the wire
carried in a step, against the least that the program needs.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from pipedejavu.engine import Job, Sgd, Threads
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import Plan, preset
from pipedejavu.program import ActionKind, Program, ValueKind, compile
from pipedejavu.program.action import value_of

BLOCKS, MICROBATCHES, LR, WARM_UP = 8, 8, 0.01, 3

Size = tuple[int, int]
"""The width of a block and the samples of a microbatch."""


def blocks(width: int) -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    return [(f"{n}", nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))) for n in range(BLOCKS)]


def block_bytes(width: int) -> int:
    return 4 * 2 * width * (width + 1)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


class Noise:
    """The same microbatch again and again."""

    def __init__(self, size: Size) -> None:
        generator = torch.Generator().manual_seed(1)
        width, self.samples = size
        self.x = torch.randn(self.samples, width, generator=generator)
        self.y = torch.randn(self.samples, width, generator=generator)

    def inputs(self, microbatch: int) -> Tensor:  # noqa: ARG002
        return self.x

    def targets(self, microbatch: int) -> Tensor:  # noqa: ARG002
        return self.y

    def length(self, microbatch: int) -> int:  # noqa: ARG002
        return self.samples

    count = length


def program(plan: Plan, width: int) -> Program:
    time_, size = UnitTime(forward=Cost(fixed_s=1e-3), backward=Cost(fixed_s=2e-3)), block_bytes(width)
    units = [Unit(name=n, times={"cpu": time_}, parameter_bytes=size, gradient_bytes=size) for n, _ in blocks(width)]
    devices = [
        Device(name=f"cpu{n}", kind="cpu", type="cpu", host="here", memory_bytes=2**40) for n in range(plan.num_workers)
    ]
    machine = Machine(name="here", hosts=(Host(name="here"),), devices=tuple(devices), links=(Link(bytes_per_s=1e9),))
    return compile(plan, Profile(name="blocks", units=tuple(units)), machine, fold=False)


def job(width: int) -> Job:
    return Job(units=blocks(width), loss=squares, optimizer=Sgd(lr=LR))


def descend(parameters: list[nn.Parameter], samples: int) -> None:
    """A step of SGD in one pass over the memory."""
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=-LR / samples)
            parameter.grad = None


def loop_by_hand(size: Size) -> Callable[[], None]:
    """One worker: forward, backward, a step of SGD, written out."""
    noise, model = Noise(size), nn.Sequential(*(m for _, m in blocks(size[0])))
    parameters = list(model.parameters())

    def step() -> None:
        for _ in range(MICROBATCHES):
            squares(model(noise.x), noise.y).backward()
        descend(parameters, MICROBATCHES * noise.samples)

    return step


def one_worker(size: Size) -> Threads:
    """One worker of the engine, all blocks in one piece."""
    plan = preset("ddp").at(workers=1, microbatches=MICROBATCHES)
    return Threads(program(plan.replace(order=plan.order.replace(is_eager=False)), size[0]), job(size[0]), Noise(size))


def in_turn(size: Size, steps: int) -> tuple[list[float], list[float]]:
    """Returns the times of steps by hand and of the engine's, one after the other, in changing order."""
    hand, engine = loop_by_hand(size), one_worker(size).run
    times: dict[Callable[[], object], list[float]] = {hand: [], engine: []}
    for n in range(steps):
        for contender in (hand, engine) if n % 2 else (engine, hand):
            started = time.perf_counter()
            contender()
            times[contender].append(time.perf_counter() - started)
    return times[hand], times[engine]


def loop_of_torch(rank: int, workers: int, name: str, size: Size) -> Callable[[], None]:
    """One rank's step with torch's own pipelining, or with its DDP."""
    noise, modules = Noise(size), [m for _, m in blocks(size[0])]
    count, samples = MICROBATCHES // workers, MICROBATCHES * noise.samples
    if name == "ddp":
        model = DistributedDataParallel(nn.Sequential(*modules))
        replicated = list(model.parameters())

        def step_of_replica() -> None:
            for n in range(count):
                model.require_backward_grad_sync = n == count - 1
                squares(model(noise.x), noise.y).backward()
            descend(replicated, samples // workers)  # DDP has divided by the number of ranks

        return step_of_replica
    stage = nn.Sequential(*modules[rank * BLOCKS // workers : (rank + 1) * BLOCKS // workers])
    kind = Schedule1F1B if name == "1f1b" else ScheduleGPipe
    schedule = kind(PipelineStage(stage, rank, workers, torch.device("cpu")), MICROBATCHES, loss_fn=squares)
    inputs = (noise.x.repeat(MICROBATCHES, 1),) if rank == 0 else ()
    target = {"target": noise.y.repeat(MICROBATCHES, 1)} if rank == workers - 1 else {}
    parameters = list(stage.parameters())

    def step_of_stage() -> None:
        schedule.step(*inputs, **target)
        descend(parameters, samples)

    return step_of_stage


def run_both(rank: int, workers: int, name: str, size: Size, steps: int, folder: str) -> None:
    """One rank: a step of torch behind each round of the engine; writes both times and what the wire carried."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    theirs, own = loop_of_torch(rank, workers, name, size), program(plan_of(name, workers), size[0])
    times: dict[str, list[float]] = {"torch": [], "engine": []}
    traffic, started = [], [time.perf_counter()]

    rounds = range(0, steps * own.plan.steps, own.plan.steps)
    ours = RankRun(own, job(size[0]), Noise(size))
    for _ in ours.rounds(rounds):
        times["engine"].append(time.perf_counter() - started[0])
        traffic.append(ours.handlers.wire.traffic())
        dist.barrier()
        started[0] = time.perf_counter()
        theirs()
        times["torch"].append(time.perf_counter() - started[0])
        dist.barrier()
        started[0] = time.perf_counter()
    carried = [(last - first) / (steps - 1) for first, last in zip(traffic[0], traffic[-1], strict=True)]
    Path(folder, f"{rank}.json").write_text(json.dumps({**times, "carried": carried}))
    dist.destroy_process_group()


def plan_of(name: str, workers: int) -> Plan:
    count = MICROBATCHES // workers if name == "ddp" else MICROBATCHES
    return preset(name).at(workers=workers, microbatches=count)


def least_traffic(own: Program, size: Size) -> tuple[float, float]:
    """Returns the messages and bytes of a step that the program cannot do without.

    Each value crosses once to each worker that wants it; in a sum over n members each hands on 2(n − 1) of n parts.
    """
    width, samples = size
    messages = size_bytes = 0.0
    for index, worker in enumerate(own.workers):
        sent = {(value_of(a), a.peer) for a in worker.actions if a.kind == ActionKind.SEND}
        assert all(value.kind in (ValueKind.ACTIVATION, ValueKind.GRADIENT) for value, _ in sent), index
        messages += len(sent)
        size_bytes += len(sent) * 4 * samples * width
        for a in worker.actions:
            if a.kind == ActionKind.REDUCE:
                members = len(own.groups[a.group].workers)
                messages += 2 * (members - 1)
                size_bytes += len(own.pieces[a.piece].units) * block_bytes(width) * 2 * (members - 1) / members
    return messages, size_bytes


def compare(name: str, workers: int, size: Size, steps: int) -> None:
    """Runs a preset against torch's own and prints both."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_both, args=(workers, name, size, steps, folder), nprocs=workers, start_method="spawn")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(workers)]
    slowest = {who: [max(step) for step in zip(*(r[who] for r in ranks), strict=True)] for who in ("torch", "engine")}
    print(f"{name} on {workers} workers: {against('torch', slowest['torch'], slowest['engine'])}")
    messages, size_bytes = (sum(rank["carried"][n] for rank in ranks) for n in (0, 1))
    least = least_traffic(program(plan_of(name, workers), size[0]), size)
    print(
        f"    wire: {messages:g} messages and {size_bytes / 2**20:.2f} MiB a step; least {least[0]:g} and"
        f" {least[1] / 2**20:.2f} MiB; ratios {messages / least[0]:.3f} and {size_bytes / least[1]:.3f}",
        flush=True,
    )


def against(whom: str, theirs: list[float], ours: list[float]) -> str:
    """Prints times in milliseconds and their ratios."""
    theirs, ours = theirs[WARM_UP:], ours[WARM_UP:]
    ratio = median(own / other for own, other in zip(ours, theirs, strict=True))
    return (
        f"{whom} {1e3 * median(theirs):.1f} ({1e3 * min(theirs):.1f}), engine {1e3 * median(ours):.1f}"
        f" ({1e3 * min(ours):.1f}), ratio {median(ours) / median(theirs):.3f} ({min(ours) / min(theirs):.3f}),"
        f" step by step {ratio:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="the engine against torch")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--presets", nargs="*", default=["gpipe", "1f1b", "ddp"])
    asked = parser.parse_args()
    if any(workers < 2 for workers in asked.workers):
        parser.error("--workers takes numbers from 2 on; one worker is always measured, against a loop by hand")
    torch.set_num_threads(1)
    print(f"{BLOCKS} blocks of width {asked.width}, {MICROBATCHES} microbatches of {asked.samples};", end=" ")
    print("milliseconds a step: median (fastest)")
    for width in dict.fromkeys((asked.width, 64)):
        size = (width, asked.samples)
        hand, engine = in_turn(size, asked.steps)
        extra = 1e6 * (min(engine[WARM_UP:]) - min(hand[WARM_UP:])) / (2 * MICROBATCHES + 1)
        print(f"one worker, width {width}: {against('by hand', hand, engine)}; {extra:+.0f} µs an action", flush=True)
    for workers in asked.workers:
        for name in asked.presets:
            compare(name, workers, (asked.width, asked.samples), asked.steps)


if __name__ == "__main__":
    main()
