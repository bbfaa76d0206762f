"""Speed of the engine, side by side in one run: a hand-written loop, torch's own pipelining, and torch's DDP.

Prints ratios: python bench/engine.py [--quick]. Every contender trains the same blocks on the same batches with
plain SGD, a process for each worker and one thread in each; medians over steps after a warm-up.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from pipedejavu.engine import Job, Sgd, Threads
from pipedejavu.engine.process import run_rank
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import Plan, preset
from pipedejavu.program import Program, compile

WIDTH, BLOCKS, SAMPLES, MICROBATCHES, LR = 512, 8, 32, 8, 0.01
STEPS, WARM_UP = 15, 3


def blocks() -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    return [(f"{n}", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))) for n in range(BLOCKS)]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


class Noise:
    """The same microbatch again and again."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.y = torch.randn(SAMPLES, WIDTH, generator=generator)

    def inputs(self, microbatch: int) -> Tensor:  # noqa: ARG002
        return self.x

    def targets(self, microbatch: int) -> Tensor:  # noqa: ARG002
        return self.y

    def count(self, microbatch: int) -> int:  # noqa: ARG002
        return SAMPLES


def program(plan: Plan) -> Program:
    time_ = UnitTime(forward=Cost(fixed_s=1e-3), backward=Cost(fixed_s=2e-3))
    size = 4 * 2 * WIDTH * (WIDTH + 1)
    units = [Unit(name=n, times={"cpu": time_}, parameter_bytes=size, gradient_bytes=size) for n, _ in blocks()]
    devices = [
        Device(name=f"cpu{n}", kind="cpu", type="cpu", host="here", memory_bytes=2**40) for n in range(plan.num_workers)
    ]
    machine = Machine(name="here", hosts=(Host(name="here"),), devices=tuple(devices), links=(Link(bytes_per_s=1e9),))
    return compile(plan, Profile(name="blocks", units=tuple(units)), machine, fold=False)


def job() -> Job:
    return Job(units=blocks(), loss=squares, optimizer=Sgd(lr=LR))


def by_hand() -> list[float]:
    """One worker: forward, backward, a step of SGD, written out."""
    model, noise = nn.Sequential(*(m for _, m in blocks())), Noise()
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        model.zero_grad()
        for _ in range(MICROBATCHES):
            squares(model(noise.x), noise.y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad / (SAMPLES * MICROBATCHES)
        times.append(time.perf_counter() - started)
    return times


def one_worker() -> list[float]:
    """One worker of the engine, all blocks in one piece."""
    plan = preset("ddp").at(workers=1, microbatches=MICROBATCHES)
    threads = Threads(program(plan.but(order=plan.order.but(is_eager=False))), job(), Noise())
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        threads.run()
        times.append(time.perf_counter() - started)
    return times


def rank_of_engine(rank: int, size: int, name: str, folder: str) -> None:
    _start(rank, size, folder)
    sizes = {"microbatches": MICROBATCHES if name != "ddp" else MICROBATCHES // size}
    times, last = [], [time.perf_counter()]
    own = program(preset(name).at(workers=size, **sizes))

    def after(_round: int, _handlers: object, _spans: object) -> Program:
        now = time.perf_counter()
        times.append(now - last[0])
        last[0] = now
        return own

    run_rank(own, job(), Noise(), STEPS, after, Path(folder))
    _finish(rank, folder, times)


def rank_of_torch(rank: int, size: int, name: str, folder: str) -> None:
    _start(rank, size, folder)
    noise, modules = Noise(), [m for _, m in blocks()]
    if name == "ddp":
        model = DistributedDataParallel(nn.Sequential(*modules))
        parameters = list(model.parameters())
    else:
        stage = nn.Sequential(*modules[rank * BLOCKS // size : (rank + 1) * BLOCKS // size])
        parameters = list(stage.parameters())
        kind = Schedule1F1B if name == "1f1b" else ScheduleGPipe
        pipe = PipelineStage(stage, rank, size, torch.device("cpu"))
        schedule = kind(pipe, MICROBATCHES, loss_fn=squares)
        whole = noise.x.repeat(MICROBATCHES, 1), noise.y.repeat(MICROBATCHES, 1)
    times = []
    for _ in range(STEPS):
        dist.barrier()
        started = time.perf_counter()
        for parameter in parameters:
            parameter.grad = None
        if name == "ddp":
            own = MICROBATCHES // size
            for n in range(own):
                model.require_backward_grad_sync = n == own - 1
                squares(model(noise.x), noise.y).backward()
        elif rank == 0:
            schedule.step(whole[0])
        elif rank == size - 1:
            schedule.step(target=whole[1])
        else:
            schedule.step()
        with torch.no_grad():
            for parameter in parameters:
                parameter -= LR * parameter.grad / (SAMPLES * MICROBATCHES)
        times.append(time.perf_counter() - started)
    _finish(rank, folder, times)


def _start(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _finish(rank: int, folder: str, times: list[float]) -> None:
    Path(folder, f"{rank}.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def together(entry: object, size: int, name: str) -> float:
    """Runs one contender; returns the median step of its slowest rank, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(entry, args=(size, name, folder), nprocs=size, start_method="spawn")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    return 1e3 * max(median(times[WARM_UP:]) for times in ranks)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{BLOCKS} blocks of width {WIDTH}, {MICROBATCHES} microbatches of {SAMPLES}; milliseconds a step")
    rounds = [(median(by_hand()[WARM_UP:]), median(one_worker()[WARM_UP:])) for _ in range(3)]
    hand, engine = (1e3 * min(r[n] for r in rounds) for n in (0, 1))
    print(f"one worker: by hand {hand:.1f}, engine {engine:.1f}, ratio {engine / hand:.3f}")
    for size in (2,) if "--quick" in sys.argv else (2, 4):
        for name in ("gpipe", "1f1b", "ddp"):
            theirs, ours = together(rank_of_torch, size, name), together(rank_of_engine, size, name)
            print(
                f"{name} on {size} workers: torch {theirs:.1f}, engine {ours:.1f}, ratio {ours / theirs:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
