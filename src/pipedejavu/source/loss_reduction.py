"""Detects how a loss reduces over a batch: a sum, or a mean over samples or over labels that are not ignored.

The losses of microbatches of any size add up to that of the batch only if each is a sum, so means are turned into sums
and their denominators counted separately. The reduction is detected by comparing the gradient of a few samples with the
gradients of two subsets of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedejavu.facts import InputError
from pipedejavu.facts.start_phase import START
from pipedejavu.health.failure import is_shortage
from pipedejavu.profile.model_trace import as_call
from pipedejavu.profile.sequential import is_chain, read_chain
from pipedejavu.runtime.deferred_head import DeferredHead
from pipedejavu.runtime.deferred_logits import HeadUse
from pipedejavu.source.probed_model import frozen_but, undisturbed
from pipedejavu.source.rng import drawn_since, seed_all
from pipedejavu.source.user_batch import UserBatch, count_samples, few_tokens

Loss = Callable[[Any, Any], Tensor]

_IGNORED = -100
_FIRST, _OTHERS = (0, 1), (2, 3, 4)
"""The two subsets of the probed samples; neither has one sample, because models may squeeze a batch of one."""
NUM_SAMPLES = len(_FIRST) + len(_OTHERS)
_NEAR = 0.01
"""Relative tolerance for equal gradients; wrong reductions differ by 0.1 or more."""
_CHUNKS = 64
"""Chunks of the head and its loss if memory is short."""
_FEW = 16
"""Tokens per sample that are probed first: how a loss is reduced does not depend on how many there are."""
_MOST_OBSERVED = 1_000_000
"""Elements of the gradient that are compared; taken from the last parameters, whose gradients cost the least."""


class Reduction(NamedTuple):
    """How a loss reduces over a microbatch."""

    kind: Literal["sum", "samples", "labels", "shifted"] = "sum"
    """A sum; a mean over samples; a mean over labels not ignored; or the same without the first label per row."""
    ignored: int = _IGNORED
    """The ignored label (`ignore_index`)."""

    def summed(self, loss: Loss) -> Loss:
        """Returns the loss as a sum, without synchronising the GPU; 0 if all labels are ignored (the mean is NaN)."""
        if self.kind == "sum":
            return loss

        def total(output: Any, targets: Any) -> Tensor:
            mean, weight = loss(output, targets), self._weight(targets)
            return mean * weight if isinstance(weight, int) else torch.where(weight > 0, mean * weight, 0.0)

        return total

    @property
    def counts_samples(self) -> bool:
        """Whether the denominator is the number of samples."""
        return self.kind in ("sum", "samples")

    def count(self, targets: Any) -> int:
        """Returns the denominator: samples, or labels that are not ignored."""
        return count_samples(targets) if self.kind == "sum" else int(self._weight(targets))

    def _weight(self, targets: Any) -> int | Tensor:
        if self.counts_samples:
            return count_samples(targets)
        (labels,) = _labels_in(targets)
        return (labels[:, 1:] if self.kind == "shifted" else labels).ne(self.ignored).sum()


def own_loss(output: Any, targets: Any) -> Tensor:  # noqa: ARG001
    """Returns the loss from the output of a model that computes it itself."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    loss = loss[0] if isinstance(loss, tuple) else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise InputError(
            "the model computes no loss of its own: its output is no number and has none called 'loss'; give a loss, or"
            " give the model its labels"
        )
    return loss.reshape(())


def find_reduction(model: nn.Module, loss: Loss, readings: Iterable[UserBatch]) -> tuple[Reduction, UserBatch]:
    """Returns the reduction of a loss, and the first interpretation of the batch that works.

    Raises InputError for a loss that is neither a sum nor a mean, or that has trainable parameters; errors of the model
    or the loss pass through. The model is unchanged afterwards.
    """
    _check_own(loss)
    failure: Exception | None = None
    with START.phase("probe"), undisturbed(model):
        for reading in readings:
            try:
                return _find_quickly(model, loss, reading), reading
            except Exception as error:  # a wrong interpretation may raise anything
                failure = failure or error
    assert failure is not None
    raise failure


