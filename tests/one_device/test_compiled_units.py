"""Compiled units and heads in chunks on one GPU and its host: the weights of eager units and of the engine."""

import logging
from typing import Any

import pytest
import torch
import torch._dynamo

from pipedejavu.engine import audit
from pipedejavu.engine.verdict import judge
from pipedejavu.plan import Precision
from pipedejavu.runtime import compiled_unit
from tests.one_device.lab import SPLIT, Run, check_equal, furthest, plan_of
from tests.one_device.test_device_worker import PLACES

FULL = Precision()


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said of units that run eagerly."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep every record
    torch._dynamo.reset()
    sentences: list[str] = []
    monkeypatch.setattr(compiled_unit.UnitCompiler.__init__, "__defaults__", (sentences.append,))
    return sentences


def graph_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces inductor by the eager graph, which Dynamo guards in the same way."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: real(function, backend="eager", fullgraph=True))


def pair_of(name: str, model: str, precision: Precision) -> tuple[Run, Run]:
    """Returns a run with compiled units, and the same with eager ones."""
    options = {**PLACES[name], "clip": True, "precision": precision}
    plans = [plan_of(**options, compiled=compiled) for compiled in (True, False)]
    one, other = (Run(plan, model, clip_norm=0.05) for plan in plans)
    return one, other


@pytest.mark.parametrize("precision", [FULL, SPLIT], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", PLACES)
def test_graphs_of_units_have_the_bits_of_units(
    name: str, precision: Precision, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph_only(monkeypatch)
    compiled, eager = pair_of(name, "mlp", precision)
    check_equal(compiled.weights, eager.weights)
    assert not said


@pytest.mark.parametrize("precision", [FULL, SPLIT], ids=["fp32", "bf16"])
def test_graphs_with_dropout_draw_the_numbers_of_units(
    precision: Precision, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph_only(monkeypatch)
    compiled, eager = pair_of("device, visit, host, lean", "gpt", precision)
    check_equal(compiled.weights, eager.weights)
    assert not said


@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize("precision", [FULL, SPLIT], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["device, visit, host, lean", "window of one"])
def test_graphs_that_are_recomputed_have_the_bits_of_units_that_are_kept(
    name: str, precision: Precision, model: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of gpt have dropout, whose masks are drawn again."""
    if model == "gpt" and name == "window of one":
        return  # its tied weights cannot come through a window
    graph_only(monkeypatch)
    options = {**PLACES[name], "clip": True, "precision": precision}
    eager = Run(plan_of(**options), model, clip_norm=0.05)
    for recomputed in ((0, 1, 2, 3)[: len(eager.units)], (1, 2)):
        compiled = Run(plan_of(**options, recompute=recomputed, compiled=True), model, clip_norm=0.05)
        check_equal(compiled.weights, eager.weights)
        if precision == FULL:
            off = audit(compiled.program, compiled.job, compiled.batches, compiled.outcome)
            assert max(off.values()) <= compiled.tolerance()
    assert not said


def test_a_recomputed_graph_runs_twice_and_keeps_less(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph_only(monkeypatch)
    counts = []
    for recomputed in (None, (1, 2)):
        run = Run(plan_of(recompute=recomputed, compiled=True))
        calls = 0
        real = compiled_unit.UnitCompiler.run

        def counted(*given: Any, real: Any = real) -> Any:
            nonlocal calls
            calls += 1
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(compiled_unit.UnitCompiler, "run", counted)
            assert run.outcome
        counts.append(calls)
    assert counts == [4 * 4, 4 * (4 + 2) + 2]  # and a first call of each, to compile it
    assert not said


def test_hooks_of_the_user_run_once_per_forward(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph_only(monkeypatch)
    compiled, eager, plain = (*pair_of("all on the host", "mlp", FULL), Run(plan_of(clip=True), clip_norm=0.05))
    for run in (compiled, eager):
        run.units[3][1].register_forward_hook(lambda _module, _inputs, output: 2 * output)
    check_equal(compiled.weights, eager.weights)
    assert furthest(compiled.weights, plain.weights) > compiled.tolerance()
    assert not said


@pytest.mark.slow
@pytest.mark.parametrize("precision", [FULL, SPLIT], ids=["fp32", "bf16"])
def test_compiled_units_train_as_eager_ones_up_to_rounding(precision: Precision, said: list[str]) -> None:
    compiled, eager = pair_of("window of one", "mlp", precision)
    blur = 2**16 if precision == SPLIT else 1
    assert furthest(compiled.weights, eager.weights) <= blur * compiled.tolerance()
    verdict = judge(compiled.program, compiled.job, compiled.batches, compiled.outcome)
    assert verdict.is_passed, str(verdict)
    assert not said


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", [FULL, SPLIT], ids=["fp32", "bf16"])
def test_a_head_in_chunks_trains_as_one_in_a_piece(
    precision: Precision, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph_only(monkeypatch)
    options: dict[str, Any] = {"places": ("device", "visit", "host", "lean"), "precision": precision}
    run = Run(plan_of(**options, head_chunks=2, compiled=compiled))
    threads = run.start()
    threads.run()
    use = threads.handlers[0].runners[3, 0].head
    threads.close()
    assert use is not None
    assert (use.num_losses, use.num_chunks, use.is_early) == (1, 2, True)
    whole = Run(plan_of(**options))
    blur = 2**16 if precision == SPLIT else 1
    assert furthest(run.weights, whole.weights) <= blur * run.tolerance()
    verdict = judge(run.program, run.job, run.batches, run.outcome)
    assert verdict.is_passed, str(verdict)


def test_plans_that_do_not_combine_are_the_engines() -> None:
    from pipedejavu.one_device import why_by_actions

    reasons = {
        "its units are compiled, and keep activations on the host": [plan_of(compiled=True, activations="host")],
        "its head runs in chunks, and is recomputed or keeps activations on the host": [
            plan_of(head_chunks=2, recompute=(3,)),
        ],
        "its head runs in chunks, and its weights come through a window": [
            plan_of(("host", "window", "window", "window"), head_chunks=2),
        ],
    }
    for reason, plans in reasons.items():
        for plan in plans:
            run = Run(plan)
            assert why_by_actions(run.program, run.job) == reason
