"""Logits that are not computed yet: a tensor that stands for `linear(hidden, weight, bias)` and what is done to it.

A head that runs inside `DeferredHead` returns such a tensor. `logits_rule` has a rule for each operation that usually
lies between a head and its loss: casts, views, slices of tokens, multiplication by numbers, tanh. `cross_entropy` runs
in chunks of tokens. Any other operation computes the logits first and continues on an ordinary tensor, so the result of
every program is the same.

    hidden ── linear ── float ── view ── cross_entropy        runs in chunks
                          └───── argmax                       computes the logits
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils import _pytree as pytree

from pipedejavu.runtime.chunked_loss import chunked_cross_entropy
from pipedejavu.runtime.fused_loss import can_fuse
from pipedejavu.runtime.logits_rule import RULES, ClassLoss, name_of
from pipedejavu.runtime.logits_source import DerivedLogits, LogitsSource, TensorOperation

_FORMS = frozenset(
    (
        *("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_quantized", "is_sparse"),
        *("is_nested", "requires_grad", "size", "dim", "numel", "nelement", "ndimension", "is_floating_point"),
        *("is_complex", "__len__", "element_size", "itemsize", "nbytes", "sym_size", "sym_numel"),
    )
)
"""Operations and attributes that depend on the form of a tensor alone."""


@dataclass
class HeadUse:
    """How heads run, and what becomes of the logits that they defer."""

    num_chunks: int = 1
    """1: nothing runs in chunks, and only the use of the logits is recorded."""
    is_early: bool = True
    """Whether gradients are computed in the forward; see `chunked_loss`."""
    num_losses: int = 0
    """Cross-entropies that ran in chunks, or could have."""
    num_logits: int = 0
    """Elements of all logits of the latest of them."""
    num_classes: int = 0
    width: int = 0
    """Columns of the head's weight."""
    itemsize: int = 0
    """Bytes of each, in the dtype of the head."""
    is_fused: bool = False
    """Whether a chunk needs no memory beside its logits."""
    reads: set[str] = field(default_factory=set)
    """Names of operations other than these that read logits."""
    choose: "Callable[[HeadUse], int] | None" = None
    """Called before each loss that could run in chunks, once its size is known; returns the number of chunks."""
    version: int = 0
    """Goes up when the weights of the head change; logits that were deferred before cannot be computed any more."""

    def note_loss(self, source: LogitsSource, loss: ClassLoss) -> None:
        """Counts a cross-entropy that can run in chunks, and updates the number of chunks."""
        self.num_losses += 1
        (self.num_classes, self.width), self.itemsize = source.weight.shape, source.hidden.element_size()
        self.num_logits = loss.targets.numel() * self.num_classes
        self.is_fused = can_fuse(source.hidden.dtype, is_plain=loss.is_plain, pointwise=source.pointwise)
        if self.choose is not None:
            self.num_chunks = self.choose(self)


class Origin:
    """A run of a head: counts its uses, and knows whether its logits can still be computed."""

    def __init__(self, use: HeadUse, inputs: Sequence[Tensor | None]):
        self.use, self.version = use, use.version
        self.inputs = [tensor for tensor in inputs if tensor is not None]
        self.versions = [*map(_version, self.inputs)]
        self.on_backward: list[Callable[[Tensor], None]] = []
        """Called as the backward pass comes to the logits, or to the loss that stands for them."""

    def watched(self, tensor: Tensor) -> Tensor:
        """Returns logits that were computed, or their loss, with the calls of `on_backward`."""
        for call in self.on_backward if tensor.requires_grad else ():
            tensor.register_hook(call)  # type: ignore[no-untyped-call]
        return tensor

    def check(self) -> None:
        """Raises RuntimeError if the head's weights or input have changed since it ran."""
        if self.version != self.use.version or self.versions != [*map(_version, self.inputs)]:
            raise RuntimeError(
                f"the {len(self.inputs[1])} logits per token of a head that runs in chunks are computed only when they"
                " are read, and the head's weights or input have changed since; read them before optimizer.step(), or"
                " give head_chunks=1"
            )


