"""Logits that are not computed yet: a tensor that stands for `linear(hidden, weight, bias)` and what is done to it.

A head that runs inside `DeferredHead` returns such a tensor. `logits_rule` follows the operations that usually lie
between a head and its loss: casts, views, slices of tokens, multiplication by numbers, tanh. `cross_entropy` runs in
chunks of tokens. Any other operation computes the logits first and continues on an ordinary tensor, so the result of
every program is the same.

    hidden ── linear ── float ── view ── cross_entropy        runs in chunks
                          └───── argmax                       computes the logits
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils import _pytree as pytree

Rule = Callable[..., Any]
"""Takes deferred logits, an operation and its other arguments; returns NotImplemented if it does not know these."""

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


@dataclass(frozen=True, kw_only=True)
class Source:
    """What deferred logits are made of."""

    hidden: Tensor
    """The head's input, one row per row of logits: the token dimensions are those of the logits, in their order."""
    weight: Tensor
    bias: Tensor | None
    pointwise: tuple[Callable[[Tensor], Tensor], ...] = ()
    """What is done to each of the logits, in order."""
    is_class_second: bool = False
    """Whether the vocabulary is dimension 1, and not the last one."""

    def compute(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the logits."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = functional.linear(hidden, weight, bias)
            for function in self.pointwise:
                logits = function(logits)
        return logits.movedim(-1, 1) if self.is_class_second else logits


class Origin:
    """A run of a head: counts its uses, and knows whether its logits can still be computed."""

    def __init__(self, use: HeadUse, inputs: Sequence[Tensor | None], rules: Mapping[str, Rule]):
        self.use, self.version, self.rules = use, use.version, rules
        self.inputs = [tensor for tensor in inputs if tensor is not None]
        self.versions = [*map(_version, self.inputs)]

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

    source: Source
    origin: Origin
    form: Tensor
    """A tensor on the meta device with the shape and strides that these logits would have."""
    _parent: "DeferredLogits | None"
    _operation: Callable[[Tensor], Tensor]
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
                self._plain = source.compute(source.hidden, source.weight, source.bias)
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

    def derive(
        self, source: Source, operation: Callable[[Tensor], Tensor], form: Tensor | None = None
    ) -> "DeferredLogits":
        """Returns what an operation makes of these logits, deferred; `source` is what the result is made of.

        `form` is the result on the meta device, by default that of the operation.
        """
        form = operation(self.form) if form is None else form
        derived = link(source, form)
        derived.origin, derived._parent, derived._operation = self.origin, self, operation
        derived._is_alias = form._is_view()
        return derived

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows an operation, or computes the logits and runs it on them."""
        kwargs, name = dict(kwargs or {}), name_of(func)
        if name in _FORMS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not args:
            args = tuple(kwargs.pop(key) for key in ("input", "self") if isinstance(kwargs.get(key), cls))
        rule = args[0].origin.rules.get(name) if args and isinstance(args[0], cls) and args[0].is_deferred else None
        result = rule(args[0], func, *args[1:], **kwargs) if rule else NotImplemented
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


def link(source: Source, form: Tensor) -> DeferredLogits:
    """Returns deferred logits that are connected to autograd, for code that bypasses `__torch_function__`."""
    logits: DeferredLogits = _Link.apply(source, form, source.hidden, source.weight, source.bias)  # type: ignore[no-untyped-call]
    logits.source, logits.form = source, form
    return logits


class _Link(Function):
    """The node in autograd's graph of logits that are read by code that bypasses `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, source: Source, form: Tensor, hidden: Tensor, *_: Tensor | None) -> Tensor:
        ctx.source = source
        return DeferredLogits(form.shape, form.dtype, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        source: Source = ctx.source
        inputs = source.hidden, source.weight, source.bias
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(inputs, ctx.needs_input_grad[2:], strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        with torch.enable_grad():
            logits = source.compute(*leaves)  # type: ignore[arg-type]
        gradients = iter(torch.autograd.grad(logits, wanted, gradient))
        results = [next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        return None, None, *results


def _computed(tree: Any, name: str) -> Any:
    """Returns a tree with deferred logits computed, for the operation of this name."""

    def compute(logits: DeferredLogits) -> Tensor:
        logits.origin.use.reads.add(name)
        return logits.compute()

    return pytree.tree_map_only(DeferredLogits, compute, tree)


def name_of(func: Any) -> str:
    """Returns the name of an operation or attribute of tensors, in Python or in ATen."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.rpartition("::")[2]
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
