"""Divided operators on ranks of this host beside DTensor's `parallelize_module`, in one run: time per step.

    python bench/tensor_parallel.py [--ranks 2] [--rounds 5] [--width 256] [--blocks 4] [--tokens 64] [--samples 4]

Both train one transformer with AdamW on the same samples, with columns and heads before rows in each block, and take
turns within each round, each in ranks of its own. DTensor takes a plan written for this model and Gloo; the engine
finds what to divide in the model's graph, and takes the wire that it chooses.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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
        q, k, v = (layer(y).view(*x.shape[:2], -1, HEAD).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


PLAN = {name: ColwiseParallel() for name in "qkv"} | {"up": ColwiseParallel()}
PLAN |= {"o": RowwiseParallel(), "down": RowwiseParallel()}


def units(width: int, blocks: int) -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    modules = [nn.Embedding(VOCABULARY, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, VOCABULARY)]
    return [(f"u{n}", module) for n, module in enumerate(modules)]


class Ours:
    """The preset on the engine."""

    def __init__(self, asked: argparse.Namespace):
        plan = preset("megatron").at(workers=asked.ranks, microbatches=1, samples=asked.samples)
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
        mesh = init_device_mesh("cpu", (asked.ranks,))
        for module in self.model:
            if isinstance(module, Block):
                parallelize_module(module, mesh, PLAN)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
        self.tokens, self.number = Tokens(asked.samples, asked.tokens), 0

    def step(self) -> float:
        self.optimizer.zero_grad()
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
    contenders = {"megatron": Ours(asked), "DTensor": Theirs(asked)}
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
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, args=(folder, asked), nprocs=asked.ranks, start_method="spawn")
        times, losses = json.loads(Path(folder, "figures.json").read_text())
    for name, row in times.items():
        print(f"{name:10}{1e3 * median(row):8.1f} ms per step, {1e3 * min(row):.1f} at best")
    ratio = median(a / b for a, b in zip(times["megatron"], times["DTensor"], strict=True))
    apart = max(abs(a - b) / b for a, b in zip(*(losses[n] for n in ("megatron", "DTensor")), strict=True))
    print(f"megatron takes {ratio:.2f} of the time of DTensor (the median over {asked.rounds} rounds)")
    print(f"losses differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
