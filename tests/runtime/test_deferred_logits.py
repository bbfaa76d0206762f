"""A program on deferred logits computes what it computes on ordinary ones; usual losses never compute all logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from pipedejavu.runtime.deferred_head import DeferredHead
from pipedejavu.runtime.deferred_logits import DeferredLogits, HeadUse

V = 19
Loss = Callable[[Tensor, Tensor], Tensor]


class Cube(torch.autograd.Function):
    """An operation that bypasses `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def changed_after_a_view(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits.view(-1, V)
    logits.div_(2)
    return cross_entropy(rows, targets.view(-1))


def changed_after_a_product(logits: Tensor, targets: Tensor) -> Tensor:
    twice = logits * 2
    logits.div_(2)
    return cross_entropy(twice.view(-1, V), targets.view(-1)) + logits.sum()


CHUNKED: dict[str, Loss] = {
    "view": lambda x, t: cross_entropy(x.view(-1, V), t.view(-1)),
    "float": lambda x, t: cross_entropy(x.double().float().flatten(0, 1), t.flatten(), reduction="sum"),
    "to": lambda x, t: cross_entropy(x.to(torch.float64, copy=False).reshape(-1, V), t.reshape(-1)),
    "transposed": lambda x, t: cross_entropy(x.transpose(1, 2), t),
    "permuted": lambda x, t: cross_entropy(x.permute(0, 2, 1), t, reduction="none"),
    "shifted": lambda x, t: cross_entropy(x[..., :-1, :].contiguous().view(-1, V), t[..., 1:].reshape(-1)),
    "sliced": lambda x, t: cross_entropy(x[:, 1:].reshape(-1, V), t[:, 1:].reshape(-1)),
    "masked": lambda x, t: cross_entropy(x[t >= 0], t[t >= 0]),
    "one row": lambda x, t: cross_entropy(x[1], t[1]),
    "module": lambda x, t: nn.CrossEntropyLoss(label_smoothing=0.1)(x.view(-1, V), t.view(-1)),
    "capped": lambda x, t: cross_entropy((torch.tanh(x / 30.0) * 30).view(-1, V), t.view(-1)),
    "scaled": lambda x, t: cross_entropy((0.5 * x).view(-1, V), t.view(-1).clamp_min(0), ignore_index=0),
    "names": lambda x, t: cross_entropy(input=x.view(-1, V), target=t.view(-1)),
    "aten": lambda x, t: torch.ops.aten.cross_entropy_loss.default(
        torch.ops.aten.view.default(torch.ops.aten.to.dtype(x, torch.float64), [-1, V]), t.view(-1)
    ),
}
COMPUTED: dict[str, Loss] = {
    "z-loss": lambda x, t: cross_entropy(x.view(-1, V), t.view(-1)) + torch.logsumexp(x, -1).square().mean(),
    "log-softmax": lambda x, t: functional.nll_loss(x.log_softmax(-1).view(-1, V), t.view(-1)),
    "probabilities": lambda x, t: cross_entropy(x.view(-1, V), functional.one_hot(t.clamp_min(0).view(-1), V).double()),
    "part": lambda x, t: cross_entropy(x[..., :5].reshape(-1, 5), t.view(-1).clamp(0, 4)),
    "to another": lambda x, t: cross_entropy(x.to(x.new_zeros(2)).view(-1, V), t.view(-1)),
    "product of both": lambda x, t: cross_entropy((x * x).view(-1, V), t.view(-1)),
    "gathered": lambda x, t: -x.gather(-1, t.clamp_min(0)[..., None]).mean(),
    "own function": lambda x, t: cross_entropy(Cube.apply(x * 0.1).view(-1, V), t.view(-1)),  # type: ignore[no-untyped-call]
    "view, then in place": changed_after_a_view,
    "product, then in place": changed_after_a_product,
    "class second by accident": lambda x, t: cross_entropy(x[:, :, :], t[:, :1].expand(-1, V).clamp(0, 6)),
}


def run(loss: Loss, use: HeadUse | None) -> list[Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(5, V, dtype=torch.float64)
    targets = torch.randint(0, V, (3, 7))
    targets[0, :3] = -100
    if use is None:
        logits = head(hidden)
    else:
        with DeferredHead(use):
            logits = head(hidden)
        assert isinstance(logits, DeferredLogits)
        assert (logits.shape, logits.dtype, logits.requires_grad) == ((3, 7, V), torch.float64, True)
    value = loss(logits, targets)
    value.sum().mul(1.5).backward()
    gradients = [hidden.grad, head.weight.grad, head.bias.grad]
    return [value.detach(), *[g for g in gradients if g is not None]]


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("name", [*CHUNKED, *COMPUTED])
def test_programs_compute_the_same(name: str, is_early: bool) -> None:
    loss = (CHUNKED | COMPUTED)[name]
    expected = run(loss, None)
    rtol = 1e-5 if name == "float" else 1e-12
    for chunks in (1, 4):
        use = HeadUse(chunks, is_early=is_early)
        for one, other in zip(run(loss, use), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)
        assert bool(use.reads) == (name in COMPUTED)
        assert use.num_losses == (name in CHUNKED or name == "z-loss")


@pytest.mark.parametrize("name", CHUNKED)
def test_usual_losses_never_make_all_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: DeferredLogits) -> Tensor:
        raise AssertionError("all logits are computed")

    monkeypatch.setattr(DeferredLogits, "compute", fail)
    run(CHUNKED[name], HeadUse(4))


def test_autocast_rounds_as_it_does_without_chunks() -> None:
    results = []
    for use in (None, HeadUse(1), HeadUse(4), HeadUse(4, is_early=False)):
        torch.manual_seed(0)
        hidden, head = torch.randn(12, 8, requires_grad=True), nn.Linear(8, V)
        with torch.autocast("cpu", torch.bfloat16):
            if use is None:
                logits = head(hidden)
            else:
                with DeferredHead(use):
                    logits = head(hidden)
            assert logits.dtype == torch.bfloat16
            loss = cross_entropy(logits.float(), torch.arange(12))
        loss.backward()
        assert head.weight.grad is not None
        results.append((loss.detach(), head.weight.grad))
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=0)
        # The gradient of the logits is rounded to bfloat16, and so is each chunk's product.
        torch.testing.assert_close(gradient, results[0][1], rtol=2**-6, atol=2**-8 * float(gradient.abs().max()))


def test_logits_that_are_read_too_late_are_refused() -> None:
    head, use = nn.Linear(4, V), HeadUse(4)
    with DeferredHead(use):
        logits = head(torch.randn(6, 4))
    cross_entropy(logits, torch.arange(6)).backward()
    with torch.no_grad():
        head.weight.sub_(0.1)
    text = "the 19 logits per token of a head that runs in chunks are computed only when they are read, and the head's"
    with pytest.raises(RuntimeError, match=text):
        logits.argmax(-1)


def test_a_detached_copy_and_evaluation_compute_nothing() -> None:
    head, use = nn.Linear(4, V), HeadUse(4)
    with torch.no_grad(), DeferredHead(use):
        logits = head(torch.randn(6, 4))
    assert not logits.requires_grad
    copy = logits.detach()
    assert isinstance(copy, DeferredLogits)
    assert not use.reads
    assert torch.equal(copy.argmax(-1), logits.compute().argmax(-1))
