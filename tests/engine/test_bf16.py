"""bf16 with split masters on CPU stand-ins: the bits of a plain autocast loop, on every place of weights and state."""

import pytest
import torch

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.threads import Threads
from pipedejavu.plan import Order, Precision
from tests.engine.bf16 import SPLIT, in_precision, train_plainly
from tests.engine.case import make_case
from tests.engine.gpu import PLACES, case_of

ADAMW = AdamW(lr=0.01, eps=0.01, weight_decay=0.1)


@pytest.fixture(autouse=True)
def _float32() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def assert_bits(case, expected) -> None:
    seen = set()
    for weights in case.outcome.weights.values():
        for name, weight in weights.items():
            assert weight.dtype == torch.float32
            assert weight.cpu().equal(expected[name]), (name, float((weight.cpu() - expected[name]).abs().max()))
            seen.add(name)
    assert seen == expected.keys()


@pytest.mark.parametrize("optimizer", [ADAMW, Sgd(lr=0.1, momentum=0.9)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("model", ["mlp", "convnet"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_pipeline_has_the_bits_of_a_plain_loop(microbatches, model, optimizer) -> None:
    case = make_case("1f1b", model, workers=2, microbatches=microbatches, steps=3, rounds=2, optimizer=optimizer)
    case = in_precision(case)
    assert_bits(case, train_plainly(case))


def test_a_mean_loss_over_a_power_of_two_has_the_same_bits() -> None:
    """Division by a power of two is exact, so gradients of mean and sum differ in their exponents only."""
    case = in_precision(make_case("ddp", "mlp", replicas=1, microbatches=4, optimizer=ADAMW, sizes=(4,)))
    assert_bits(case, train_plainly(case, is_mean=True))


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_have_the_bits_of_a_plain_loop(replicas) -> None:
    case = in_precision(make_case("ddp", "mlp", replicas=replicas, microbatches=2, steps=3, optimizer=ADAMW))
    assert_bits(case, train_plainly(case, groups=replicas))


def test_a_whole_model_with_tied_weights_has_the_bits_of_a_plain_loop() -> None:
    case = in_precision(
        make_case("ddp", "calm-gpt", replicas=1, microbatches=3, steps=3, optimizer=ADAMW, order=Order())
    )
    assert len(case.program.pieces) == 1
    assert_bits(case, train_plainly(case))


@pytest.mark.parametrize("name", ["zero-offload", "cotrain", "l2l", "stronghold", *PLACES])
def test_every_place_of_weights_and_state_has_the_bits_of_a_plain_loop(name) -> None:
    case = in_precision(case_of(name, "mlp"))
    assert_bits(case, train_plainly(case))


def test_recompute_and_offloaded_activations_change_no_bit() -> None:
    case = in_precision(case_of("activations", "mlp"))
    assert_bits(case, train_plainly(case))
    case = in_precision(make_case("gpipe-recompute", "convnet", workers=2, microbatches=3, optimizer=ADAMW))
    assert_bits(case, train_plainly(case))


def test_fp32_masters_are_plain_autocast() -> None:
    precision = Precision(compute="bf16", masters="fp32")
    case = in_precision(make_case("1f1b", "mlp", workers=2, microbatches=4, steps=3, optimizer=ADAMW), precision)
    assert_bits(case, train_plainly(case, splits=False))


def test_gradients_may_be_summed_in_bf16() -> None:
    precision = SPLIT.replace(accumulate="bf16")
    case = in_precision(make_case("1f1b", "mlp", workers=2, microbatches=4, steps=3, optimizer=ADAMW), precision)
    assert_bits(case, train_plainly(case, accumulate=torch.bfloat16))


def test_weights_are_bf16_and_hold_less_than_their_masters() -> None:
    case = in_precision(make_case("ddp", "mlp", replicas=1, microbatches=1, steps=8, optimizer=AdamW(lr=1e-5)))
    initial = {f"{unit}.{n}": p for unit, module in case.units for n, p in module.named_parameters()}
    for name, weight in case.outcome.weights[0, 0].items():
        assert not weight.equal(initial[name]), "updates far below bf16's resolution must not be lost"


def taken(threads: Threads, rounds: int) -> dict[str, torch.Tensor]:
    for _ in range(rounds):
        threads.run()
    return take_all(threads)


@pytest.mark.parametrize("name", ["1f1b", "ddp", "visit", "lean", "window"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name) -> None:
    case = in_precision(case_of(name, "mlp"))
    whole, again = (Threads(case.program, case.job, case.batches) for _ in range(2))
    state = taken(whole, 1)
    assert all(tensor.dtype == torch.float32 for tensor in state.values()), "masters and moments"
    assert not any("low" in name for name in state)
    put_all(again, whole.updates, state.get)
    expected, found = taken(whole, 1), taken(again, 1)
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


def test_a_checkpoint_loads_under_any_precision() -> None:
    split, full = in_precision(case_of("1f1b", "mlp")), case_of("1f1b", "mlp")
    state = taken(Threads(split.program, split.job, split.batches), 1)
    for case in (full, split):
        threads = Threads(case.program, case.job, case.batches)
        put_all(threads, 3, state.get)
        assert all(tensor.equal(state[name]) for name, tensor in take_all(threads).items())


def test_frozen_matrices_are_rounded_for_computing_and_saved_as_they_are() -> None:
    case = in_precision(make_case("1f1b", "mlp", workers=2, microbatches=2, optimizer=ADAMW))
    for _, module in case.units[:2]:
        module.requires_grad_(False)
    frozen = {f"{u}.{n}": p for u, m in case.units for n, p in m.named_parameters() if not p.requires_grad}
    threads = Threads(case.program, case.job, case.batches)
    state = taken(threads, 1)
    assert all(state[f"weight/{name}"].equal(p) for name, p in frozen.items())
    runner = threads.handlers[0].runners[0, 0]
    kinds = {full: place[key].dtype for place, key, full in runner._frozen}
    assert kinds["u0.0.weight"] == torch.bfloat16
    assert kinds["u0.0.bias"] == torch.float32
    other = {name: tensor + 1 if name.startswith("weight/u0") else tensor for name, tensor in state.items()}
    put_all(threads, 0, other.get)
    low = next(place[key] for place, key, full in runner._frozen if full == "u0.0.weight")
    assert low.equal(other["weight/u0.0.weight"].bfloat16())