def _find_quickly(model: nn.Module, loss: Loss, batch: UserBatch) -> Reduction:
    """Returns the reduction, from a few tokens per sample if they tell it."""
    short = few_tokens(batch, _FEW, _ignored_by(loss))
    if short is not None:
        with suppress(Exception):  # a model may need its full length
            return _Probe(model, loss, short).reduction()
    return _find_within_memory(_Probe(model, loss, batch))


def _find_within_memory(probe: "_Probe") -> Reduction:
    """Returns the reduction; if the logits of all samples do not fit, they are computed in chunks."""
    try:
        return probe.reduction()
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
    if probe.device.type == "cuda":
        torch.cuda.empty_cache()
    probe.is_chunked = True
    return probe.reduction()


class _Probe:
    """Compares the gradient of a few samples with the gradients of two subsets."""

    def __init__(self, model: nn.Module, loss: Loss, batch: UserBatch):
        self.model, self.loss, self.batch = model, loss, batch
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise InputError("no parameter of the model requires a gradient; call requires_grad_() on what is trained")
        self.device = self.parameters[0].device
        self.ignored = _ignored_by(loss)
        self.is_chunked = False
        """Whether the logits of a head and their loss are computed in chunks of tokens."""
        self._fixed: Any = None
        """The output to take subsets of, if the model returns a different one on each call."""

    def reduction(self) -> Reduction:
        """Returns the first reduction that explains the gradients, for the samples' targets and for modified ones."""
        rows = self.batch.rows([n % self.batch.size for n in (*_FIRST, *_OTHERS)])
        rows = replace(rows, inputs=self._here(rows.inputs), targets=self._here(rows.targets))
        self._check_alone(rows)
        if not self._repeats(rows):
            self._fixed = pytree.tree_map_only(Tensor, _as_leaf, self._output(rows))
        compared = [(rows.targets, self._gradients(rows))]
        if not compared[0][1][0].norm() > 0:
            raise InputError(
                "the gradient of the sample's first samples is 0 or no number, which does not tell whether the loss is"
                " a sum or a mean; give a sample that the model learns from"
            )
        for targets in self._other_targets(rows):
            with suppress(Exception):  # the loss may reject modified targets
                gradients = self._gradients(_with_targets(rows, targets))
                if all(gradient.isfinite().all() for gradient in gradients) and gradients[0].norm() > 0:
                    compared.append((targets, gradients))
        kinds: tuple[Any, ...] = ("sum", "samples")
        labels = _labels_in(rows.targets)
        if len(labels) == 1:
            kinds += ("labels", "shifted") if labels[0].ndim > 1 else ("labels",)
        for kind in kinds:
            reduction = Reduction(kind, self.ignored)
            if all(_holds(reduction, targets, gradients) for targets, gradients in compared):
                return reduction
        raise InputError(
            "the loss is neither a sum nor a mean over samples or over labels that count: the gradient of"
            f" {rows.size} samples is neither of those of the first {len(_FIRST)} and of the other {len(_OTHERS)};"
            " return a sum over samples (reduction='sum'), and let neither the loss nor the model make one sample's"
            " part depend on the others, which would differ from microbatch to microbatch"
        )

    def _other_targets(self, rows: UserBatch) -> Iterator[Any]:
        """Yields modified targets for which the possible reductions differ."""
        labels = _labels_in(rows.targets)
        if len(labels) == 1:
            known = _labels_in(self.batch.targets)[0]
            valid = known[known != self.ignored]
            if len(valid):
                # With class weights, subsets of one class each have different denominators.
                extremes = labels[0].clone()
                extremes[[*_FIRST]], extremes[[*_OTHERS]] = valid.min().to(self.device), valid.max().to(self.device)
                yield _with_labels(rows.targets, extremes)
                # The first subset has two labels that count (one without the first position), the other two in either
                # case. The sample's own labels at these positions may all be ignored, as those of a prompt are.
                few = torch.full_like(labels[0], self.ignored)
                first, other, label = _FIRST[0], _OTHERS[0], valid[0].to(self.device)
                if few.ndim == 1:
                    few[first], few[other] = label, label
                else:
                    few[first, :2], few[other, 1:3] = label, label
                yield _with_labels(rows.targets, few)
        if len(pytree.tree_leaves(rows.targets)) > 1:  # one of them may be a mask, or weights of samples
            without = torch.tensor([n != _FIRST[-1] for n in range(rows.size)], device=self.device)

            def thinned(leaf: Tensor) -> Tensor:
                return leaf * without.view(-1, *(1,) * (leaf.ndim - 1)).to(leaf.dtype)

            yield pytree.tree_map_only(Tensor, thinned, rows.targets)

    def _gradients(self, rows: UserBatch) -> list[Tensor]:
        """Returns the gradient of all samples and of each subset."""
        if self._fixed is not None:
            return [self._gradient_of_output(rows, indices) for indices in ((*_FIRST, *_OTHERS), _FIRST, _OTHERS)]
        return [self._gradient(part) for part in (rows, rows.rows(_FIRST), rows.rows(_OTHERS))]

    def _repeats(self, rows: UserBatch) -> bool:
        """Whether two calls return the same output; a model that counts calls or draws in Python fails this."""
        if self.loss is own_loss:
            return True
        seed_all(0)
        with torch.no_grad():
            first, second = (pytree.tree_leaves(self._output(rows)) for _ in range(2))
        pairs = zip(first, second, strict=True)
        is_same = all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
        return is_same and not drawn_since(0)

    def _gradient_of_output(self, rows: UserBatch, indices: Sequence[int]) -> Tensor:
        """Returns the gradient of some samples with respect to the fixed output, which has a row per sample."""

        def some(leaf: Tensor) -> Tensor:
            return leaf[[*indices]] if leaf.ndim and len(leaf) == rows.size else leaf

        output = pytree.tree_map_only(Tensor, some, self._fixed)
        loss = self.loss(output, rows.rows(indices).targets)
        leaves = [t for t in pytree.tree_leaves(self._fixed) if isinstance(t, Tensor) and t.requires_grad]
        gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
        pairs = zip(gradients, leaves, strict=True)
        return torch.cat([(torch.zeros_like(t) if g is None else g).flatten() for g, t in pairs])

    def _gradient(self, rows: UserBatch) -> Tensor:
        """Returns the gradient with respect to the last parameters; to all, if the loss does not depend on the last."""
        gradient = self._gradient_of(rows, self._last_parameters())
        if gradient is None or not gradient.any():
            gradient = self._gradient_of(rows, self.parameters)
        if gradient is None:
            raise InputError("the loss has no gradient: it does not depend on what the model returns")
        return gradient

    def _last_parameters(self) -> list[nn.Parameter]:
        count, last = 0, list[nn.Parameter]()
        for parameter in reversed(self.parameters):
            if count >= _MOST_OBSERVED:
                break
            last.append(parameter)
            count += parameter.numel()
        return last

    def _gradient_of(self, rows: UserBatch, observed: Sequence[nn.Parameter]) -> Tensor | None:
        """Returns the gradient with respect to some parameters, the only ones for which activations are saved."""
        with frozen_but(observed, self.parameters):
            loss = self.loss(self._output(rows), rows.targets)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                form = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise InputError(f"the loss returns {form}; return one number, a sum or a mean over samples")
            if not loss.requires_grad:
                return None
            gradients = torch.autograd.grad(loss.sum(), observed, allow_unused=True)
        pairs = zip(gradients, observed, strict=True)
        return torch.cat([torch.zeros_like(p).flatten() if g is None else g.to_dense().flatten() for g, p in pairs])

    def _output(self, rows: UserBatch) -> Any:
        inputs = pytree.tree_map_only(Tensor, torch.clone, rows.inputs)  # a model may change its inputs in place
        with DeferredHead(HeadUse(num_chunks=_CHUNKS)) if self.is_chunked else nullcontext():
            if is_chain(self.model):
                for _, unit in read_chain(self.model):
                    inputs = unit(inputs)
                return inputs
            args, kwargs = as_call(inputs)
            return self.model(*args, **kwargs)

    def _check_alone(self, rows: UserBatch) -> None:
        """Raises InputError for a loss that requires a gradient even when the model's output does not."""
        if self.loss is own_loss:
            return
        with torch.no_grad():
            output = self._output(rows)
        loss = self.loss(output, rows.targets)
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            return
        names = {id(parameter): f"the model's '{name}'" for name, parameter in self.model.named_parameters()}
        tensor = _leaves_of(loss)[0]
        what = names.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)} that is not the model's")
        raise InputError(
            f"the loss depends on {what} beside the model's output, and no gradient would reach it from there; compute"
            " it in the model's forward and give loss=None, or use the optimizer's weight_decay for a penalty"
        )

    def _here(self, tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), tree)


