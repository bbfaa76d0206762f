"""The loss of a head in chunks of tokens, and its gradients, are those of all tokens at once."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from pipedejavu.runtime.chunked_loss import LossSettings, bytes_per_logit, chunked_cross_entropy

TOKENS, WIDTH, WORDS = 23, 6, 17
CHUNKS = (1, 4, 23, 100)


def tensors(dtype: torch.dtype, *, has_bias: bool = True, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(TOKENS, WIDTH), (WORDS, WIDTH)] + [(WORDS,)] * has_bias
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_() for shape in shapes]


def labels() -> Tensor:
    targets = torch.arange(TOKENS) * 7 % WORDS
    targets[[0, 1, 9]] = -100
    return targets


def run(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    loss.sum().mul(1.7).backward()
    gradients = [leaf.grad for leaf in leaves]
    return [loss.detach(), *[g for g in gradients if g is not None]]


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_reduction_equals_that_of_all_tokens(
    reduction: str, is_weighted: bool, smoothing: float, is_early: bool
) -> None:
    weights = torch.linspace(0.5, 2.0, WORDS, dtype=torch.float64) if is_weighted else None
    settings = LossSettings(-100, reduction, smoothing)

    def cap(logits: Tensor) -> Tensor:
        return torch.tanh(logits / 3.0) * 3.0

    hidden, weight, bias = leaves = tensors(torch.float64)
    whole = cross_entropy(
        cap(linear(hidden, weight, bias)), labels(), weights, reduction=reduction, label_smoothing=smoothing
    )
    expected = run(whole, leaves)
    for chunks in CHUNKS:
        hidden, weight, bias = leaves = tensors(torch.float64)
        loss = chunked_cross_entropy(
            hidden, weight, bias, labels(), weights,
            num_chunks=chunks, settings=settings, pointwise=[cap], is_early=is_early,
        )  # fmt: skip
        for one, other in zip(run(loss, leaves), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_losses_of_tokens_have_the_same_bits() -> None:
    hidden, weight = tensors(torch.float64, has_bias=False)
    whole = cross_entropy(hidden @ weight.t(), labels(), reduction="none")
    settings = LossSettings(reduction="none")
    one = chunked_cross_entropy(hidden, weight, None, labels(), num_chunks=1, settings=settings)
    assert torch.equal(one, whole)


def test_low_precision_sums_weight_gradients_in_float32() -> None:
    expected: list[list[Tensor]] = []
    for dtype in (torch.float64, torch.bfloat16):
        hidden, weight = leaves = tensors(dtype, has_bias=False)
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(leaf.to(torch.bfloat16))
        loss = chunked_cross_entropy(hidden, weight, None, labels(), num_chunks=8, pointwise=[Tensor.double])
        expected.append(run(loss, leaves))
    for exact, low in zip(*expected, strict=True):
        # Logits of at most 2^3 are rounded to 8 bits, and so is each chunk's product.
        assert (exact - low.double()).abs().max() <= 2**-5 * exact.abs().max()


def test_frozen_weights_get_no_gradient_and_evaluation_keeps_nothing() -> None:
    hidden, weight = tensors(torch.float64, has_bias=False)
    weight.requires_grad_(False)
    chunked_cross_entropy(hidden, weight, None, labels(), num_chunks=3).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        assert chunked_cross_entropy(hidden, weight, None, labels(), num_chunks=3).grad_fn is None


def test_labels_that_all_do_not_count() -> None:
    hidden, weight = tensors(torch.float64, has_bias=False)
    ignored = torch.full((TOKENS,), -100)
    assert chunked_cross_entropy(hidden, weight, None, ignored, num_chunks=3).isnan()
    loss = chunked_cross_entropy(hidden, weight, None, ignored, num_chunks=3, settings=LossSettings(reduction="sum"))
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()  # type: ignore[union-attr]


def test_a_label_that_is_no_class_is_refused() -> None:
    hidden, weight = tensors(torch.float64, has_bias=False)
    with pytest.raises(IndexError, match="out of bounds"):
        chunked_cross_entropy(hidden, weight, None, labels().clamp_min(0) + WORDS, num_chunks=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_early", [True, False])
def test_the_peak_on_a_gpu_follows_the_formula(is_early: bool, smoothing: float) -> None:
    settings = LossSettings(label_smoothing=smoothing)  # a loss with smoothed labels is not fused
    tokens, words, width, itemsize = 4096, 32_000, 1024, 2
    peaks = {}
    for chunks in (1, 16):
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(words, width, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
        targets = torch.randint(0, words, (tokens,), device="cuda")

        def step(hidden: Tensor = hidden, weight: Tensor = weight, chunks: int = chunks, t: Tensor = targets) -> None:
            chunked_cross_entropy(
                hidden, weight, None, t,
                num_chunks=chunks, settings=settings, pointwise=[Tensor.float], is_early=is_early,
            ).backward()  # fmt: skip
            hidden.grad = weight.grad = None

        step()  # workspaces of the libraries
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peaks[chunks] = torch.cuda.max_memory_allocated() - before
    # A chunk's formula bounds it from above; the copy that `float()` makes is among its gradients' bytes.
    per_logit = bytes_per_logit(itemsize) + 4 if smoothing else itemsize
    fixed = words * width * (4 + 2 * itemsize) + tokens * width * 2 * itemsize
    for chunks, peak in peaks.items():
        assert peak <= 1.1 * (tokens // chunks * words * per_logit + fixed)
    if smoothing:
        assert peaks[1] - peaks[16] >= tokens * (1 - 1 / 16) * words * (itemsize + 8) - fixed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float32_on_a_gpu_equals_all_tokens_at_once() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    hidden, weight, bias = leaves = tensors(torch.float32, device="cuda")
    expected = run(cross_entropy(linear(hidden, weight, bias), labels().cuda()), leaves)
    for is_early in (True, False):
        hidden, weight, bias = leaves = tensors(torch.float32, device="cuda")
        loss = chunked_cross_entropy(hidden, weight, bias, labels().cuda(), num_chunks=4, is_early=is_early)
        for one, other in zip(run(loss, leaves), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
