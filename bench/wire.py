"""Speed of the wires between two ranks of this host, side by side in one run: mapped memory beside Gloo.

    python bench/wire.py [--mib 64] [--messages 20] [--rounds 5]

With a GPU both ranks share it: CUDA IPC beside Gloo through pinned memory. Then the same on the CPU with a quarter of
the size: shared memory beside Gloo. For each wire: the rate of messages of one boundary after the other, and a 1F1B
pipeline whose boundary has this size: its makespan, and the share of the time of its sends in which the rank computes.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from pipedejavu.engine import Job, Sgd, rank_wire
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Span, Unit, UnitTime, keep_heap
from pipedejavu.plan import preset
from pipedejavu.program import Program, compile

WIDTH, MICROBATCHES, WARM_UP = 4096, 8, 2
Kind = Literal["cpu", "gpu"]


class Scale(nn.Module):
    """A unit of the CPU: its work is small beside that of its messages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


def units(kind: Kind) -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    return [(f"{n}", nn.Linear(WIDTH, WIDTH, bias=False) if kind == "gpu" else Scale()) for n in range(4)]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


class Noise:
    """The same microbatch again and again."""

    def __init__(self, rows: int, kind: Kind):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
        self.x = x.cuda() if kind == "gpu" else x

    def inputs(self, microbatch: int) -> Tensor:  # noqa: ARG002
        return self.x

    targets = inputs

    def length(self, microbatch: int) -> int:  # noqa: ARG002
        return len(self.x)

    count = length


def program(kind: Kind) -> Program:
    time_ = UnitTime(forward=Cost(fixed_s=1e-3), backward=Cost(fixed_s=2e-3))
    profile = Profile(name="units", units=tuple(Unit(name=n, times={"d": time_}) for n, _ in units(kind)))
    devices = [Device(name=f"{kind}{n}", kind="d", type=kind, host="here", memory_bytes=2**40) for n in range(2)]
    devices += [Device(name="host", kind="cpu", type="cpu", host="here", memory_bytes=2**40)]
    machine = Machine(name="here", hosts=(Host(name="here"),), devices=tuple(devices), links=(Link(bytes_per_s=1e9),))
    return compile(preset("1f1b").at(workers=2, microbatches=MICROBATCHES), profile, machine, fold=False)


def run_rank(rank: int, folder: str, kind: Kind, mib: int, messages: int, rounds: int) -> None:
    """One rank: both wires in turn, each with messages alone and in a pipeline."""
    keep_heap()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    open_listener, figures = rank_wire.open_listener, {}
    for name in ("memory", "gloo"):
        rank_wire.open_listener = open_listener if name == "memory" else lambda: None  # type: ignore[assignment]
        run = RankRun(
            program(kind), Job(units=units(kind), loss=squares, optimizer=Sgd(lr=1e-6)), Noise(mib << 6, kind)
        )
        once_s = time_messages(run, mib, messages)
        spans = [ended.spans for ended in run.rounds(range(WARM_UP + rounds))][WARM_UP:]
        step_s = median(max(span.end_s for span in each) for each in spans)
        hidden = median(hidden_share(each) for each in spans)
        figures[name] = {"wires": run.wire.describe(), "message_s": once_s, "step_s": step_s, "hidden": hidden}
        dist.barrier()
        run.wire.close()
    Path(folder, f"{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def time_messages(run: RankRun, mib: int, count: int) -> float:
    """Returns the time of a message of one boundary, many after each other from the first rank to the second."""
    device = run.handlers.device
    tensor = torch.ones(mib << 18, device=device)

    def exchange(count: int) -> None:
        for _ in range(count):
            if run.rank == 0:
                run.wire.send((tensor,), 1, ("rate",))
            else:
                run.wire.receive(0, ("rate",))
        run.wire.flush()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    exchange(WARM_UP)
    start = time.perf_counter()
    exchange(count)
    return (time.perf_counter() - start) / count


def hidden_share(spans: Sequence[Span]) -> float:
    """Returns the share of the time of a rank's sends in which it computes."""
    busy = [(s.start_s, s.end_s) for s in spans if s.lane == "compute"]
    sends = [(s.start_s, s.end_s) for s in spans if s.lane.startswith("net>")]
    total = sum(end - start for start, end in sends)
    covered = sum(max(0.0, min(end, b) - max(start, a)) for start, end in sends for a, b in busy)
    return covered / total if total else 0.0


def compare(kind: Kind, mib: int, messages: int, rounds: int) -> None:
    """Runs both wires on a kind of device and prints their figures and ratios."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, args=(folder, kind, mib, messages, rounds), nprocs=2, start_method="spawn")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    for name in ("memory", "gloo"):
        one = ranks[0][name]
        step_s, hidden = max(rank[name]["step_s"] for rank in ranks), min(rank[name]["hidden"] for rank in ranks)
        rate = mib * 2**20 / one["message_s"] / 1e9
        print(f"{kind} {one['wires'].partition(' ')[0]}")
        print(f"    messages of {mib} MiB at {rate:.1f} GB/s; 1F1B {1e3 * step_s:.1f} ms, {hidden:.0%} of sends hidden")
    rates = ranks[0]["gloo"]["message_s"] / ranks[0]["memory"]["message_s"]
    steps = max(r["gloo"]["step_s"] for r in ranks) / max(r["memory"]["step_s"] for r in ranks)
    print(f"{kind}: memory has {rates:.1f} times Gloo's rate, and its 1F1B is {steps:.2f} times as fast", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="wires between two ranks of this host")
    parser.add_argument("--mib", type=int, default=64, help="size of a message, and of the boundary of the pipeline")
    parser.add_argument("--messages", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    for kind in ("gpu", "cpu") if torch.cuda.is_available() else ("cpu",):
        is_cpu = kind == "cpu"  # its units take long beside its messages, so it gets a quarter of the boundary
        compare(kind, max(1, asked.mib // 4) if is_cpu else asked.mib, asked.messages, 1 if is_cpu else asked.rounds)


if __name__ == "__main__":
    main()