def _ignored_by(loss: Loss) -> int:
    """Returns the label that a loss ignores, from its `ignore_index` or that of a partial function."""
    keywords = getattr(loss, "keywords", {})
    ignored = keywords.get("ignore_index", getattr(loss, "ignore_index", _IGNORED))
    return ignored if isinstance(ignored, int) else _IGNORED


def _check_own(loss: Loss) -> None:
    if isinstance(loss, nn.Module):
        names = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
        if names:
            raise InputError(
                f"the loss is a {type(loss).__name__} with parameters of its own ('{names[0]}'), which would not be"
                " trained; compute it in the model's forward and give loss=None, or freeze them"
            )


def _leaves_of(loss: Tensor) -> Sequence[Tensor]:
    """Returns the leaf tensors of an autograd graph."""
    leaves, seen, left = [], set(), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        left += [following for following, _ in node.next_functions]
    return leaves


def _labels_in(targets: Any) -> list[Tensor]:
    """Returns the integer tensors of the targets."""
    leaves = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor)]
    return [
        leaf for leaf in leaves if not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool
    ]


def _with_labels(targets: Any, labels: Tensor) -> Any:
    (old,) = _labels_in(targets)
    return pytree.tree_map(lambda leaf: labels if leaf is old else leaf, targets)


