"""What a loss makes of the losses of its samples: their sum, or a mean over samples or over labels that count.

Microbatches of any size add up to what the whole batch gives if each of them has the sum, and what means are over is
counted beside it. Which of them a loss is follows from the gradients of a few samples and of two parts of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pipedejavu.facts import InputError
from pipedejavu.profile.model_trace import as_call
from pipedejavu.profile.sequential import is_chain, read_chain
from pipedejavu.source.rng import drawn_since, own_randomness, seed_all
from pipedejavu.source.user_batch import UserBatch, count_samples

Loss = Callable[[Any, Any], Tensor]

_IGNORED = -100
_FIRST, _OTHERS = (0, 1), (2, 3, 4)
"""Both parts of the samples that are looked at; a batch of one may be squeezed away."""
NUM_SAMPLES = len(_FIRST) + len(_OTHERS)
_NEAR = 0.01
"""How far gradients that should be equal may be apart, as a part of them; what is confused otherwise is 0.1 apart."""
_DRAWS = frozenset(
    ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "rand", "randint", "randn", "random")
)
_DRAWS |= {"uniform", *(f"{name}_" for name in _DRAWS | {"uniform"}), *(f"{name}_like" for name in _DRAWS)}
"""Functions that draw random numbers, by name; some work in place."""
_MOST_OBSERVED = 1_000_000
"""Elements of a gradient that are looked at, those of the last parameters, which take the least to compute."""


class Reduction(NamedTuple):
    """How a loss is reduced over a microbatch."""

    kind: Literal["sum", "samples", "labels", "shifted"] = "sum"
    """A sum; or a mean over samples, over labels that count, or over those of them that are not the first of a row."""
    ignored: int = _IGNORED
    """The label that does not count."""

    def summed(self, loss: Loss) -> Loss:
        """Returns a loss as a sum, without waiting for a GPU; if no label counts, a mean is no number and the sum 0."""
        if self.kind == "sum":
            return loss

        def total(output: Any, targets: Any) -> Tensor:
            mean, weight = loss(output, targets), self._weight(targets)
            return mean * weight if isinstance(weight, int) else torch.where(weight > 0, mean * weight, 0.0)

        return total

    @property
    def counts_samples(self) -> bool:
        """Whether every sample counts once."""
        return self.kind in ("sum", "samples")

    def count(self, targets: Any) -> int:
        """Returns what the sums of microbatches are divided by together."""
        return count_samples(targets) if self.kind == "sum" else int(self._weight(targets))

    def _weight(self, targets: Any) -> int | Tensor:
        if self.counts_samples:
            return count_samples(targets)
        (labels,) = _labels_in(targets)
        return (labels[:, 1:] if self.kind == "shifted" else labels).ne(self.ignored).sum()


def own_loss(output: Any, targets: Any) -> Tensor:  # noqa: ARG001
    """Returns the loss that a model itself computes."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    found = found[0] if isinstance(found, tuple) else found
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise InputError(
            "the model computes no loss of its own: its output is no number and has none called 'loss'; give a loss, or"
            " give the model its labels"
        )
    return found.reshape(())


def find_reduction(model: nn.Module, loss: Loss, readings: Iterable[UserBatch]) -> tuple[Reduction, UserBatch]:
    """Finds out how a loss is reduced, and which of the readings of a batch is the one that is meant.

    Raises InputError for a loss that is neither a sum nor a mean, or that trains parameters of its own; and what the
    model or the loss raises. The model stays as it is.
    """
    _check_own(loss)
    failure: Exception | None = None
    with _undisturbed(model):
        for reading in readings:
            try:
                return _Probe(model, loss, reading).reduction(), reading
            except Exception as error:  # whatever a model makes of inputs that are not meant so
                failure = failure or error
    assert failure is not None
    raise failure


