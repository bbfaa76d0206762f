"""The fused cross-entropy is torch's own, in float32 within a row, and its gradient takes the memory of the logits."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pipedejavu.runtime.fused_loss import BLOCK, can_fuse, fused_loss_


def rows(num: int, classes: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Returns bf16 logits with some infinite and far ones, targets of which one is ignored, and scales."""
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(num, classes, generator=generator)).bfloat16()
    logits[0, 1:] = -torch.inf
    logits[1, 0] = 300.0
    targets = torch.randint(0, classes, (num,), generator=generator)
    targets[0], targets[2] = 0, -100
    scales = torch.rand(num, generator=generator)
    return logits.to(device), targets.to(device), scales.to(device)


def expected(logits: Tensor, targets: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.double().cpu().requires_grad_()
    losses = cross_entropy(leaf, targets.cpu(), reduction="none")
    (gradient,) = torch.autograd.grad(losses, leaf, scales.double().cpu())
    return losses.detach(), gradient


def check(logits: Tensor, targets: Tensor, scales: Tensor) -> None:
    losses, gradient = expected(logits, targets, scales)
    kept = logits.clone()
    assert torch.equal(fused_loss_(kept, targets, None, -100), fused_loss_(logits, targets, scales, -100))
    assert torch.equal(kept, rows(*kept.shape)[0].to(kept.device))
    torch.testing.assert_close(fused_loss_(kept, targets, scales, -100).double().cpu(), losses, rtol=1e-5, atol=1e-5)
    # float32 arithmetic on a difference of logits of at most 300, then one rounding to bf16
    torch.testing.assert_close(logits.double().cpu(), gradient, rtol=2**-8 + 1e-4, atol=1e-7)


@pytest.mark.parametrize("classes", [2, 5, 1000])
def test_loss_and_gradient_are_those_of_cross_entropy(classes: int) -> None:
    check(*rows(7, classes))


def test_only_casts_of_16_bit_logits_are_fused() -> None:
    assert can_fuse(torch.bfloat16, is_plain=True, pointwise=())
    assert can_fuse(torch.float16, is_plain=True, pointwise=[Tensor.float])
    assert not can_fuse(torch.bfloat16, is_plain=True, pointwise=[torch.tanh])
    assert not can_fuse(torch.bfloat16, is_plain=True, pointwise=[lambda logits: logits * 2])
    assert not can_fuse(torch.bfloat16, is_plain=False, pointwise=())
    assert not can_fuse(torch.float32, is_plain=True, pointwise=())


def test_a_target_that_is_no_class_is_refused_on_a_cpu() -> None:
    logits, targets, scales = rows(4, 5)
    targets[3] = 5
    with pytest.raises(IndexError):
        fused_loss_(logits, targets, scales, -100)


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [5, BLOCK, 2 * BLOCK + 3])
def test_the_kernel_is_the_same(classes: int) -> None:
    check(*rows(9, classes, "cuda"))


@pytest.mark.gpu
def test_the_kernel_makes_a_loss_of_no_class_nan() -> None:
    logits, targets, scales = rows(4, 100, "cuda")
    targets[3] = 100
    losses = fused_loss_(logits, targets, scales, -100)
    assert losses.isnan().tolist() == [False, False, False, True]
    assert logits[3].isnan().all()
