"""The audit of bf16 runs: sound ones pass, and those with a wrong factor, a lost microbatch or a stale weight fail."""

from typing import Any

import pytest
import torch

from pipedejavu.engine import AdamW, Sgd, Verdict, judge
from pipedejavu.engine.applier import Applier
from pipedejavu.engine.handlers import Handlers
from pipedejavu.plan import Precision
from tests.engine.bf16 import SPLIT, in_precision
from tests.engine.case import Case, make_case

OPTIMIZERS = {"adamw": AdamW(lr=0.01, weight_decay=0.1), "sgd": Sgd(lr=0.1, momentum=0.9)}
PLANS: dict[str, dict[str, int]] = {
    "1f1b": {"workers": 2, "microbatches": 4},
    "ddp": {"workers": 2, "microbatches": 2},
    "pipedream-2bw": {"workers": 2, "microbatches": 4},
    "zb-h1": {"workers": 2, "microbatches": 4},
    "parameter-server": {"workers": 2, "microbatches": 4},
    "zero-offload": {"microbatches": 3},
}


@pytest.fixture(autouse=True)
def _float32() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def case_of(name: str, model: str, optimizer: str, precision: Precision = SPLIT) -> Case:
    case = make_case(name, model, **PLANS[name], steps=4, optimizer=OPTIMIZERS[optimizer], sizes=(8,))  # type: ignore[arg-type]
    return in_precision(case, precision)


def verdict_of(case: Case) -> Verdict:
    return judge(case.program, case.job, case.batches, case.outcome)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["mlp", "convnet", "calm-gpt"])
@pytest.mark.parametrize("name", PLANS)
def test_a_sound_run_passes(name: str, model: str, optimizer: str) -> None:
    if name == "zero-offload" and "gpt" in model:
        return  # has no tie group
    verdict = verdict_of(case_of(name, model, optimizer))
    assert verdict.is_passed, verdict
    assert str(verdict).startswith("audit passed: largest RMS difference ")


def test_autocast_with_fp32_masters_passes() -> None:
    verdict = verdict_of(case_of("1f1b", "calm-gpt", "adamw", Precision(compute="bf16", masters="fp32")))
    assert verdict.is_passed, verdict


def fails(case: Case, monkeypatch: Any, owner: type, name: str, mutate: Any) -> Verdict:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, mutate(getattr(owner, name)))
        assert case.outcome
    verdict = verdict_of(case)
    assert not verdict.is_passed, verdict
    return verdict


def test_a_wrong_factor_of_the_gradients_fails(monkeypatch: Any) -> None:
    def larger(updated: Any) -> Any:
        return lambda self, key, update, base, summed: updated(
            self, key, update, base, {name: gradient * 1.2 for name, gradient in summed.items()}
        )

    for model in ("mlp", "calm-gpt"):
        fails(case_of("1f1b", model, "sgd"), monkeypatch, Applier, "_updated", larger)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["mlp", "convnet", "calm-gpt"])
def test_a_microbatch_whose_gradient_is_lost_fails(monkeypatch: Any, model: str, optimizer: str) -> None:
    def without(needed: Any) -> Any:
        def run(self: Handlers, a: Any) -> Any:
            saved, gradients = needed(self, a)
            lost = self.first_microbatch + a.microbatch == 6
            return saved, tuple(torch.zeros_like(g) for g in gradients) if lost else gradients

        return run

    fails(case_of("1f1b", model, optimizer), monkeypatch, Handlers, "_needed", without)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stale_weight_fails(monkeypatch: Any, optimizer: str) -> None:
    """From the second update on, units compute with the weights that were there at the beginning."""

    def stale(run_piece: Any) -> Any:
        first: dict[tuple[int, int, int], Any] = {}

        def run(self: Handlers, a: Any, keeps_buffers: bool) -> Any:
            value = next(v for v in self.effects[a][0] if v.kind == "w" and v.piece == a.piece)
            now = self.values[value]
            self.values[value] = first.setdefault((self.index, a.piece, a.replica), now)
            try:
                return run_piece(self, a, keeps_buffers)
            finally:
                self.values[value] = now

        return run

    fails(case_of("1f1b", "calm-gpt", optimizer), monkeypatch, Handlers, "_run_piece", stale)


def test_a_low_half_that_is_lost_fails(monkeypatch: Any) -> None:
    """Without their low halves, masters lose the updates that are too small for bf16."""

    def without(updated: Any) -> Any:
        def run(self: Applier, key: Any, update: int, base: Any, summed: Any) -> Any:
            for slots in self.state[key].values():
                if "low" in slots:
                    slots["low"].zero_()
            return updated(self, key, update, base, summed)

        return run

    fails(case_of("1f1b", "mlp", "sgd"), monkeypatch, Applier, "_updated", without)
