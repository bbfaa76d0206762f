"""Tiny models, their samples, programs made for them, and plain training in one process to compare with.

Everything is in float64 and on one CPU. `Case` puts a plan and a model together; its plain loop uses torch's own
optimizers and clipping and shares nothing with the engine but the seeds of dropout.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from pipedejavu.engine import AdamW, Job, Outcome, Sgd, audit, run_threads, unit_random
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Tie, Unit, UnitTime
from pipedejavu.plan import Plan, preset
from pipedejavu.profile.expert_rows import expert_share
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.zoo.moe import Mixture, MoeSize

torch.set_num_threads(1)

ULP = torch.finfo(torch.float64).eps
Units = list[tuple[str, nn.Module]]


@dataclass(frozen=True)
class Samples:
    """Microbatches of given sizes; `counts` are what each weighs in the mean."""

    x: list[Tensor]
    y: list[Tensor]
    counts: list[int]

    def inputs(self, microbatch: int) -> Tensor:
        return self.x[microbatch]

    def targets(self, microbatch: int) -> Tensor:
        return self.y[microbatch]

    def length(self, microbatch: int) -> int:
        return len(self.x[microbatch])

    def count(self, microbatch: int) -> int:
        return self.counts[microbatch]


def sum_of_losses(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum", ignore_index=-100)


def mlp(count: int) -> Units:
    units: Units = [(f"u{n}", nn.Sequential(nn.Linear(5, 5), nn.Tanh())) for n in range(count - 1)]
    return [*units, (f"u{count - 1}", nn.Linear(5, 3))]


def mlp_samples(sizes: list[int], random: torch.Generator) -> Samples:
    x = [torch.randn(n, 5, generator=random) for n in sizes]
    return Samples(x, [torch.randint(0, 3, (n,), generator=random) for n in sizes], sizes)


class Head(nn.Module):
    """Pools pictures and classifies them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


def convnet(count: int) -> Units:
    """Convolutions with BatchNorm; its statistics are those of a microbatch."""
    units: Units = []
    for n in range(count - 1):
        conv = nn.Conv2d(3 if n else 1, 3, 3, padding=1, bias=False)
        units.append((f"u{n}", nn.Sequential(conv, nn.BatchNorm2d(3), nn.Tanh())))
    return [*units, (f"u{count - 1}", Head())]


def convnet_samples(sizes: list[int], random: torch.Generator) -> Samples:
    x = [torch.randn(n, 1, 3, 3, generator=random) for n in sizes]
    return Samples(x, [torch.randint(0, 3, (n,), generator=random) for n in sizes], sizes)


class Embedding(nn.Module):
    """Tokens and positions, with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(7, 4), nn.Parameter(torch.randn(3, 4))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.token(x) + self.position)


class Block(nn.Module):
    """Causal attention of one head and a small MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.drop(self.out(torch.tanh(scaled_dot_product_attention(q, k, v, is_causal=True))))


