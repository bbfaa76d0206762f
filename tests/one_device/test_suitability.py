"""Which programs run on HybridAdamW's machinery, and the reason of each that does not."""

from typing import Any

import pytest
import torch
from torch import nn

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.engine.grouped_optimizer import GroupedOptimizer, GroupRule
from pipedejavu.facts import InputError
from pipedejavu.hybrid.assignment import Assignment
from pipedejavu.one_device import why_by_actions
from pipedejavu.plan import Keep, Order, Precision, preset
from pipedejavu.profile.model_cut import cut_model
from tests.engine.case import machine_of
from tests.one_device.lab import SETTINGS, SPLIT, Run, plan_of


def reason_of(run: Run) -> str:
    return why_by_actions(run.program, run.job)


@pytest.mark.parametrize("name", ["zero-offload", "cotrain", "stronghold"])
def test_presets_of_one_gpu_and_its_host_are_taken(name: str) -> None:
    assert reason_of(Run(preset(name).at(microbatches=2).replace(steps=1))) == ""


def test_two_workers_are_the_engines() -> None:
    assert reason_of(Run(preset("1f1b").at(workers=2, microbatches=2).replace(steps=1))) == "it has 2 workers"


def test_a_cpu_is_the_engines() -> None:
    run = Run(plan_of())
    run.program.__dict__["machine"] = machine_of(run.plan, "cpu")
    assert reason_of(run) == "its worker is a CPU"


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (
            preset("l2l").at(microbatches=2),
            "its order 'layer-major + recompute + prefetch(1) + eager' runs several mic",
        ),
        (plan_of(microbatches=2).replace(order=Order(kind="gpipe")), "its order 'gpipe' runs several microbatches"),
        (plan_of(activations="host", recompute=(0,)), "it both recomputes units and keeps activations on the host"),
    ],
)
def test_other_plans_are_the_engines(plan: Any, reason: str) -> None:
    assert reason_of(Run(plan.replace(steps=1))).startswith(reason)


def grouped(rule: Any, *, maximizes: bool = False, left_out: frozenset[str] = frozenset()) -> GroupedOptimizer:
    return GroupedOptimizer({}, left_out, [GroupRule(rule, maximizes)])


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (Sgd(lr=0.1), "its optimizer is not AdamW with decoupled weight decay"),
        (AdamW(lr=0.1, is_decoupled=False), "its optimizer is not AdamW with decoupled weight decay"),
        (grouped(Sgd(lr=0.1)), "its optimizer is not AdamW with decoupled weight decay"),
        (grouped(AdamW(lr=0.1), maximizes=True), "its optimizer maximizes, or leaves parameters out"),
        (grouped(AdamW(lr=0.1), left_out=frozenset({"u0.0.bias"})), "its optimizer maximizes, or leaves parameters o"),
        (grouped(AdamW(lr=0.1)), ""),
    ],
)
def test_other_optimizers_are_the_engines(optimizer: Any, reason: str) -> None:
    assert reason_of(Run(plan_of(), optimizer=optimizer)).startswith(reason)
    assert bool(reason) == bool(reason_of(Run(plan_of(), optimizer=optimizer)))


def test_float64_and_tied_windows_are_the_engines_and_sums_of_bfloat16_are_not() -> None:
    assert reason_of(Run(plan_of(), dtype=torch.float64)) == "a parameter is float64, or not contiguous"
    for dtype in (torch.float32, torch.bfloat16):
        assert reason_of(Run(plan_of(microbatches=2, precision=SPLIT), dtype=dtype)) == ""
    tied = Run(plan_of(keep=Keep(kind="host")), "calm-gpt")
    assert reason_of(tied) == "units that share weights come through a window"


@pytest.mark.parametrize(
    ("precision", "reason"),
    [
        (Precision(compute="tf32"), ""),
        (SPLIT, ""),
        (Precision(compute="bf16", masters="fp32"), "its precision is 'bf16, fp32 masters'"),
        (Precision(compute="fp16", masters="fp32"), "its precision is 'fp16, fp32 masters'"),
    ],
)
def test_precisions_without_split_masters_are_the_engines(precision: Precision, reason: str) -> None:
    assert reason_of(Run(plan_of(clip=True, precision=precision), clip_norm=1.0)) == reason


def test_a_bfloat16_model_needs_masters() -> None:
    assert reason_of(Run(plan_of(), dtype=torch.bfloat16)) == "bfloat16 weights have no masters"


class Counting(nn.Linear):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)


def test_recomputed_units_that_change_their_buffers_are_the_engines() -> None:
    kept, again = (Run(plan_of(recompute=recompute)) for recompute in ((0,), (1,)))
    for run in (kept, again):
        run.units[1] = ("u1", Counting())
    assert reason_of(kept) == ""
    assert reason_of(again) == "unit 'u1' is recomputed and may change its buffers"


class Net(nn.Module):
    """Convolutions with BatchNorm, as no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.flatten(1)[:, :3]


@pytest.mark.parametrize("recompute", [None, (0, 1, 2, 3)])
def test_a_recomputed_unit_of_a_traced_model_with_batch_statistics_is_the_engines(recompute: Any) -> None:
    run = Run(plan_of(recompute=recompute))
    run.units[:] = cut_model(Net(), torch.randn(2, 1, 12, 12)).units
    assert reason_of(run).endswith("is recomputed and may change its buffers") == (recompute is not None)


def test_an_optimizer_that_changes_its_arithmetic_between_steps_is_refused() -> None:
    optimizer = grouped(AdamW(**SETTINGS))
    run = Run(plan_of(), optimizer=optimizer)
    threads = run.start()
    threads.run()
    optimizer.put({1: [GroupRule(AdamW(**SETTINGS), True)]})
    with pytest.raises(InputError, match=r"^the optimizer of 'u0.0.weight' was changed to maximize, or to another"):
        threads.run()
    threads.close()


def test_an_assignment_gives_each_unit_a_place() -> None:
    units = [("a", nn.Linear(2, 2)), ("b", nn.Linear(2, 2))]
    with pytest.raises(InputError, match=r"^an assignment gives 1 places to 2 units; give one place for each$"):
        Assignment(units=units, places=["gpu"])
    with pytest.raises(
        InputError, match=r"^an assignment has 0 visitors and a window of 1; give numbers of 1 or more$"
    ):
        Assignment(units=units, places=["gpu", "visit"], visitors=0)