class DeferredLogits(Tensor):
    """Logits that are computed when an operation needs them."""

    source: LogitsSource
    origin: Origin
    _parent: "DeferredLogits | None"
    _operation: TensorOperation
    """Makes these logits of the parent's."""
    _is_alias: bool
    """Whether they share memory with the parent's."""
    _plain: Tensor | None
    _plain_version: int

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "DeferredLogits":
        """Makes a tensor without memory; see `link` and `derive`."""
        logits: DeferredLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        logits._parent = logits._plain = None
        return logits

    @property
    def is_deferred(self) -> bool:
        """Whether neither these logits nor those that they are made of are computed yet."""
        return self._plain is None and (self._parent is None or self._parent.is_deferred)

    def compute(self) -> Tensor:
        """Returns the logits as an ordinary tensor; computes them once."""
        if self._plain is None:
            source, parent = self.source, self._parent
            if parent is None:
                self.origin.check()
                self._plain = self.origin.watched(source.compute(source.hidden, source.weight, source.bias))
            elif self._is_alias or not parent.is_changed:
                self._plain = self._operation(parent.compute())
            else:  # the parent has changed in place since
                self.origin.check()
                self._plain = source.compute(source.hidden, source.weight, source.bias)
            self._plain_version, self._parent = _version(self._plain), None  # the parent's logits may be freed
        return self._plain

    @property
    def is_changed(self) -> bool:
        """Whether the logits were computed and then changed in place."""
        return self._plain is not None and _version(self._plain) != self._plain_version

    def derive(self, derived: DerivedLogits) -> "DeferredLogits":
        """Returns the logits that an operation makes of these, deferred."""
        logits = link(derived.source)
        logits.origin, logits._parent, logits._operation = self.origin, self, derived.operation
        logits._is_alias = derived.source.form._is_view()
        return logits

    def _follow(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of an operation without computing these logits; NotImplemented if there is no rule."""
        rule = RULES.get(name) if self.is_deferred else None
        if rule is None or any(isinstance(leaf, DeferredLogits) for leaf in pytree.tree_leaves((args, kwargs))):
            return NotImplemented
        match rule(self.source, func, *args, **kwargs):
            case None:
                return NotImplemented
            case DerivedLogits() as derived:
                return self.derive(derived)
            case ClassLoss() as loss:
                return self._loss(loss)
        return self

    def _loss(self, loss: ClassLoss) -> Tensor:
        """Returns the cross-entropy, in chunks if the head's use says so."""
        source, use, (targets, class_weights, settings) = self.source, self.origin.use, loss
        use.note_loss(source, loss)
        if use.num_chunks <= 1:
            return functional.cross_entropy(self.compute(), targets, class_weights, **settings._asdict())
        self.origin.check()
        each = chunked_cross_entropy(
            source.hidden.reshape(-1, source.hidden.shape[-1]),
            source.weight,
            source.bias,
            targets.reshape(-1),
            class_weights,
            num_chunks=use.num_chunks,
            settings=settings,
            pointwise=source.pointwise,
            is_early=use.is_early,
        )
        self.origin.watched(each)
        return each.view(targets.shape) if settings.reduction == "none" else each

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows an operation, or computes the logits and runs it on them."""
        kwargs, name = dict(kwargs or {}), name_of(func)
        if name in _FORMS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not args:
            args = tuple(kwargs.pop(key) for key in ("input", "self") if isinstance(kwargs.get(key), cls))
        if args and isinstance(args[0], cls):
            result = args[0]._follow(name, func, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = _computed((args, kwargs), name)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Computes the logits for code that bypasses `__torch_function__`, such as a custom autograd function."""
        with torch.no_grad():
            args, kwargs = _computed((args, kwargs or {}), name_of(func))
            return func(*args, **kwargs)


def link(source: LogitsSource) -> DeferredLogits:
    """Returns deferred logits that are connected to autograd, for code that bypasses `__torch_function__`."""
    logits: DeferredLogits = _Link.apply(source, source.hidden, source.weight, source.bias)  # type: ignore[no-untyped-call]
    logits.source = source
    return logits


class _Link(Function):
    """The node in autograd's graph of logits that are read by code that bypasses `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, source: LogitsSource, hidden: Tensor, *_: Tensor | None) -> Tensor:
        ctx.source = source
        return DeferredLogits(source.form.shape, source.form.dtype, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        source: LogitsSource = ctx.source
        inputs = source.hidden, source.weight, source.bias
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(inputs, ctx.needs_input_grad[1:], strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        with torch.enable_grad():
            logits = source.compute(*leaves)  # type: ignore[arg-type]
        gradients = iter(torch.autograd.grad(logits, wanted, gradient))
        results = [next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        return None, *results


def _computed(tree: Any, name: str) -> Any:
    """Returns a tree with deferred logits computed, for the operation of this name."""

    def compute(logits: DeferredLogits) -> Tensor:
        logits.origin.use.reads.add(name)
        return logits.compute()

    return pytree.tree_map_only(DeferredLogits, compute, tree)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
