import math

import pytest

pytest.importorskip("torch")

import torch

from pipedejavu.zoo.loss import IGNORED, balanced_cross_entropy, count, cross_entropy


def test_the_loss_is_a_sum_over_what_counts() -> None:
    logits = torch.zeros(2, 3, 5)
    target = torch.tensor([[1, IGNORED, 2], [IGNORED, 4, 0]])
    assert count(target) == 4
    assert float(cross_entropy(logits, target)) == pytest.approx(4 * math.log(5))
    assert float(cross_entropy(torch.zeros(3, 5), torch.tensor([0, 1, 2]))) == pytest.approx(3 * math.log(5))


def test_nothing_that_counts_is_nought() -> None:
    target = torch.full((1, 3), IGNORED)
    assert count(target) == 0
    assert float(cross_entropy(torch.zeros(1, 3, 5), target)) == 0.0


def test_low_precision_is_summed_in_fp32() -> None:
    logits = torch.randn(300, 50).bfloat16()
    target = torch.zeros(300, dtype=torch.int64)
    assert cross_entropy(logits, target).dtype == torch.float32
    assert torch.equal(cross_entropy(logits, target), cross_entropy(logits.float(), target))


@pytest.mark.parametrize("parts", [[1] * 9, [4, 5], [2, 6, 1], [8, 1]])
def test_uneven_microbatches_add_up(parts: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 6, 7, generator=draw, dtype=torch.float64)
    balance = torch.rand(9, generator=draw, dtype=torch.float64)
    target = torch.randint(7, (9, 6), generator=draw)
    target[torch.rand(9, 6, generator=draw) < 0.4] = IGNORED
    pieces = list(zip(logits.split(parts), balance.split(parts), target.split(parts), strict=True))
    assert sum(count(t) for _, _, t in pieces) == count(target)
    sums = sum(float(cross_entropy(x, t)) for x, _, t in pieces)
    assert sums == pytest.approx(float(cross_entropy(logits, target)), rel=1e-14)
    sums = sum(float(balanced_cross_entropy((x, b), t, coefficient=0.3)) for x, b, t in pieces)
    assert sums == pytest.approx(float(balanced_cross_entropy((logits, balance), target, coefficient=0.3)), rel=1e-14)