def _with_targets(rows: UserBatch, targets: Any) -> UserBatch:
    """Returns samples with other targets, also among the inputs if the model computes the loss."""
    has_labels = isinstance(rows.inputs, dict) and isinstance(rows.inputs.get("labels"), Tensor)
    if has_labels and isinstance(targets, Tensor) and torch.equal(rows.inputs["labels"], rows.targets):
        return replace(rows, inputs={**rows.inputs, "labels": targets}, targets=targets)
    return replace(rows, targets=targets)


def _holds(reduction: Reduction, targets: Any, gradients: Sequence[Tensor]) -> bool:
    """Whether the gradient of all samples is the weighted sum of the subsets' gradients under a reduction."""
    whole, *parts = gradients
    subsets = (slice(0, len(_FIRST)), slice(len(_FIRST), None))
    weights = [1.0, 1.0]
    if reduction.kind != "sum":
        counts = [reduction.count(_rows_of(targets, subset)) for subset in subsets]
        weights = [count / max(1, sum(counts)) for count in counts]
    expected = sum((weight * part for weight, part in zip(weights, parts, strict=True)), torch.zeros_like(whole))
    return bool((whole - expected).norm() <= _NEAR * whole.norm())


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _rows_of(targets: Any, rows: slice) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[rows], targets)