class TiedHead(nn.Module):
    """Scores tokens with the embedding's own weights."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(4), weight

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.weight.T


def gpt(count: int, dropout: float = 0.2) -> Units:
    embedding = Embedding(dropout)
    blocks: Units = [(f"u{n}", Block(dropout)) for n in range(1, count - 1)]
    return [("u0", embedding), *blocks, (f"u{count - 1}", TiedHead(embedding.token.weight))]


def calm_gpt(count: int) -> Units:
    return gpt(count, dropout=0.0)


def gpt_samples(sizes: list[int], random: torch.Generator) -> Samples:
    """Sequences of three tokens; some targets do not count."""
    x = [torch.randint(0, 7, (n, 3), generator=random) for n in sizes]
    y = [torch.randint(0, 7, (n, 3), generator=random) for n in sizes]
    for n, target in enumerate(y):
        target[0, : n % 3] = -100
    return Samples(x, y, [int((t != -100).sum()) for t in y])


class Routed(nn.Module):
    """A mixture of experts beside its input, with dropout."""

    def __init__(self, size: MoeSize, dropout: float) -> None:
        super().__init__()
        self.norm, self.mixture, self.drop = nn.LayerNorm(4), Mixture(size), nn.Dropout(dropout)
        for parameter in self.mixture.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.mixture(self.norm(x))
        return x + self.drop(mixed)


def moe(count: int, dropout: float = 0.2, experts: int = 4) -> Units:
    """A GPT of which every block is a mixture; its experts have fewer slots than some sequences need."""
    size = MoeSize(layers=1, width=4, heads=1, context=3, experts=experts)
    blocks: Units = [(f"u{n}", Routed(size, dropout)) for n in range(1, count - 1)]
    return [("u0", Embedding(dropout)), *blocks, (f"u{count - 1}", nn.Linear(4, 7))]


def calm_moe(count: int) -> Units:
    return moe(count, dropout=0.0)


MODELS: dict[str, tuple[Callable[[int], Units], Callable[[list[int], torch.Generator], Samples]]] = {
    "mlp": (mlp, mlp_samples),
    "convnet": (convnet, convnet_samples),
    "gpt": (gpt, gpt_samples),
    "calm-gpt": (calm_gpt, gpt_samples),
    "moe": (moe, gpt_samples),
    "calm-moe": (calm_moe, gpt_samples),
}

TIME = UnitTime(
    forward=Cost(fixed_s=1.0),
    backward=Cost(fixed_s=2.0),
    weight_backward=Cost(fixed_s=1.0),
    recompute=Cost(fixed_s=1.0),
)


def profile_of(units: Units, ties: int) -> Profile:
    """Every unit takes the same time; the first and the last are tied where the job has a tie."""
    found = []
    for name, module in units:
        size = sum(8 * p.numel() for p in module.parameters()) or 8
        found.append(
            Unit(
                name=name,
                times={"cpu": TIME},
                parameter_bytes=size,
                gradient_bytes=size,
                optimizer_bytes=2 * size,
                activation_bytes=8.0,
                boundary_bytes=8.0,
                expert_share=expert_share(module),
            )
        )
    tied = tuple(Tie(units=(units[0][0], units[-1][0]), size_bytes=8) for _ in range(ties))
    return Profile(name="tiny", units=tuple(found), ties=tied)


def machine_of(plan: Plan, type_: Literal["cpu", "gpu"]) -> Machine:
    """A device for each worker that trains, and a CPU for the rest."""
    trainers = sum(plan.degrees) - plan.place.cpu_replicas - plan.place.servers
    types: list[Literal["cpu", "gpu"]] = [*[type_] * trainers, "cpu"]
    devices = [
        Device(name=f"c{n}", kind="cpu", type=type_, host="h", memory_bytes=2**40, reserved_bytes=0)
        for n, type_ in enumerate(types)
    ]
    return Machine(name="m", hosts=(Host(name="h"),), devices=tuple(devices), links=(Link(bytes_per_s=1e30),))


@dataclass
class Case:
    """A plan, a model and its samples."""

    plan: Plan
    units: Units
    make_samples: Callable[[list[int], torch.Generator], Samples]
    optimizer: Sgd | AdamW
    clip_norm: float | None = None
    sizes: tuple[int, ...] = (2, 3, 4, 2, 5)
    rounds: int = 1
    extra: dict[str, Any] = field(default_factory=dict)
    type_: Literal["cpu", "gpu"] = "cpu"

    @cached_property
    def job(self) -> Job:
        return Job(
            units=self.units,
            loss=sum_of_losses,
            optimizer=self.optimizer,
            seed=11,
            clip_norm=self.clip_norm,
            graphs=unit_graphs,
            **self.extra,
        )

    @cached_property
    def program(self) -> Program:
        profile = profile_of(self.units, len(self.job.ties))
        return compile_plan(self.plan, profile, machine_of(self.plan, self.type_), fold=False)

    @cached_property
    def batches(self) -> Samples:
        count = self.program.update_size * self.updates
        sizes = [self.sizes[n % len(self.sizes)] for n in range(count)]
        return self.make_samples(sizes, torch.Generator().manual_seed(5))

    @property
    def device(self) -> torch.device:
        """Where the workers train: on a GPU if they are to and there is one."""
        return torch.device("cuda" if self.type_ == "gpu" and torch.cuda.is_available() else "cpu")

    @property
    def updates(self) -> int:
        return self.program.plan.steps * self.rounds

    @cached_property
    def outcome(self) -> Outcome:
        return run_threads(self.program, self.job, self.batches, self.rounds)

    @property
    def tolerance(self) -> float:
        """Rounding: an update of a weight sums as many gradients as there are microbatches, pieces apart.

        Each sum of n terms that add up to no more than 1 in absolute value is off by n ulps at most, and an
        optimizer that divides by √v + ε makes it lr / ε of that; the weights themselves are below 4.
        """
        summands = self.program.update_size * self.program.num_replicas + 8
        grows = max(1.0, self.optimizer.lr / self.optimizer.eps) if isinstance(self.optimizer, AdamW) else 1.0
        return self.updates * summands * ULP * grows

    def audit(self) -> float:
        """Returns the largest difference between the run and its replay; every parameter must be compared."""
        found = audit(self.program, self.job, self.batches, self.outcome)
        names = {f"{unit}.{n}" for unit, module in self.units for n, _ in module.named_parameters()}
        assert {name for name in names if not self.is_tied(name)} <= set(found) <= names
        assert all(tie & found.keys() for tie in self.job.ties)
        return max(found.values())

    def trained_plainly(self, update_size: int | None = None) -> dict[str, Tensor]:
        """Trains on all microbatches of each update at once, in one process, with torch's own optimizer."""
        modules = [module.to(self.device) for module in copy.deepcopy([module for _, module in self.units])]
        names = [name for name, _ in self.units]
        size = update_size or self.program.update_size
        named = {f"{u}.{n}": p for u, m in zip(names, modules, strict=True) for n, p in m.named_parameters()}
        parameters = list({id(p): p for p in named.values() if p.requires_grad}.values())
        stepper, schedule = torch_optimizer(self.optimizer, named)
        for update in range(len(self.batches.counts) // size):
            members = range(update * size, (update + 1) * size)
            stepper.zero_grad()
            for i in members:
                sum_of_losses(self.forward(modules, i), self.batches.targets(i).to(self.device)).backward()
            for parameter in parameters:
                parameter.grad /= sum(self.batches.count(i) for i in members)
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, self.clip_norm)
            stepper.step()
            schedule.step()
        self.plain_modules = modules
        return {name: p.detach().cpu() for name, p in named.items()}

    def forward(self, modules: list[nn.Module], microbatch: int) -> Tensor:
        value = self.batches.inputs(microbatch).to(self.device)
        for number, module in enumerate(modules):
            torch.manual_seed(unit_random.mixed(self.job.seed, microbatch, number))
            value = module(value)
        return value

    def furthest(self, expected: dict[str, Tensor]) -> float:
        """Returns the largest difference between what any worker ended with and `expected`."""
        held = {h for w in range(len(self.program.workers)) for h in self.program.held(w)}
        assert held <= self.outcome.weights.keys()
        found = [(n, w) for home, ws in self.outcome.weights.items() for n, w in ws.items() if home in held]
        seen = {name for name, _ in found}
        assert all(name in seen or self.is_tied(name) for name in expected)
        return max(float((w.cpu() - expected[n]).abs().max()) for n, w in found)

    def is_tied(self, name: str) -> bool:
        return any(name in tie for tie in self.job.ties)

    def moved(self) -> float:
        """Returns how far training has taken the weights."""
        initial = {f"{u}.{n}": p.detach() for u, m in self.units for n, p in m.named_parameters()}
        held = {h for w in range(len(self.program.workers)) for h in self.program.held(w)}
        found = [(n, w) for home in held for n, w in self.outcome.weights[home].items()]
        return min(float((w.cpu() - initial[n]).abs().max()) for n, w in found)


