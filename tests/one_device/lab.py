"""Small float32 models under plans of one GPU and its host, and the same training by loops that users write."""

import copy
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, Job, Outcome, Threads
from pipedejavu.engine.threads import run_threads
from pipedejavu.engine.unit_random import mixed
from pipedejavu.facts.head_form import HeadForm
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.one_device import start_threads, why_by_actions
from pipedejavu.optim.arithmetic import join, split
from pipedejavu.plan import Keep, Plan, Precision, preset
from pipedejavu.plan.axis import Rest
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from tests.engine.bf16 import is_matrix
from tests.engine.case import MODELS, Samples, Units, machine_of, profile_of, sum_of_losses

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.1}
SEED = 11
SPLIT = Precision(compute="bf16", masters="split")


def plan_of(
    places: tuple[Rest, ...] | None = None,
    *,
    microbatches: int = 1,
    clip: bool = False,
    recompute: tuple[int, ...] | None = None,
    window: int = 1,
    prefetch: int = 0,
    activations: str = "device",
    visitors: int = 1,
    keep: Keep | None = None,
    precision: Precision | None = None,
    compiled: bool = False,
    head_chunks: int = 1,
) -> Plan:
    """Returns a plan with the state of each unit in its place; without places, all on the device."""
    kept = keep or Keep.model_validate(
        {
            "kind": "split" if places else "replicated",
            "places": places,
            "window": window,
            "visitors": visitors,
            "activations": activations,
        }
    )
    plan = preset("cotrain").at(microbatches=microbatches)
    order = plan.order.replace(recompute_units=recompute, prefetch=prefetch, head_chunks=head_chunks)
    reduce = plan.reduce.replace(clip="global" if clip else "none")
    axes: dict[str, Any] = {"precision": precision or Precision(), "is_compiled": compiled}
    return plan.replace(steps=1, bucket_bytes=1, keep=kept, order=order, reduce=reduce, **axes)


@dataclass
class Run:
    """A plan, a model and its samples; microbatches have two, four or eight samples."""

    plan: Plan
    model: str = "mlp"
    count: int = 4
    clip_norm: float | None = None
    rounds: int = 4
    size: int = 4
    dtype: torch.dtype = torch.float32
    optimizer: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    @cached_property
    def units(self) -> Units:
        torch.manual_seed(3)
        return [(name, module.to(self.dtype)) for name, module in MODELS[self.model][0](self.count)]

    @cached_property
    def job(self) -> Job:
        optimizer = self.optimizer or AdamW(**SETTINGS)
        return Job(
            units=self.units, loss=self.loss, optimizer=optimizer, seed=SEED, clip_norm=self.clip_norm, **self.extra
        )

    def loss(self, output: Any, target: Any) -> Tensor:
        return sum_of_losses(output.float(), target)

    @cached_property
    def program(self) -> Program:
        profile = profile_of(self.units, len(self.job.ties))
        if self.plan.order.head_chunks > 1:
            profile = profile.replace(head_forms=(HeadForm(chunks=1), HeadForm(chunks=8)))
        return compile_plan(self.plan, profile, machine_of(self.plan, "gpu"), fold=False)

    @cached_property
    def batches(self) -> Samples:
        sizes = [self.size] * (self.program.update_size * self.rounds * self.plan.steps)
        made = MODELS[self.model][1](sizes, torch.Generator().manual_seed(5))
        x = [t.to(self.dtype) if t.is_floating_point() else t for t in made.x]
        return Samples(x, made.y, made.counts)

    def start(self) -> Threads:
        assert why_by_actions(self.program, self.job) == ""
        return start_threads(self.program, self.job, self.batches)

    @cached_property
    def outcome(self) -> Outcome:
        threads = self.start()
        spans = [threads.run() for _ in range(self.rounds)]
        outcome = threads.outcome(spans[-1])
        weights = {key: {n: w.detach().cpu().clone() for n, w in some.items()} for key, some in outcome.weights.items()}
        threads.close()
        return Outcome(weights, outcome.logs, outcome.spans)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: weight for some in self.outcome.weights.values() for name, weight in some.items()}

    def trained_by(self, kind: str, **options: Any) -> dict[str, Tensor]:
        """Trains the uncut model in a plain loop, with `hybrid` or with `torch`'s AdamW, on mean losses.

        In bf16 with split masters, the loop lowers matrices itself and runs under autocast. Returns masters.
        """
        device = torch.device(self.device)
        model = nn.Sequential(*copy.deepcopy([module for _, module in self.units])).to(device)
        size, is_split = self.program.update_size, self.plan.precision.is_split
        is_mixed, lows = is_split and self.dtype == torch.float32, {}
        for part in model.modules() if is_mixed else ():
            for p in part.parameters(recurse=False):
                if is_matrix(part, p) and p.dtype == torch.float32:
                    p.data, low = split(p.detach())
                    lows[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p),
                               "master_low": low}  # fmt: skip
        if kind == "hybrid":
            options = {"window": None, "microbatches": size, "host_threads": 1, "clip_norm": self.clip_norm} | options
            optimizer: Any = HybridAdamW(model, **SETTINGS, **options)
            optimizer.put_state({p: low for p, low in lows.items() if p.requires_grad})
        else:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **SETTINGS)
        for update in range(self.rounds * self.plan.steps):
            members = range(update * size, (update + 1) * size)
            count = sum(self.batches.count(i) for i in members)
            for i in members:
                with torch.autocast(self.device, torch.bfloat16, enabled=is_mixed):
                    loss = self.loss(self.forward(model, i, device), self.batches.targets(i).to(device)) / count
                loss.backward()
            if kind == "torch" and self.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        halves = {}
        if kind == "hybrid":
            optimizer.state_dict()
            halves = {p: s["master_low"].cpu().clone() for p, s in optimizer.state.items() if "master_low" in s}
            optimizer.close()
        names = [name for name, _ in self.units]
        pairs = zip(names, model, strict=True)
        return {
            full: join(p.detach().cpu(), halves[p]) if p in halves else p.detach().cpu().clone()
            for name, module in pairs
            for full, p in module.named_parameters(name, remove_duplicate=False)
        }

    def by_actions(self) -> dict[str, Tensor]:
        """Returns the weights after the same plan has run one action at a time."""
        weights = run_threads(self.program, self.job, self.batches, self.rounds).weights
        return {name: weight.cpu() for some in weights.values() for name, weight in some.items()}

    def forward(self, model: nn.Sequential, microbatch: int, device: torch.device) -> Tensor:
        value = self.batches.inputs(microbatch).to(device)
        for number, module in enumerate(model):
            torch.manual_seed(mixed(SEED, microbatch, number))
            value = module(value)
        return value

    def tolerance(self) -> float:
        """Rounding of float32: each sum of n terms is off by n units at most, and 1 / eps of that moves a weight."""
        summands = self.program.update_size * self.size * 8 + 8
        return self.rounds * self.plan.steps * summands * 2**-24 * SETTINGS["lr"] / SETTINGS["eps"]


def check_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{len(different)} of {len(one)} differ: {different[:6]}"


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def is_power_of_two(count: int) -> bool:
    return math.log2(count).is_integer()
