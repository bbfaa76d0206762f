"""Plans on ranks of this host beside FSDP2, side by side in one run: time per step, bytes sent, memory, forecast.

    python bench/sharding.py [--ranks 2] [--rounds 7] [--width 512] [--blocks 6] [--tokens 64] [--samples 2]
    chrt -r 10 python bench/sharding.py --ranks 4 --pin --only ddp zero-1 zero-2 zero-3 1f1b megatron
    python bench/sharding.py --gpu

All contenders train one transformer with AdamW on the same samples and take turns within each round, each in ranks of
its own that wait while others run. FSDP2 (`fully_shard` per block) frees weights after the forward (reshard), as
`zero-3` does, or keeps them until the backward has used them, as `zero-2` does. Bytes are those that a rank must send;
FSDP2's are counted on the loopback interface, as all ranks use Gloo there. Memory is what a rank's process grows by
from its model to the end of its steps. The forecast is that of the simulator, from the times of units on all ranks at
once and from the collectives of the ranks, both measured here before the first step.

Of the plans that ran, the last line names the one with the shortest forecast, and its regret: by how much its measured
step is longer than the shortest measured one. On a machine that other work shares, `--pin` gives each rank a core of
its own as far as there are enough, and real-time scheduling (`chrt -r 10`, as root) keeps other work off it.

With `--gpu` two ranks share one GPU by CUDA IPC. NCCL refuses two ranks on one GPU, so FSDP2 runs on Gloo there, if it
does, and its figures say more of Gloo than of FSDP2. Each plan is audited on its first steps; memory is the peak of the
GPU's allocator per rank.
"""

import argparse
import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from pipedejavu.engine import AdamW, Job
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.engine.threads import final_weights
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime, keep_heap
from pipedejavu.plan import preset
from pipedejavu.planner.measure import measure
from pipedejavu.probe.collective_time import fit_collectives, sample_collectives
from pipedejavu.probe.machine_shape import num_cores
from pipedejavu.probe.memory_link import measure_gpu_link, measure_memory_link
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.program import Program, compile
from pipedejavu.run.metrics import resident_bytes
from pipedejavu.simulate import simulate

OURS = ("ddp", "zero-1", "zero-2", "zero-3", "1f1b", "megatron")
THEIRS = {"FSDP2, reshard": True, "FSDP2, no reshard": False}
BESIDE = {"zero-3": "FSDP2, reshard", "zero-2": "FSDP2, no reshard"}
VOCABULARY, WARM_UP, STEPS = 1024, 2, 3
"""Steps per turn."""
KIND, LR, EPS = "cpu", 1e-3, 1e-4


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


def measure_here(asked: argparse.Namespace, link: Link) -> tuple[Profile, Machine]:
    """Returns the model's units with their times, and the ranks with the wire between them."""
    job, tokens = job_of(asked), Tokens
    whole = preset("ddp").at(workers=asked.ranks, microbatches=1, samples=asked.samples * asked.ranks)

    def batch(samples: int) -> tuple[Tensor, Tensor]:
        return tokens(samples, asked.tokens).inputs(0), tokens(samples, asked.tokens).targets(0)

    kinds = {KIND: torch.device("cuda" if asked.gpu else "cpu")}
    profile = measure("model", job, whole, batch, lambda numbers: batch(len(numbers)), kinds, at_more=True)
    return profile, machine_of(asked, link)


def job_of(asked: argparse.Namespace) -> Job:
    optimizer = AdamW(lr=LR, eps=EPS)
    return Job(units=units(asked.width, asked.blocks), loss=loss, optimizer=optimizer, graphs=unit_graphs)


def program_of(name: str, profile: Profile, machine: Machine, asked: argparse.Namespace) -> Program:
    """Returns the program of a preset whose update has as many samples as the others'."""
    ranks, samples = asked.ranks, asked.samples
    sizes = {"1f1b": (ranks, samples), "megatron": (1, ranks * samples)}
    microbatches, samples = sizes.get(name, (1, samples))
    plan = preset(name).at(workers=ranks, microbatches=microbatches, samples=samples)
    return compile(plan, profile, machine, fold=False)