def torch_optimizer(
    wanted: Sgd | AdamW, named: dict[str, nn.Parameter]
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Returns torch's optimizer of the same settings, a parameter group for each weight decay."""
    unique = {id(p): (n, p) for n, p in reversed(named.items())}.values()
    groups = [
        {"params": [p for n, p in unique if wanted.decays(n)], "weight_decay": wanted.weight_decay},
        {"params": [p for n, p in unique if not wanted.decays(n)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    made: torch.optim.Optimizer
    if isinstance(wanted, Sgd):
        made = torch.optim.SGD(groups, lr=wanted.lr, momentum=wanted.momentum)
    else:
        made = torch.optim.AdamW(groups, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps)
    return made, torch.optim.lr_scheduler.LambdaLR(made, wanted.schedule or (lambda _: 1.0))


def make_case(
    name: str,
    model: str = "mlp",
    *,
    workers: int | None = None,
    microbatches: int | None = None,
    replicas: int | None = None,
    steps: int = 2,
    units: int | None = None,
    optimizer: Sgd | AdamW | None = None,
    clip_norm: float | None = None,
    clip: str | None = None,
    sizes: tuple[int, ...] = (2, 3, 4, 2, 5),
    rounds: int = 1,
    extra: dict[str, Any] | None = None,
    type_: Literal["cpu", "gpu"] = "cpu",
    **changes: Any,
) -> Case:
    """Makes a case of a preset: `make_case("1f1b", "gpt", workers=2, microbatches=3, **fields of the plan)`."""
    found = preset(name)
    plan = found.at(workers=workers, microbatches=microbatches, replicas=replicas)
    plan = plan.replace(steps=plan.steps if found.per_update and microbatches else steps, bucket_bytes=1, **changes)
    if clip:
        plan = plan.replace(reduce=plan.reduce.replace(clip=clip))
    stages = plan.num_stages or 4
    count = units or max(3, stages, 2 * stages if plan.order.is_eager else 0)
    build, make_samples = MODELS[model]
    case_optimizer = optimizer or Sgd(lr=0.1, momentum=0.9)
    return Case(plan, build(count), make_samples, case_optimizer, clip_norm, sizes, rounds, extra or {}, type_)