class _Probe:
    """A few samples, whose gradients are compared with those of their parts."""

    def __init__(self, model: nn.Module, loss: Loss, batch: UserBatch):
        self.model, self.loss, self.batch = model, loss, batch
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise InputError("no parameter of the model requires a gradient; call requires_grad_() on what is trained")
        self.device = self.parameters[0].device
        keywords = getattr(loss, "keywords", {})
        found = keywords.get("ignore_index", getattr(loss, "ignore_index", _IGNORED))
        self.ignored = found if isinstance(found, int) else _IGNORED
        self._fixed: Any = None
        """The output that parts are taken of, if the model makes another one each time."""

    def reduction(self) -> Reduction:
        """Returns the first that holds for the samples, and for the same samples with other targets."""
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
            with suppress(Exception):  # targets that the loss does not take are not to come
                gradients = self._gradients(_with_targets(rows, targets))
                if all(gradient.isfinite().all() for gradient in gradients):
                    compared.append((targets, gradients))
        kinds: tuple[Any, ...] = ("sum", "samples")
        labels = _labels_in(rows.targets)
        if len(labels) == 1:
            kinds += ("labels", "shifted") if labels[0].ndim > 1 else ("labels",)
        for kind in kinds:
            found = Reduction(kind, self.ignored)
            if all(_holds(found, targets, gradients) for targets, gradients in compared):
                return found
        raise InputError(
            "the loss is neither a sum nor a mean over samples or over labels that count: the gradient of"
            f" {rows.size} samples is neither of those of the first {len(_FIRST)} and of the other {len(_OTHERS)};"
            " return a sum over samples (reduction='sum'), and let neither the loss nor the model make one sample's"
            " part depend on the others, which would differ from microbatch to microbatch"
        )

    def _other_targets(self, rows: UserBatch) -> Iterator[Any]:
        """Yields targets that tell apart what a mean may be over."""
        labels = _labels_in(rows.targets)
        if len(labels) == 1:
            known = _labels_in(self.batch.targets)[0]
            valid = known[known != self.ignored]
            if len(valid):
                # If classes have weights of their own, parts of one class each differ.
                extremes = labels[0].clone()
                extremes[[*_FIRST]], extremes[[*_OTHERS]] = valid.min().to(self.device), valid.max().to(self.device)
                yield _with_labels(rows.targets, extremes)
            # Of the first part two labels count, or one behind the first place; of the others two in either way.
            few = torch.full_like(labels[0], self.ignored)
            first, other = _FIRST[0], _OTHERS[0]
            if few.ndim == 1:
                few[first], few[other] = labels[0][first], labels[0][other]
            else:
                few[first, :2], few[other, 1:3] = labels[0][first, :2], labels[0][other, 1:3]
            yield _with_labels(rows.targets, few)
        if len(pytree.tree_leaves(rows.targets)) > 1:  # one of them may be a mask, or weights of samples
            without = torch.tensor([n != _FIRST[-1] for n in range(rows.size)], device=self.device)

            def thinned(leaf: Tensor) -> Tensor:
                return leaf * without.view(-1, *(1,) * (leaf.ndim - 1)).to(leaf.dtype)

            yield pytree.tree_map_only(Tensor, thinned, rows.targets)

    def _gradients(self, rows: UserBatch) -> list[Tensor]:
        """Returns the gradients of some samples and of both parts of them."""
        if self._fixed is not None:
            return [self._gradient_of_output(rows, place) for place in ((*_FIRST, *_OTHERS), _FIRST, _OTHERS)]
        return [self._gradient(part) for part in (rows, rows.rows(_FIRST), rows.rows(_OTHERS))]

    def _repeats(self, rows: UserBatch) -> bool:
        """Whether the same samples give the same output twice; one that counts calls or draws in Python does not."""
        if self.loss is own_loss:
            return True
        seed_all(0)
        with torch.no_grad():
            first, second = (pytree.tree_leaves(self._output(rows)) for _ in range(2))
        pairs = zip(first, second, strict=True)
        is_same = all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
        return is_same and not drawn_since(0)

    def _gradient_of_output(self, rows: UserBatch, place: Sequence[int]) -> Tensor:
        """Returns the gradient of some samples by the fixed output, whose tensors have a row per sample."""

        def some(leaf: Tensor) -> Tensor:
            return leaf[[*place]] if leaf.ndim and len(leaf) == rows.size else leaf

        output = pytree.tree_map_only(Tensor, some, self._fixed)
        loss = self.loss(output, rows.rows(place).targets)
        leaves = [t for t in pytree.tree_leaves(self._fixed) if isinstance(t, Tensor) and t.requires_grad]
        found = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
        pairs = zip(found, leaves, strict=True)
        return torch.cat([(torch.zeros_like(t) if g is None else g).flatten() for g, t in pairs])

    def _gradient(self, rows: UserBatch) -> Tensor:
        loss = self.loss(self._output(rows), rows.targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            form = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the loss returns {form}; return one number, a sum or a mean over samples")
        if not loss.requires_grad:
            raise InputError("the loss has no gradient: it does not depend on what the model returns")
        observed: list[nn.Parameter] = []
        while sum(p.numel() for p in observed) < _MOST_OBSERVED and len(observed) < len(self.parameters):
            observed.append(self.parameters[-1 - len(observed)])
        found = torch.autograd.grad(loss.sum(), observed, allow_unused=True, retain_graph=True)
        if all(gradient is None or not gradient.any() for gradient in found):
            observed = self.parameters
            found = torch.autograd.grad(loss.sum(), observed, allow_unused=True)
        pairs = zip(found, observed, strict=True)
        return torch.cat([torch.zeros_like(p).flatten() if g is None else g.to_dense().flatten() for g, p in pairs])

    def _output(self, rows: UserBatch) -> Any:
        inputs = pytree.tree_map_only(Tensor, torch.clone, rows.inputs)  # which a model may change in place
        if is_chain(self.model):
            for _, unit in read_chain(self.model):
                inputs = unit(inputs)
            return inputs
        args, kwargs = as_call(inputs)
        return self.model(*args, **kwargs)

    def _check_alone(self, rows: UserBatch) -> None:
        """Raises InputError for a loss that has a gradient without the model's output."""
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


def _check_own(loss: Loss) -> None:
    if isinstance(loss, nn.Module):
        names = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
        if names:
            raise InputError(
                f"the loss is a {type(loss).__name__} with parameters of its own ('{names[0]}'), which would not be"
                " trained; compute it in the model's forward and give loss=None, or freeze them"
            )


def _leaves_of(loss: Tensor) -> Sequence[Tensor]:
    """Returns the leaves of a graph."""
    found, seen, left = [], set(), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        left += [following for following, _ in node.next_functions]
    return found


def _labels_in(targets: Any) -> list[Tensor]:
    """Returns the tensors of whole numbers."""
    leaves = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, Tensor)]
    return [
        leaf for leaf in leaves if not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype != torch.bool
    ]