class Ours:
    """A preset on the engine."""

    def __init__(self, name: str, profile: Profile, machine: Machine, asked: argparse.Namespace):
        self.program = program_of(name, profile, machine, asked)
        self.samples = self.program.plan.feed.samples
        self.run = RankRun(self.program, job_of(asked), Tokens(self.samples, asked.tokens))
        self.rounds = self.run.rounds(range(10**9))

    def step(self) -> None:
        next(self.rounds)

    def sent(self) -> int:
        return self.run.wire.traffic()[1]

    def off(self, asked: argparse.Namespace) -> float:
        """Returns how far this rank's weights are from a plain loop's after the same steps, relative to their way."""
        held = final_weights(self.run.handlers)
        start, plain = (
            plain_weights(asked, 0, 1, 1),
            plain_weights(asked, WARM_UP, self.program.update_size, self.samples),
        )
        pairs = [(w.cpu(), plain[n], start[n]) for tensors in held.values() for n, w in tensors.items()]
        error = sum(float((w - p).square().sum()) for w, p, _ in pairs)
        return (error / sum(float((p - s).square().sum()) for _, p, s in pairs)) ** 0.5


def plain_weights(asked: argparse.Namespace, steps: int, microbatches: int, samples: int) -> dict[str, Tensor]:
    """Trains the model in this process with torch's own AdamW, one step per update."""
    device, named = torch.device("cuda" if asked.gpu else "cpu"), units(asked.width, asked.blocks)
    model, tokens = nn.Sequential(*(module for _, module in named)).to(device), Tokens(samples, asked.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=AdamW(lr=LR).weight_decay)
    for step in range(steps):
        optimizer.zero_grad()
        for n in range(step * microbatches, (step + 1) * microbatches):
            total = loss(model(tokens.inputs(n).to(device)), tokens.targets(n).to(device))
            (total / tokens.count(n) / microbatches).backward()
        optimizer.step()
    return {f"{name}.{n}": p.detach().cpu() for name, module in named for n, p in module.named_parameters()}


class Theirs:
    """FSDP2 on Gloo."""

    def __init__(self, reshards: bool, asked: argparse.Namespace):
        device = "cuda" if asked.gpu else "cpu"
        self.device = torch.device(device)
        self.model = nn.Sequential(*(module for _, module in units(asked.width, asked.blocks))).to(self.device)
        mesh = init_device_mesh(device, (asked.ranks,))
        for module in self.model:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=reshards)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, eps=EPS, fused=True)
        self.tokens, self.number, self.ranks = Tokens(asked.samples, asked.tokens), dist.get_rank(), asked.ranks

    def step(self) -> None:
        self.optimizer.zero_grad()
        inputs, targets = (part(self.number).to(self.device) for part in (self.tokens.inputs, self.tokens.targets))
        total = loss(self.model(inputs), targets)
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
    if asked.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", asked.ranks),
        rank=rank,
        world_size=asked.ranks,
        timeout=timedelta(seconds=60),
    )
    link = time_wire(asked)
    dist.barrier()
    box = [measure_here(asked, link)]  # on all ranks at once, as they train
    dist.broadcast_object_list(box)
    profile, machine = box[0]
    figures: dict[str, dict[str, Any]] = {}
    contenders: dict[str, Ours | Theirs] = {}
    for name in names:
        try:
            contenders[name], figures[name] = begin(name, profile, machine, asked)
        except (RuntimeError, ValueError, TypeError) as error:
            figures[name] = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    times = take_turns(contenders, figures, asked)
    for name, contender in contenders.items():
        figures[name] |= {"step_s": median(times[name]), "best_s": min(times[name])}
        if isinstance(contender, Ours):
            figures[name]["forecast_s"] = simulate(contender.program).makespan_s
    gathered: list[Any] = [None] * asked.ranks
    dist.all_gather_object(gathered, figures)
    if rank == 0:
        ratios = {
            o: median(a / b for a, b in zip(times[o], times[t], strict=True))
            for o, t in BESIDE.items()
            if {o, t} <= {*contenders}
        }
        size = sum(u.parameter_bytes for u in profile.units)
        Path(folder, "figures.json").write_text(json.dumps([gathered, ratios, size]))
    dist.barrier()
    dist.destroy_process_group()


def begin(
    name: str, profile: Profile, machine: Machine, asked: argparse.Namespace
) -> tuple["Ours | Theirs", dict[str, Any]]:
    """Returns a contender after its first steps, with what its memory has grown by and how far off its weights are."""
    if asked.gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if asked.gpu else resident_bytes()
    contender = Ours(name, profile, machine, asked) if name in OURS else Theirs(THEIRS[name], asked)
    for _ in range(WARM_UP):
        contender.step()
    dist.barrier()
    after = torch.cuda.max_memory_allocated() if asked.gpu else resident_bytes()
    figures = {"grown": after - before}
    if isinstance(contender, Ours):
        figures["off"] = contender.off(asked)
    return contender, figures


