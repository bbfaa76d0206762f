"""ZeRO on ranks of this host beside FSDP2, side by side in one run: time per step, bytes sent, memory.

    python bench/sharding.py [--ranks 2] [--rounds 7] [--width 512] [--blocks 6] [--tokens 64] [--samples 2]

All contenders train one transformer with AdamW on the same samples and take turns within each round, each in ranks of
its own that wait while others run. FSDP2 (`fully_shard` per block) frees weights after the forward (reshard), as
`zero-3` does, or keeps them until the backward has used them, as `zero-2` does. Bytes are those that a rank must send;
FSDP2's are counted on the loopback interface, as all ranks use Gloo there. Memory is what a rank's process grows by
from its model to the end of its steps. The forecast is that of the simulator, from the times of units on all ranks at
once and from the collectives of the ranks, both measured here before the first step.
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
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from pipedejavu.engine import AdamW, Job
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.facts import CollectiveTime, Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime, keep_heap
from pipedejavu.plan import preset
from pipedejavu.planner.measure import measure
from pipedejavu.probe.collective_time import CollectiveSample, fit_collectives, sample_collectives
from pipedejavu.probe.machine_shape import num_cores
from pipedejavu.program import Program, compile
from pipedejavu.run.metrics import resident_bytes
from pipedejavu.simulate import simulate

OURS = ("ddp", "zero-1", "zero-2", "zero-3")
THEIRS = {"FSDP2, reshard": True, "FSDP2, no reshard": False}
BESIDE = {"zero-3": "FSDP2, reshard", "zero-2": "FSDP2, no reshard"}
VOCABULARY, WARM_UP, STEPS = 1024, 2, 3
"""Steps per turn."""


def units(width: int, blocks: int) -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    body = [
        nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(blocks)
    ]
    modules = [nn.Embedding(VOCABULARY, width), *body, nn.Linear(width, VOCABULARY)]
    return [(f"u{n}", module) for n, module in enumerate(modules)]


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


class Tokens:
    """Random tokens, the same for all contenders."""

    def __init__(self, samples: int, tokens: int):
        self.form = (samples, tokens)

    def inputs(self, microbatch: int) -> Tensor:
        return torch.randint(VOCABULARY, self.form, generator=torch.Generator().manual_seed(microbatch))

    def targets(self, microbatch: int) -> Tensor:
        return self.inputs(microbatch).roll(1, 1)

    def length(self, microbatch: int) -> int:  # noqa: ARG002
        return self.form[0]

    def count(self, microbatch: int) -> int:  # noqa: ARG002
        return self.form[0] * self.form[1]


def measure_here(asked: argparse.Namespace, collectives: tuple[CollectiveTime, ...]) -> tuple[Profile, Machine]:
    """Returns the model's units with their times, and the ranks with the wire between them."""
    job, tokens = Job(units=units(asked.width, asked.blocks), loss=loss, optimizer=AdamW(lr=1e-3)), Tokens
    plan = preset("ddp").at(workers=asked.ranks, microbatches=1, samples=asked.samples)

    def batch(samples: int) -> tuple[Tensor, Tensor]:
        return tokens(samples, asked.tokens).inputs(0), tokens(samples, asked.tokens).targets(0)

    profile = measure("model", job, plan, batch, lambda numbers: batch(len(numbers)), {"cpu": torch.device("cpu")})
    return profile, machine_of(asked.ranks, collectives)


def program_of(name: str, profile: Profile, machine: Machine, ranks: int, samples: int) -> Program:
    return compile(preset(name).at(workers=ranks, microbatches=1, samples=samples), profile, machine, fold=False)


class Ours:
    """A preset on the engine."""

    def __init__(self, name: str, profile: Profile, machine: Machine, asked: argparse.Namespace):
        program = program_of(name, profile, machine, asked.ranks, asked.samples)
        job = Job(units=units(asked.width, asked.blocks), loss=loss, optimizer=AdamW(lr=1e-3))
        self.run = RankRun(program, job, Tokens(asked.samples, asked.tokens))
        self.rounds = self.run.rounds(range(10**9))

    def step(self) -> None:
        next(self.rounds)

    def sent(self) -> int:
        return self.run.wire.traffic()[1]


class Theirs:
    """FSDP2 on Gloo."""

    def __init__(self, reshards: bool, asked: argparse.Namespace):
        self.model = nn.Sequential(*(module for _, module in units(asked.width, asked.blocks)))
        mesh = init_device_mesh("cpu", (asked.ranks,))
        for module in self.model:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=reshards)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.tokens, self.number, self.ranks = Tokens(asked.samples, asked.tokens), dist.get_rank(), asked.ranks

    def step(self) -> None:
        self.optimizer.zero_grad()
        total = loss(self.model(self.tokens.inputs(self.number)), self.tokens.targets(self.number))
        (total / self.tokens.count(self.number)).backward()  # FSDP2 averages over ranks
        self.optimizer.step()
        total.item()  # ours reads it too
        self.number += self.ranks

    def sent(self) -> int:
        lines = Path("/proc/net/dev").read_text().splitlines()
        loopback = next(line for line in lines if line.strip().startswith("lo:"))
        return int(loopback.split(":")[1].split()[8]) // self.ranks