def _with_labels(targets: Any, labels: Tensor) -> Any:
    (own,) = _labels_in(targets)
    return pytree.tree_map(lambda leaf: labels if leaf is own else leaf, targets)


def _with_targets(rows: UserBatch, targets: Any) -> UserBatch:
    """Returns samples with other targets; a model that computes its own loss has them among its inputs."""
    is_given = isinstance(rows.inputs, dict) and isinstance(rows.inputs.get("labels"), Tensor)
    if is_given and isinstance(targets, Tensor) and torch.equal(rows.inputs["labels"], rows.targets):
        return replace(rows, inputs={**rows.inputs, "labels": targets}, targets=targets)
    return replace(rows, targets=targets)


def _holds(reduction: Reduction, targets: Any, gradients: Sequence[Tensor]) -> bool:
    """Whether the gradient of all is that of the parts, each with its weight."""
    whole, *parts = gradients
    places = (slice(0, len(_FIRST)), slice(len(_FIRST), None))
    weights = [1.0, 1.0]
    if reduction.kind != "sum":
        counts = [reduction.count(_rows_of(targets, place)) for place in places]
        weights = [count / max(1, sum(counts)) for count in counts]
    expected = sum((weight * part for weight, part in zip(weights, parts, strict=True)), torch.zeros_like(whole))
    return bool((whole - expected).norm() <= _NEAR * whole.norm())


class _Fixed(TorchFunctionMode):
    """Draws one and the same number everywhere, so that a sample gets the same in any batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets everything happen, and replaces what was drawn."""
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _DRAWS and isinstance(found, Tensor):
            least = args[0] if len(args) > 1 and isinstance(args[1], int) else (kwargs or {}).get("low", 0)
            with torch.no_grad():
                found.fill_(0.5 if found.is_floating_point() else least)
        return found


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _rows_of(targets: Any, place: slice) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[place], targets)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Lets a model run without dropout and batch statistics, and leaves it and torch's generators as they were."""
    modes = [(part, part.training) for part in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    model.eval()
    try:
        with ExitStack() as stack:
            stack.enter_context(own_randomness(next(iter(devices), torch.device("cpu"))))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # whose RNNs have no backward in evaluation
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_Fixed())
            yield
    finally:
        for part, training in modes:
            part.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