def take_turns(
    contenders: "dict[str, Ours | Theirs]", figures: dict[str, dict[str, Any]], asked: argparse.Namespace
) -> dict[str, list[float]]:
    """Returns the time of a step of each contender in each round; the order changes from round to round."""
    names = [*contenders]
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(asked.rounds):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            dist.barrier()
            sent, start = contenders[name].sent(), time.perf_counter()
            for _ in range(STEPS):
                contenders[name].step()
            dist.barrier()
            times[name].append((time.perf_counter() - start) / STEPS)
            figures[name]["sent"] = (contenders[name].sent() - sent) / STEPS
    return times


def time_wire(asked: argparse.Namespace) -> Link:
    """Returns the link between these ranks, over the wire that the engine takes."""
    if asked.gpu:
        return measure_gpu_link(torch.device("cuda"), torch.device("cuda"))
    unit = Unit(name="u", times={KIND: UnitTime(forward=Cost(fixed_s=1.0), backward=Cost(fixed_s=1.0))})
    program = program_of("ddp", Profile(name="one", units=(unit,)), machine_of(asked, Link(bytes_per_s=1e9)), asked)
    run = RankRun(program, Job(units=[("u", nn.Linear(1, 1))], loss=loss, optimizer=AdamW(lr=1.0)), Tokens(1, 1))
    samples: list[Any] = [None] * asked.ranks
    dist.all_gather_object(samples, sample_collectives(run.wire.memory_groups["s0"]))
    run.wire.close()
    box = [measure_memory_link() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0].replace(collectives=fit_collectives(samples))


def machine_of(asked: argparse.Namespace, link: Link) -> Machine:
    """Returns this host with a device for each rank, and the wire between them."""
    type_: Literal["cpu", "gpu"] = "gpu" if asked.gpu else "cpu"
    devices = [Device(name=f"c{n}", kind=KIND, type=type_, host="here", memory_bytes=2**40) for n in range(asked.ranks)]
    host = Host(name="here", cores=num_cores())
    return Machine(name="here", hosts=(host,), devices=tuple(devices), links=(link,))


def main() -> None:
    parser = argparse.ArgumentParser(description="ZeRO beside FSDP2")
    for name, value in {"ranks": 2, "rounds": 7, "width": 512, "blocks": 6, "tokens": 64, "samples": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="*", default=[*OURS, *THEIRS], help="contenders to run")
    parser.add_argument("--pin", action="store_true", help="give each rank a core of its own")
    parser.add_argument("--gpu", action="store_true", help="two ranks on one GPU")
    asked = parser.parse_args()
    if asked.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs a GPU, and torch sees none here")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, args=(folder, asked, asked.only), nprocs=asked.ranks, start_method="spawn")
        by_rank, ratios, size = json.loads(Path(folder, "figures.json").read_text())
    print(
        f"{asked.ranks} ranks, {size / 4e6:.1f}M parameters, {asked.samples} × {asked.tokens} tokens per rank and step"
    )
    memory = "peak" if asked.gpu else "grown"
    print(f"{'':20}{'step':>10}{'best':>10}{'forecast':>10}{'sent / Ψ':>10}{'off':>10}  {memory} by rank")
    for name in by_rank[0]:
        print(describe(name, [figures[name] for figures in by_rank], size))
    for name, ratio in ratios.items():
        print(f"{name} takes {ratio:.2f} of the time of {BESIDE[name]} (the median over {asked.rounds} rounds)")
    print(describe_favourite(by_rank[0]))


def describe(name: str, rows: list[dict[str, Any]], size: int) -> str:
    """Returns a contender's line."""
    row = rows[0]
    if "failure" in row:
        return f"{name:20} did not run: {row['failure']}"
    forecast = f"{1e3 * row['forecast_s']:8.1f}ms" if "forecast_s" in row else ""
    off = f"{max(figures['off'] for figures in rows):.1e}" if "off" in row else ""
    grown = ", ".join(f"{figures['grown'] / 2**20:.0f}" for figures in rows)
    times = f"{1e3 * row['step_s']:8.1f}ms{1e3 * row['best_s']:8.1f}ms"
    return f"{name:20}{times}{forecast:>10}{row['sent'] / size:10.2f}{off:>10}  {grown} MiB"


def describe_favourite(figures: dict[str, dict[str, Any]]) -> str:
    """Returns which plan has the shortest forecast, and how much longer it takes than the fastest."""
    ours = {name: row for name, row in figures.items() if "forecast_s" in row}
    if not ours:
        return "no plan has a forecast"
    favourite = min(ours, key=lambda name: ours[name]["forecast_s"])
    fastest = min(ours, key=lambda name: ours[name]["step_s"])
    regret = ours[favourite]["step_s"] / ours[fastest]["step_s"] - 1
    return f"favourite {favourite}, fastest {fastest}, regret {regret:.1%}"


if __name__ == "__main__":
    main()
