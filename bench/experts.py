"""Divided experts beside a plain loop whose ranks each hold all experts, side by side in one run.

    python bench/experts.py [--ranks 2] [--rounds 5] [--width 256] [--experts 8] [--tokens 128]

Both train the zoo's mixture with AdamW on the same samples, in the same ranks, and take turns within each round. The
plain loop all-reduces one vector of all gradients over Gloo. The weights after the last step are compared.
"""

import argparse
import os
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from pipedejavu.engine import AdamW, Job
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.engine.threads import final_weights
from pipedejavu.facts import Device, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import preset
from pipedejavu.profile.expert_rows import expert_share, num_experts
from pipedejavu.program import compile
from pipedejavu.zoo.moe import Moe, MoeSize

VOCABULARY, WARM_UP, STEPS = 256, 2, 3
"""Steps per turn."""


def units(asked: argparse.Namespace) -> list[tuple[str, nn.Module]]:
    size = MoeSize(
        layers=asked.blocks,
        width=asked.width,
        heads=4,
        context=asked.tokens,
        experts=asked.experts,
        vocabulary=VOCABULARY,
    )
    return list(Moe(size, seed=1).units())


def loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, balance = output
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") + balance.sum()


class Tokens:
    """Random tokens, the same for both."""

    def __init__(self, asked: argparse.Namespace):
        self.form = (asked.samples, asked.tokens)

    def inputs(self, microbatch: int) -> Tensor:
        return torch.randint(VOCABULARY, self.form, generator=torch.Generator().manual_seed(microbatch))

    def targets(self, microbatch: int) -> Tensor:
        return self.inputs(microbatch).roll(1, 1)

    def length(self, microbatch: int) -> int:  # noqa: ARG002
        return self.form[0]

    def count(self, microbatch: int) -> int:  # noqa: ARG002
        return self.form[0] * self.form[1]


class Divided:
    """The preset `moe` on the engine."""

    def __init__(self, asked: argparse.Namespace):
        rows = [
            Unit(name=n, times={"cpu": UnitTime()}, expert_share=expert_share(m), num_experts=num_experts(m))
            for n, m in units(asked)
        ]
        devices = [
            Device(name=f"c{n}", kind="cpu", type="cpu", host="h", memory_bytes=2**40) for n in range(asked.ranks)
        ]
        machine = Machine(name="here", hosts=(Host(name="h"),), devices=tuple(devices), links=(Link(bytes_per_s=1e10),))
        plan = preset("moe").at(workers=asked.ranks, microbatches=1, samples=asked.samples)
        program = compile(plan, Profile(name="model", units=tuple(rows)), machine, fold=False)
        self.run = RankRun(program, Job(units=units(asked), loss=loss, optimizer=AdamW(lr=1e-3)), Tokens(asked))
        self.rounds = self.run.rounds(range(10**9))

    def step(self) -> None:
        next(self.rounds)

    def state_bytes(self) -> int:
        values = [tensors for key, tensors in self.run.handlers.values.items() if key.kind == "w"]
        return 3 * sum(t.nbytes for tensors in values for t in tensors.values())


class Plain:
    """A loop with all experts on each rank."""

    def __init__(self, asked: argparse.Namespace):
        self.named, self.batches, self.number = units(asked), Tokens(asked), dist.get_rank()
        self.model = nn.Sequential(*(module for _, module in self.named))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, fused=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        total = loss(self.model(self.batches.inputs(self.number)), self.batches.targets(self.number))
        total.backward()
        vector = torch.cat([p.grad.flatten() for p in self.parameters])
        dist.all_reduce(vector)
        vector /= self.batches.count(self.number) * dist.get_world_size()
        for parameter, part in zip(self.parameters, vector.split([p.numel() for p in self.parameters]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        self.optimizer.step()
        self.number += dist.get_world_size()

    def state_bytes(self) -> int:
        return 3 * sum(p.nbytes for p in self.parameters)


def run_rank(rank: int, folder: str, asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", asked.ranks), rank=rank, world_size=asked.ranks
    )
    contenders: dict[str, Divided | Plain] = {"plain loop": Plain(asked), "preset:moe": Divided(asked)}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(asked.rounds + 1):
        for name, contender in contenders.items():
            for _ in range(STEPS if number else WARM_UP):
                dist.barrier()
                start = time.perf_counter()
                contender.step()
                times[name] += [time.perf_counter() - start] if number else []
    weights = {
        n: w for tensors in final_weights(contenders["preset:moe"].run.handlers).values() for n, w in tensors.items()
    }
    if rank == 0:
        plain = contenders["plain loop"]
        expected = {f"{unit}.{n}": p for unit, module in plain.named for n, p in module.named_parameters()}
        apart = max(float((weights[name] - expected[name].detach()).abs().max()) for name in weights)
        for name, contender in contenders.items():
            ratio = median(times[name]) / median(times["plain loop"])
            print(
                f"{name:12} {1e3 * median(times[name]):8.1f} ms per step, {ratio:5.2f} of the plain loop;"
                f" weights and state {contender.state_bytes() / 2**20:7.1f} MiB per rank"
            )
        print(f"largest difference of a weight: {apart:.1e}")
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    options = {"ranks": 2, "rounds": 5, "width": 256, "blocks": 2, "experts": 8, "tokens": 128, "samples": 2}
    for option, value in options.items():
        parser.add_argument(f"--{option}", type=int, default=value)
    with tempfile.TemporaryDirectory() as place:
        start_processes(
            run_rank, args=(place, parser.parse_args()), nprocs=parser.parse_args().ranks, start_method="spawn"
        )
