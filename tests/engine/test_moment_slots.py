"""The engine with moments of fewer bits: the bits of a plain loop in every place, checkpoints, and the audit."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipedejavu.engine import AdamW, judge
from pipedejavu.engine.applier import Applier
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.grouped_optimizer import GroupedOptimizer, GroupRule
from pipedejavu.engine.moment_slots import moments_in
from pipedejavu.engine.threads import Threads, check_runnable
from pipedejavu.facts import InputError
from pipedejavu.optim.moment_format import moment_bytes
from pipedejavu.plan import Precision, preset
from tests.engine.bf16 import in_precision, train_plainly
from tests.engine.case import Case, make_case
from tests.engine.gpu import PLACES, case_of

ADAMW = AdamW(lr=0.01, eps=1e-6, weight_decay=0.1)
NARROW = ("bf16", "int8")


@pytest.fixture(autouse=True)
def _float32() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def precision_of(moments: str, compute: str = "bf16") -> Precision:
    masters = "split" if compute == "bf16" else "none"
    return Precision.model_validate({"compute": compute, "masters": masters, "moments": moments})


def assert_bits(case: Case, expected: dict[str, torch.Tensor]) -> None:
    for weights in case.outcome.weights.values():
        for name, weight in weights.items():
            assert weight.cpu().equal(expected[name]), name


@pytest.mark.parametrize("moments", NARROW)
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_a_pipeline_has_the_bits_of_a_plain_loop(moments: Any, model: str) -> None:
    case = make_case("1f1b", model, workers=2, microbatches=4, steps=3, rounds=2, optimizer=ADAMW)
    case = in_precision(case, precision_of(moments))
    assert_bits(case, train_plainly(case, moments=moments))


@pytest.mark.parametrize("moments", NARROW)
@pytest.mark.parametrize("name", ["zero-offload", "stronghold", *PLACES])
def test_every_place_of_weights_and_state_has_the_bits_of_a_plain_loop(name: str, moments: Any) -> None:
    case = in_precision(case_of(name, "mlp"), precision_of(moments))
    assert_bits(case, train_plainly(case, moments=moments))


def test_groups_follow_their_rules_and_the_format_of_the_plan() -> None:
    grouped = GroupedOptimizer({}, frozenset(), [GroupRule(ADAMW)])
    case = make_case("1f1b", "mlp", workers=2, microbatches=2, steps=2, optimizer=ADAMW)
    case = in_precision(case, precision_of("int8"))
    other = replace(case, optimizer=grouped)
    first, second = (case.outcome.weights, other.outcome.weights)
    assert all(first[key][name].equal(second[key][name]) for key in first for name in first[key])
    later = grouped.with_moments("int8")
    grouped.put({5: [GroupRule(AdamW(lr=0.5))]})
    assert later.rate(5) == 0.5


def train(case: Case, rounds: int, state: Any = None, done: int = 0) -> Threads:
    """Trains, after this many rounds that led to a state."""
    threads = Threads(case.program, case.job, case.batches)
    if state is not None:
        put_all(threads, done * case.plan.steps, state.get)
    for _ in range(rounds):
        threads.run()
    return threads


@pytest.mark.parametrize("moments", NARROW)
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(moments: str, model: str) -> None:
    case = make_case("1f1b", model, workers=2, microbatches=2, rounds=4, optimizer=ADAMW)
    case = in_precision(case, precision_of(moments))
    saved = take_all(train(case, 2))
    whole, resumed = take_all(train(case, 4)), take_all(train(case, 2, saved, 2))
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)
    names = {name.split("/")[1] for name in saved if name.startswith("state/")}
    codes = {"exp_avg_code", "exp_avg_sq_code", "exp_avg_scale", "exp_avg_sq_scale"}
    assert names - {"step"} == (codes if moments == "int8" else {"exp_avg", "exp_avg_sq"})
    assert all(t.dtype == torch.float32 for name, t in saved.items() if name.startswith("weight/"))


def test_a_run_goes_on_in_another_format() -> None:
    case = make_case("1f1b", "mlp", workers=2, microbatches=2, rounds=4, optimizer=ADAMW)
    narrow, wide = (in_precision(case, precision_of(moments)) for moments in ("int8", "fp32"))
    saved = take_all(train(narrow, 2))
    through = take_all(train(wide, 0, saved, 2))
    assert through["state/exp_avg/u0.0.weight"].dtype == torch.float32
    back = take_all(train(narrow, 0, through, 2))
    assert saved.keys() == back.keys()
    assert all(saved[name].equal(back[name]) for name in saved)


def test_scales_that_do_not_fit_are_refused() -> None:
    case = in_precision(make_case("1f1b", "mlp", workers=2, microbatches=2, optimizer=ADAMW), precision_of("int8"))
    saved = take_all(train(case, 1))
    saved["state/exp_avg_scale/u0.0.bias"] = torch.zeros(3)
    with pytest.raises(
        InputError, match=r"'exp_avg_scale' of 'u0\.0\.bias' has 3 scales for 5 values, and int8 moments"
    ):
        train(case, 0, saved, 1)


@pytest.mark.parametrize("moments", NARROW)
def test_other_updates_of_adam_keep_their_moments_in_the_format(moments: Any) -> None:
    """Weight decay within the gradient, and elastic averaging, are operations of torch."""
    for name, optimizer in (("1f1b", AdamW(lr=0.01, weight_decay=0.1, is_decoupled=False)), ("easgd", ADAMW)):
        case = make_case(name, "mlp", workers=2, microbatches=2, steps=2, optimizer=optimizer)
        case = in_precision(case, precision_of(moments, "fp32"))
        threads = train(case, 1)
        state = [slots for h in threads.handlers for piece in h.applier.state.values() for slots in piece.values()]
        assert state
        for slots in state:
            kept = moments_in(slots)
            assert kept is not None
            assert sum(t.nbytes for t in kept if t is not None) == moment_bytes(moments, kept.m.numel())
        assert judge(case.program, case.job, case.batches, case.outcome).is_passed


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("moments", NARROW)
@pytest.mark.parametrize("name", ["1f1b", "ddp", "zero-offload"])
def test_the_audit_of_a_sound_run_passes(name: str, moments: str, compute: str) -> None:
    workers = {} if name == "zero-offload" else {"workers": 2}
    case = make_case(name, "mlp", microbatches=2, steps=4, optimizer=ADAMW, sizes=(8,), **workers)
    case = in_precision(case, precision_of(moments, compute))
    verdict = judge(case.program, case.job, case.batches, case.outcome)
    assert verdict.is_passed, verdict


@pytest.mark.parametrize(("compute", "wrong"), [("fp32", 1.2), ("bf16", 3.0)])
@pytest.mark.parametrize("moments", NARROW)
def test_the_audit_of_a_wrong_factor_fails(
    moments: str, compute: str, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second update alone: AdamW forgives a factor of all gradients."""
    updated = Applier._updated

    def larger(self: Any, key: Any, update: int, base: Any, summed: Any) -> Any:
        factor = wrong if update == 1 else 1.0
        return updated(self, key, update, base, {name: gradient * factor for name, gradient in summed.items()})

    monkeypatch.setattr(Applier, "_updated", larger)
    case = make_case("1f1b", "mlp", workers=2, microbatches=2, steps=4, optimizer=ADAMW, sizes=(8,))
    case = in_precision(case, precision_of(moments, compute))
    assert case.outcome
    monkeypatch.undo()
    verdict = judge(case.program, case.job, case.batches, case.outcome)
    assert not verdict.is_passed, verdict


def test_the_bytes_of_a_precision_are_those_of_its_moments() -> None:
    for moments in ("fp32", *NARROW):
        for numel in (1, 255, 256, 1000):
            assert precision_of(moments).moment_bytes(numel) == moment_bytes(moments, numel)  # type: ignore[arg-type]


@pytest.mark.parametrize("moments", NARROW)
def test_divided_parameters_and_state_are_refused_in_one_sentence(moments: str) -> None:
    """Their scales, and the random bits of their rounding, belong to whole parameters."""
    for name in ("zero-1", "zero-3"):
        case = make_case(name, "mlp", workers=2, microbatches=2, optimizer=ADAMW)
        said = rf"divides state at any element, and {moments} moments are rounded by a parameter's own elements"
        with pytest.raises(InputError, match=said):
            train(in_precision(case, precision_of(moments)), 1)
    plan = preset("megatron").plan.replace(precision=precision_of(moments))
    program = SimpleNamespace(plan=plan, workers=(), inputs=(), outputs=(), copies=1)
    said = (
        rf"^the engine does not run {moments} moments of weights that are divided between workers yet; plan 'megatron'"
    )
    with pytest.raises(InputError, match=said):
        check_runnable(program)  # type: ignore[arg-type]
