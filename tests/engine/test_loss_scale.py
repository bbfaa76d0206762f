"""fp16: the loss is scaled as GradScaler does, overflows are left out on all workers, and counted."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from pipedejavu.engine import AdamW, judge, loss_scale, run_threads
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.loss_scale import FIRST, INTERVAL, SAVED, LossScale
from pipedejavu.engine.threads import Threads
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


def loud(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 64 * torch.nn.functional.cross_entropy(output, target, reduction="sum")


@pytest.mark.parametrize("saved_after", [1, 2, 4])
def test_a_resumed_run_has_the_scales_and_the_bits_of_an_undisturbed_one(monkeypatch, saved_after: int) -> None:
    """The first updates overflow; later, five clean ones double the scale again, in the middle of which it is saved."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 5)
    case = replace(case_of(), rounds=8)
    case.job.__dict__["loss"] = loud

    def run(rounds: int, state: dict[str, torch.Tensor] | None = None, done: int = 0) -> Threads:
        threads = Threads(case.program, case.job, case.batches)
        if state is not None:
            put_all(threads, done * case.plan.steps, state.get)
        for _ in range(rounds):
            threads.run()
        return threads

    whole = run(8)
    saved = take_all(run(saved_after))
    assert saved[SAVED].numel() == 3
    resumed = run(8 - saved_after, saved, saved_after)
    for one, other in zip(whole.handlers, resumed.handlers, strict=True):
        assert vars(one.scale) == vars(other.scale)
    assert whole.handlers[0].scale.next != FIRST
    first, second = take_all(whole), take_all(resumed)
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    del saved[SAVED]
    forgetful = run(8 - saved_after, saved, saved_after)
    assert vars(forgetful.handlers[0].scale) != vars(whole.handlers[0].scale)


def test_a_scale_that_was_never_saved_is_refused() -> None:
    own = LossScale(Plan(precision=FP16))
    for wrong in ([0.0, 0, 0], [8.0, 2000, 0], [1.0], [math.inf] * 3):
        with pytest.raises(
            InputError, match=r"^the checkpoint has a loss scale of .* go on from an earlier checkpoint"
        ):
            own.restore(torch.tensor(wrong))
    own.restore(torch.tensor([8.0, 3, 1], dtype=torch.float64))
    assert (own.next, own.num_clean, own.num_skipped) == (8.0, 3, 1)
    plain = LossScale(Plan())
    plain.restore(torch.tensor([8.0, 3, 1]))
    assert plain.next == 1
    assert plain.saved() == {}