def run_rank(rank: int, folder: str, asked: argparse.Namespace, names: list[str]) -> None:
    """One rank: all contenders in turn."""
    keep_heap()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", asked.ranks), rank=rank, world_size=asked.ranks
    )
    collectives = time_wire(asked)
    dist.barrier()
    box = [measure_here(asked, collectives)]  # on all ranks at once, as they train
    dist.broadcast_object_list(box)
    profile, machine = box[0]
    figures: dict[str, dict[str, float]] = {}
    contenders: dict[str, Ours | Theirs] = {}
    for name in names:
        before = resident_bytes()
        contender = Ours(name, profile, machine, asked) if name in OURS else Theirs(THEIRS[name], asked)
        for _ in range(WARM_UP):
            contender.step()
        dist.barrier()
        figures[name] = {"grown": resident_bytes() - before}
        contenders[name] = contender
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(asked.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            sent, start = contenders[name].sent(), time.perf_counter()
            for _ in range(STEPS):
                contenders[name].step()
            dist.barrier()
            times[name].append((time.perf_counter() - start) / STEPS)
            figures[name]["sent"] = (contenders[name].sent() - sent) / STEPS
    for name in names:
        figures[name]["step_s"] = median(times[name])
        figures[name]["best_s"] = min(times[name])
        if name in OURS:
            figures[name]["forecast_s"] = simulate(
                program_of(name, profile, machine, asked.ranks, asked.samples)
            ).makespan_s
    if rank == 0:
        ratios = {
            o: median(a / b for a, b in zip(times[o], times[t], strict=True))
            for o, t in BESIDE.items()
            if {o, t} <= {*names}
        }
        Path(folder, "figures.json").write_text(
            json.dumps([figures, ratios, sum(u.parameter_bytes for u in profile.units)])
        )
    dist.destroy_process_group()


def time_wire(asked: argparse.Namespace) -> tuple[CollectiveTime, ...]:
    """Returns the times of collectives of these ranks, over the wire that the engine takes."""
    unit = Unit(name="u", times={"cpu": UnitTime(forward=Cost(fixed_s=1.0), backward=Cost(fixed_s=1.0))})
    machine = machine_of(asked.ranks, ())
    program = program_of("ddp", Profile(name="one", units=(unit,)), machine, asked.ranks, 1)
    run = RankRun(program, Job(units=[("u", nn.Linear(1, 1))], loss=loss, optimizer=AdamW(lr=1.0)), Tokens(1, 1))
    samples: list[dict[str, list[list[CollectiveSample]]]] = [{}] * asked.ranks
    dist.all_gather_object(samples, sample_collectives(run.wire.memory_groups["s0"]))
    run.wire.close()
    return fit_collectives(samples)


def machine_of(ranks: int, collectives: tuple[CollectiveTime, ...]) -> Machine:
    """Returns this host with a CPU device for each rank, and the wire between them."""
    devices = [Device(name=f"c{n}", kind="cpu", type="cpu", host="here", memory_bytes=2**40) for n in range(ranks)]
    links = (Link(bytes_per_s=1e9, collectives=collectives),)
    return Machine(name="here", hosts=(Host(name="here", cores=num_cores()),), devices=tuple(devices), links=links)


def main() -> None:
    parser = argparse.ArgumentParser(description="ZeRO beside FSDP2")
    for name, value in {"ranks": 2, "rounds": 7, "width": 512, "blocks": 6, "tokens": 64, "samples": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="*", default=[*OURS, *THEIRS], help="contenders to run")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, args=(folder, asked, asked.only), nprocs=asked.ranks, start_method="spawn")
        figures, ratios, size = json.loads(Path(folder, "figures.json").read_text())
    print(
        f"{asked.ranks} ranks, {size / 4e6:.1f}M parameters, {asked.samples} × {asked.tokens} tokens per rank and step"
    )
    print(f"{'':20}{'step':>10}{'best':>10}{'forecast':>10}{'sent / Ψ':>10}{'grown':>12}")
    for name, row in figures.items():
        forecast = f"{1e3 * row['forecast_s']:8.1f}ms" if "forecast_s" in row else ""
        print(
            f"{name:20}{1e3 * row['step_s']:8.1f}ms{1e3 * row['best_s']:8.1f}ms{forecast:>10}{row['sent'] / size:10.2f}"
            f"{row['grown'] / 2**20:9.1f}MiB"
        )
    for name, ratio in ratios.items():
        print(f"{name} takes {ratio:.2f} of the time of {BESIDE[name]} (the median over {asked.rounds} rounds)")


if __name__ == "__main__":
    main()
