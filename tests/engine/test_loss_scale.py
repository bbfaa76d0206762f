"""fp16: the loss is scaled as GradScaler does, overflows are left out on all workers, and counted."""

import copy
from dataclasses import replace

import pytest
import torch

from pipedejavu.engine import AdamW, judge, run_threads
from pipedejavu.engine.loss_scale import FIRST, INTERVAL, LossScale
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan, Precision
from tests.engine.case import Case, make_case

FP16 = Precision(compute="fp16", masters="fp32")


@pytest.fixture(autouse=True)
def _float32() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def case_of() -> Case:
    optimizer = AdamW(lr=0.01, eps=1e-4)
    case = make_case(
        "1f1b", "mlp", workers=2, microbatches=2, steps=1, rounds=6, optimizer=optimizer, clip="global", sizes=(4,)
    )
    return replace(case, plan=case.plan.replace(precision=FP16))


def test_the_scale_follows_the_rule_of_torch() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST, growth_interval=INTERVAL)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer, own = torch.optim.SGD([p], lr=0.0), LossScale(Plan(precision=FP16))
    overflows = {0, 1, 5, 2005, 2006}
    for step in range(4100):
        scale = scaler.scale(torch.ones(1))
        assert scale.item() == own.next
        p.grad = torch.full((1,), float("inf") if step in overflows else 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert own.take(float(p.grad), step, 1) == (step in overflows)
        assert own.applied == scale.item()


def test_a_summed_loss_has_the_scale_of_its_mean_up_to_a_factor_of_two() -> None:
    own = LossScale(Plan(precision=FP16))
    assert [own.of_sum(count) for count in (1, 2, 3, 1000)] == [FIRST, FIRST / 2, FIRST / 4, FIRST / 1024]
    assert LossScale(Plan()).of_sum(7) == 1


def test_gradients_that_overflow_are_left_out_on_all_workers_and_counted() -> None:
    case = case_of()
    case.job.__dict__["loss"] = lambda output, target: (
        64 * torch.nn.functional.cross_entropy(output, target, reduction="sum")
    )
    outcome = case.outcome
    skipped = {step: reason for log in outcome.logs for step, reason in log.skipped.items()}
    assert skipped, "65536 times these gradients is beyond 65504"
    assert sorted(skipped) == list(range(1, len(skipped) + 1))
    assert skipped[1] == "gradients overflow fp16 at a loss scale of 65536 in step 1"
    assert len(skipped) < 6
    assert all(weight.isfinite().all() for weights in outcome.weights.values() for weight in weights.values())
    verdict = judge(case.program, case.job, case.batches, outcome)
    assert verdict.is_passed, verdict


def test_a_plain_loop_with_a_grad_scaler_ends_with_the_same_weights() -> None:
    """Counts and scales are powers of two here: dividing by them is exact, before the backward or after it."""
    case = case_of()
    modules = torch.nn.Sequential(*(module for _, module in copy.deepcopy(case.units)))
    optimizer = torch.optim.AdamW(modules.parameters(), lr=0.01, eps=1e-4, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for update in range(case.updates):
        members = range(2 * update, 2 * update + 2)
        count = sum(case.batches.count(i) for i in members)
        optimizer.zero_grad()
        for i in members:
            with torch.autocast("cpu", torch.float16):
                loss = torch.nn.functional.cross_entropy(
                    modules(case.batches.inputs(i)), case.batches.targets(i), reduction="sum"
                )
                loss = loss / count
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    names = [f"{unit}.{name}" for unit, module in case.units for name, _ in module.named_parameters()]
    got = {name: weight for weights in case.outcome.weights.values() for name, weight in weights.items()}
    for name, p in zip(names, modules.parameters(), strict=True):
        # torch's AdamW rounds in another order: a few units of float32 per update.
        assert (got[name] - p.detach()).abs().max() <= 6 * 32 * torch.finfo(torch.float32).eps, name


def test_gradients_that_overflow_for_ever_stop_the_run() -> None:
    case = case_of()
    case = replace(case, rounds=40)
    case.job.__dict__["loss"] = lambda output, target: (output.float() * 1e30).sum() + 0 * target.sum()
    said = "gradients overflow fp16 in step 17 even at a loss scale of 1, after 17 updates in a row"
    with pytest.raises(InputError, match=said):
        run_threads(case.program, case.job, case.batches, 40)
