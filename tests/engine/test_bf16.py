"""bf16 with split masters on CPU stand-ins: the bits of a plain autocast loop, on every place of weights and state."""

import pytest
import torch

from pipedejavu.engine import AdamW, Sgd
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
