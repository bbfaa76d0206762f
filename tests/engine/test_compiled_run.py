"""Plans whose units are compiled: the weights of the eager engine and of a plain loop, and few compilations."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from pipedejavu.engine import AdamW, Sgd, Threads, run_threads
from pipedejavu.engine.handlers import Handlers
from pipedejavu.facts import FaultsError
from pipedejavu.plan import Keep
from tests.engine.case import Case
from tests.engine.gpu import CYCLES, check_order, check_same

Make = Callable[..., Case]
FORMS = 3
"""Forms of unit in a chain: the first, the blocks, and the last."""
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.fixture(autouse=True)
def _few_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep every record
    torch._dynamo.reset()
    counters.clear()


def compiled(case: Case, **changes: Any) -> Case:
    """Returns the case with compiled units."""
    return replace(case, plan=case.plan.replace(is_compiled=True, **changes))


def case_of(make: Make, name: str, type_: str = "cpu") -> Case:
    """Returns a case that needs compiled units to do what eager ones do."""
    if name == "batch statistics":
        return make("ddp", "convnet", workers=2, microbatches=2, sizes=(2,), rounds=2, type_=type_)
    sizes = {"workers": 2, "microbatches": 4, "steps": 2, "rounds": 2, "units": 6, "sizes": (2,)}
    optimizer = AdamW(lr=0.01, eps=0.01, weight_decay=0.1)
    if name == "replicas":
        return make("ddp", "calm-gpt", **{**sizes, "microbatches": 2}, optimizer=optimizer, type_=type_)
    case = make("1f1b", "gpt" if type_ == "cpu" else "calm-gpt", **sizes, optimizer=optimizer, type_=type_)
    if name == "recompute":
        return replace(case, plan=case.plan.replace(order=case.plan.order.replace(recompute=0.5)))
    if name == "offload":
        return replace(case, plan=case.plan.replace(keep=Keep(activations="host")))
    return case


def graph_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces inductor by the eager graph, which Dynamo guards in the same way."""
    real = torch.compile

    def fake(function: Any, *, fullgraph: bool, options: Any) -> Any:
        assert options == {"fallback_random": True}
        return real(function, fullgraph=fullgraph, backend=lambda graph, _: graph.forward)

    monkeypatch.setattr(torch, "compile", fake)


@pytest.mark.parametrize("name", ["pipeline", "recompute", "offload"])
def test_captured_units_give_the_bits_of_eager_ones_and_each_form_is_captured_once(
    make: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four updates, four microbatches each, new versions of the weights, two workers, and four alike blocks."""
    graph_only(monkeypatch)
    case = case_of(make, name)
    check_same(case.outcome, compiled(case).outcome)
    assert counters["stats"]["unique_graphs"] == FORMS


def test_microbatches_of_other_sizes_are_captured_once_more(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    graph_only(monkeypatch)
    case = replace(case_of(make, "pipeline"), sizes=(4, 4, 3, 2, 4, 5))
    check_same(case.outcome, compiled(case).outcome)
    assert counters["stats"]["unique_graphs"] == 2 * FORMS


def test_a_compiled_plan_that_splits_the_backward_is_refused(make: Make) -> None:
    with pytest.raises(FaultsError, match="order 'zb-h1' splits the backward, which compiled stages cannot do"):
        compiled(make("zb-h1", "mlp", workers=2, microbatches=2)).outcome  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", "replicas", "recompute", "offload", "batch statistics"])
def test_a_compiled_plan_equals_plain_training_and_passes_its_audit(make: Make, name: str) -> None:
    case = compiled(case_of(make, name))
    assert case.audit() <= case.tolerance
    assert case.furthest(case.trained_plainly()) <= 8 * case.tolerance
    assert counters["stats"]["unique_graphs"] == FORMS


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in ("pipeline", "replicas", "recompute")])
def test_a_compiled_plan_on_a_gpu_equals_the_eager_one(make: Make, name: str) -> None:
    """Kernels of the two round otherwise, as those of the CPU do: by some ulps per unit and direction, say eight."""
    case = case_of(make, name, "gpu")
    one = compiled(case)
    eager = {n: w.cpu() for weights in case.outcome.weights.values() for n, w in weights.items()}
    assert one.furthest(eager) <= 8 * 2 * len(case.units) * case.tolerance
    assert counters["stats"]["unique_graphs"] == FORMS


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in ("pipeline", "offload")])
@pytest.mark.parametrize("lane", ["compute", "copy", "net"])
def test_a_late_lane_changes_no_bit_of_a_compiled_plan_on_a_gpu(
    make: Make, name: str, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code runs on the stream of its lane, and its saved tensors are freed there."""
    case = compiled(case_of(make, name, "gpu"))
    expected, do = case.outcome, Handlers.do

    def late(self: Handlers, a: Any) -> None:
        if a.lane.startswith(lane):
            torch.cuda._sleep(CYCLES)
            if lane == "net":
                time.sleep(1e-3)
        do(self, a)

    monkeypatch.setattr(Handlers, "do", late)
    delayed = run_threads(case.program, case.job, case.batches, case.rounds)
    check_same(expected, delayed)
    check_order(case, delayed)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=on_gpu)])
def test_masks_of_compiled_units_on_a_gpu_are_those_of_eager_ones(make: Make, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    sizes = {"workers": 2, "microbatches": 2, "rounds": 1, "units": 4, "sizes": (2,)}
    case = make("1f1b", "gpt", **sizes, optimizer=Sgd(lr=0.1), type_="gpu")
    eager = {n: w.cpu() for weights in case.outcome.weights.values() for n, w in weights.items()}
    assert compiled(case).furthest(eager) <= 1e-4


def test_the_watchdog_does_not_count_the_time_of_compiling(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a unit compiles, its lane has no action; before and after it has the one that compiles."""
    graph_only(monkeypatch)
    case = compiled(make("ddp", "mlp", workers=1, microbatches=1, steps=1))
    threads, seen = Threads(case.program, case.job, case.batches), list[tuple[str, str]]()
    threads.handlers[0].notice = lambda lane, action: seen.append((lane, action))
    threads.run()
    compute = [action for lane, action in seen if lane == "compute"]
    assert compute[:4] == ["F0.0@0", "", "F0.0@0", ""]
