"""Divided operators on ranks of this host beside DTensor's `parallelize_module`, in one run: time per step.

    python bench/tensor_parallel.py [--layout sequence] [--ranks 2] [--rounds 5] [--width 256] [--blocks 4]
        [--tokens 64] [--samples 4]

Both train one transformer with AdamW on the same samples, with columns and heads before rows in each block, and take
turns within each round, each in ranks of its own. DTensor takes a plan written for this model and Gloo; the engine
finds what to divide in the model's graph, and takes the wire that it chooses. DTensor has `SequenceParallel` beside
layout `sequence`, and a divided embedding, head and `loss_parallel` beside `vocabulary`. Nothing is beside `context`:
torch's `context_parallel` has no attention for CPUs.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes

from bench.sharding import VOCABULARY, Tokens, loss
from pipedejavu.engine import AdamW, Job
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.facts import keep_heap
from pipedejavu.plan import preset
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate.unit_cost import unit_costs

WARM_UP, STEPS, HEAD = 2, 3, 32


class Block(nn.Module):
    """A pre-norm block whose heads follow from the widths of its layers, so that it runs on parts of them too."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (z.view(*z.shape[:2], -1, HEAD).transpose(1, 2) for z in (self.q(y), self.k(y), self.v(y)))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def block_plan(layout: str) -> dict[str, ParallelStyle]:
    """Returns what DTensor does with the modules of a block."""
    if layout == "megatron":
        columns: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        return columns | {name: RowwiseParallel() for name in ("o", "down")}
    plan: dict[str, ParallelStyle] = {name: SequenceParallel() for name in ("norm1", "norm2")}
    plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
    return plan | {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}


def divide(model: nn.Sequential, layout: str, mesh: DeviceMesh) -> None:
    """Divides a model over a mesh with DTensor."""
    embedding, *blocks, head = model
    for block in blocks:
        parallelize_module(block, mesh, block_plan(layout))
    if layout != "megatron":
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(embedding, mesh, rows)
    if layout == "sequence":
        parallelize_module(head, mesh, ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))
    if layout == "vocabulary":
        parallelize_module(head, mesh, ColwiseParallel(input_layouts=Shard(1), use_local_output=False))


def units(width: int, blocks: int) -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    modules = [nn.Embedding(VOCABULARY, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, VOCABULARY)]
    return [(f"u{n}", module) for n, module in enumerate(modules)]


class Ours:
    """The preset on the engine."""

    def __init__(self, asked: argparse.Namespace):
        plan = preset(asked.layout).at(workers=asked.ranks, microbatches=1, samples=asked.samples)
        plan, profile, machine = unit_costs(plan.replace(order=plan.order.replace(is_eager=False)), {})
        whole = units(asked.width, asked.blocks)
        rows = [profile.units[0].replace(name=name) for name, _ in whole]
        cpus = [d.replace(type="cpu") for d in machine.devices]
        program = compile_plan(
            plan, profile.replace(units=tuple(rows)), machine.replace(devices=tuple(cpus)), fold=False
        )
        job = Job(units=whole, loss=loss, optimizer=AdamW(lr=1e-3), graphs=unit_graphs)
        self.run = RankRun(program, job, Tokens(asked.samples, asked.tokens))
        self.rounds = self.run.rounds(range(10**9))

    def step(self) -> float:
        next(self.rounds)
        return ([*self.run.handlers.log.losses.values()] or [0.0])[-1]  # the first rank's log has them


class Theirs:
    """DTensor on Gloo."""

    def __init__(self, asked: argparse.Namespace):
        self.model = nn.Sequential(*(module for _, module in units(asked.width, asked.blocks)))
        divide(self.model, asked.layout, init_device_mesh("cpu", (asked.ranks,)))
        self.around = loss_parallel if asked.layout == "vocabulary" else nullcontext
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
        self.tokens, self.number = Tokens(asked.samples, asked.tokens), 0

    def step(self) -> float:
        self.optimizer.zero_grad()
        with self.around():
            total = loss(self.model(self.tokens.inputs(self.number)), self.tokens.targets(self.number))
            (total / self.tokens.count(self.number)).backward()
        self.optimizer.step()
        self.number += 1
        return total.item()


def run_rank(rank: int, folder: str, asked: argparse.Namespace) -> None:
    keep_heap()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", asked.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=asked.ranks)
    contenders: dict[str, Ours | Theirs] = {asked.layout: Ours(asked)}
    if asked.layout != "context":
        contenders["DTensor"] = Theirs(asked)
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, asked.rounds):
        for name in [*contenders] if number % 2 else [*contenders][::-1]:
            dist.barrier()
            start = time.perf_counter()
            losses[name] += [contenders[name].step() for _ in range(WARM_UP if number < 0 else STEPS)]
            dist.barrier()
            if number >= 0:
                times[name].append((time.perf_counter() - start) / STEPS)
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps([times, losses]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="divided operators beside DTensor")
    for name, value in {"ranks": 2, "rounds": 5, "width": 256, "blocks": 4, "tokens": 64, "samples": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--layout", choices=("megatron", "sequence", "vocabulary", "context"), default="megatron")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, args=(folder, asked), nprocs=asked.ranks, start_method="spawn")
        times, losses = json.loads(Path(folder, "figures.json").read_text())
    for name, row in times.items():
        print(f"{name:10}{1e3 * median(row):8.1f} ms per step, {1e3 * min(row):.1f} at best")
    if "DTensor" not in times:
        return
    ratio = median(a / b for a, b in zip(times[asked.layout], times["DTensor"], strict=True))
    apart = max(abs(a - b) / b for a, b in zip(*(losses[n] for n in (asked.layout, "DTensor")), strict=True))
    print(f"{asked.layout} takes {ratio:.2f} of the time of DTensor (the median over {asked.rounds} rounds)")
    print(f"losses differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
