"""What a division of a tensor along a dimension means to the operations that read or write it.

Each rule names the axes of an operation's operands and of its result: axes of one name are divided together. A sum over
a divided axis leaves parts of a sum on each rank. An axis without a name cannot be divided. Reshapes and splits have
rules of their own (`reshape_rule`). An operation without a rule cannot be divided at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

Names = tuple[str | None, ...]


@dataclass(frozen=True)
class Axes:
    """The axes of an operation."""

    out: Names
    operands: tuple[tuple[fx.Node, Names], ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    """By axis, the number of equal groups of neighbours that must stay together; by default each entry is its own."""


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Returns the shape of a node's whole tensor."""
    return tuple(node.meta["val"].shape)


def is_tensor(node: object) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def name_of(node: fx.Node) -> str:
    """Returns an operation's name without namespace, such as 'linear'; '' for what is no operation of torch."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return str(node.target._schema.name).partition("::")[2]


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """Returns an argument of an operation by its name in the schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if name in node.kwargs:
        return node.kwargs[name]
    for position, known in enumerate(node.target._schema.arguments):
        if known.name == name:
            return node.args[position] if position < len(node.args) else default
    return default


def axes_of(node: fx.Node) -> Axes | None:
    """Returns the axes of an operation, or None if it has no rule."""
    name = name_of(node)
    if name in _RULES:
        return _RULES[name](node)
    is_pointwise = name in _ALIKE or (name and torch.Tag.pointwise in node.target.tags)  # type: ignore[union-attr]
    return _pointwise(node) if is_pointwise and is_tensor(node) else None


def _numbered(ndim: int, *, without: Sequence[int] = ()) -> Names:
    """Returns a name for each dimension, counted from the last, so that broadcast operands align."""
    skipped = {d % ndim for d in without} if ndim else set()
    return tuple(None if d in skipped else str(ndim - d) for d in range(ndim))


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [used for used in node.all_input_nodes if is_tensor(used)]


def _pointwise(node: fx.Node) -> Axes:
    shape = shape_of(node)
    operands = []
    for used in _tensors(node):
        sizes, names = shape_of(used), _numbered(len(shape_of(used)))
        aligned = shape[len(shape) - len(sizes) :]
        # A dimension of one element is broadcast, unless the result has one too.
        operands.append(
            (
                used,
                tuple(name if size == whole else "" for name, size, whole in zip(names, sizes, aligned, strict=True)),
            )
        )
    return Axes(_numbered(len(shape)), tuple(operands))


def _linear(node: fx.Node) -> Axes:
    x, weight, bias = argument(node, "input"), argument(node, "weight"), argument(node, "bias")
    lead = tuple(f"b{d}" for d in range(len(shape_of(x)) - 1))
    operands = [(x, (*lead, "in")), (weight, ("out", "in"))]
    return Axes((*lead, "out"), (*operands, *([(bias, ("out",))] if bias is not None else [])))


def _addmm(node: fx.Node) -> Axes:
    bias, x, weight = argument(node, "self"), argument(node, "mat1"), argument(node, "mat2")
    aligned = ("row", "out")[2 - len(shape_of(bias)) :]
    return Axes(("row", "out"), ((x, ("row", "in")), (weight, ("in", "out")), (bias, aligned)))


def _matmul(node: fx.Node) -> Axes | None:
    x, y = node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(y, fx.Node)
    first, second, shape = shape_of(x), shape_of(y), shape_of(node)
    if len(first) < 2 or len(second) < 2:
        return None
    lead = [f"b{d}" for d in range(len(shape) - 2, 0, -1)]

    def leading(sizes: tuple[int, ...]) -> Names:
        names = lead[len(lead) - (len(sizes) - 2) :]
        whole = shape[len(shape) - len(sizes) : -2]
        return tuple(n if size == all_ else "" for n, size, all_ in zip(names, sizes[:-2], whole, strict=True))

    return Axes((*lead, "m", "n"), ((x, (*leading(first), "m", "k")), (y, (*leading(second), "k", "n"))))


def _convolution(node: fx.Node) -> Axes | None:
    x, weight, bias, groups = (argument(node, n) for n in ("input", "weight", "bias", "groups"))
    groups = 1 if groups is None else groups
    space = (None,) * (len(shape_of(weight)) - 2)
    if len(shape_of(x)) != len(shape_of(weight)) or argument(node, "transposed", False):
        return None
    biases = [(bias, ("out",))] if bias is not None else []
    if groups == 1:
        return Axes(("b", "out", *space), ((x, ("b", "in", *space)), (weight, ("out", "in", *space)), *biases))
    # Neighbouring filters read the same channels: whole groups are divided.
    return Axes(
        ("b", "out", *space),
        ((x, ("b", "out", *space)), (weight, ("out", None, *space)), *biases),
        {"out": groups},
    )


def _embedding(node: fx.Node) -> Axes:
    weight, rows = argument(node, "weight"), argument(node, "indices")
    lead = tuple(f"b{d}" for d in range(len(shape_of(rows))))
    return Axes((*lead, "out"), ((weight, (None, "out")), (rows, lead)))


def _attention(node: fx.Node) -> Axes | None:
    query, key, value, mask = (argument(node, n) for n in ("query", "key", "value", "attn_mask"))
    if len(shape_of(query)) != 4:
        return None
    heads, shared = shape_of(query)[1], shape_of(key)[1]
    operands: list[tuple[fx.Node, Names]] = [(t, ("b", "h", None, None)) for t in (query, key, value)]
    if mask is not None:
        sizes = shape_of(mask)
        names = ("b", "h", None, None)[4 - len(sizes) :]
        whole = (shape_of(query)[0], heads, *sizes[-2:])[4 - len(sizes) :]
        operands.append((mask, tuple(n if s == w else "" for n, s, w in zip(names, sizes, whole, strict=True))))
    return Axes(("b", "h", None, None), tuple(operands), {"h": shared} if heads != shared else {})


def _along(node: fx.Node, *dims: str) -> Axes:
    """An operation that keeps all dimensions and works along some, which must be whole."""
    skipped = []
    for name in dims:
        value = argument(node, name)
        skipped += [value] if isinstance(value, int) else list(value or ())
    return _unary(node, skipped)


def _unary(node: fx.Node, without: Sequence[int]) -> Axes:
    (used,) = _tensors(node)
    names = _numbered(len(shape_of(used)), without=without)
    return Axes(names, ((used, names),))


def _layer_norm(node: fx.Node) -> Axes:
    x, last = argument(node, "input"), len(argument(node, "normalized_shape"))
    names = _numbered(len(shape_of(x)), without=range(-last, 0))
    more = [(used, (None,) * len(shape_of(used))) for used in _tensors(node) if used is not x]
    return Axes(names, ((x, names), *more))


def _batch_norm(node: fx.Node) -> Axes:
    x = argument(node, "input")
    names = (None, "c", *(None,) * (len(shape_of(x)) - 2))
    return Axes(names, ((x, names), *((used, ("c",)) for used in _tensors(node) if used is not x)))


def _group_norm(node: fx.Node) -> Axes:
    x, groups = argument(node, "input"), argument(node, "num_groups")
    names = ("b", "c", *(None,) * (len(shape_of(x)) - 2))
    more = [(used, ("c",)) for used in _tensors(node) if used is not x]
    return Axes(names, ((x, names), *more), {"c": groups})


def _pooling(node: fx.Node) -> Axes | None:
    (used,) = _tensors(node)
    if not is_tensor(node):
        return None
    channel = 2 if "2d" in name_of(node) else 1 if "1d" in name_of(node) else 3
    lead = _numbered(len(shape_of(used)))[:-channel]
    names = (*lead, *(None,) * channel)
    return Axes(names, ((used, names),))


def _reduction(node: fx.Node) -> Axes | None:
    (used,) = _tensors(node)
    ndim, dims = len(shape_of(used)), argument(node, "dim")
    if dims is None:
        return None
    gone = {d % ndim for d in ([dims] if isinstance(dims, int) else dims)}
    names = _numbered(ndim, without=[*gone])
    keeps = argument(node, "keepdim", False)
    return Axes(tuple(n for d, n in enumerate(names) if keeps or d not in gone), ((used, names),))


def _permuted(node: fx.Node) -> Axes:
    (used,) = _tensors(node)
    ndim = len(shape_of(used))
    order = [*range(ndim)]
    if name_of(node) == "permute":
        order = [d % ndim for d in argument(node, "dims")]
    elif ndim >= 2:
        one, other = (argument(node, n) for n in ("dim0", "dim1")) if name_of(node) == "transpose" else (0, 1)
        order[one], order[other] = order[other], order[one]
    names = _numbered(ndim)
    return Axes(tuple(names[d] for d in order), ((used, names),))


def _unsqueezed(node: fx.Node) -> Axes:
    (used,) = _tensors(node)
    names = _numbered(len(shape_of(used)))
    dim = argument(node, "dim") % (len(names) + 1)
    return Axes((*names[:dim], None, *names[dim:]), ((used, names),))


def _squeezed(node: fx.Node) -> Axes:
    (used,) = _tensors(node)
    sizes, dims = shape_of(used), argument(node, "dim")
    asked = range(len(sizes)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % len(sizes) for d in asked if sizes[d] == 1}
    names = _numbered(len(sizes), without=[*gone])
    return Axes(tuple(n for d, n in enumerate(names) if d not in gone), ((used, names),))


def _expanded(node: fx.Node) -> Axes:
    (used,) = _tensors(node)
    shape, sizes = shape_of(node), shape_of(used)
    names, out = _numbered(len(sizes)), _numbered(len(shape))
    aligned = shape[len(shape) - len(sizes) :]
    return Axes(out, ((used, tuple(n if a == b else "" for n, a, b in zip(names, sizes, aligned, strict=True))),))


def _selected(node: fx.Node) -> Axes:
    (used,) = _tensors(node)
    dim = argument(node, "dim") % len(shape_of(used))
    names = _numbered(len(shape_of(used)), without=[dim])
    return Axes(tuple(n for d, n in enumerate(names) if d != dim), ((used, names),))


def _padded(node: fx.Node) -> Axes:
    (used,) = _tensors(node)
    pads, ndim = argument(node, "pad"), len(shape_of(used))
    changed = [ndim - 1 - d for d in range(len(pads) // 2) if pads[2 * d] or pads[2 * d + 1]]
    return _unary(node, changed)


_ALIKE = frozenset(
    [
        "to",
        "contiguous",
        "clone",
        "alias",
        "detach",
        "type_as",
        "dropout",
        "dropout_",
        "_to_copy",
        "float",
        "relu",
        "relu_",
        "hardtanh",
        "hardtanh_",
        "relu6",
        "relu6_",
        "silu",
        "silu_",
        "gelu",
        "gelu_",
        "elu",
        "elu_",
        "leaky_relu",
        "leaky_relu_",
        "mish",
        "softplus",
        "hardswish",
        "hardswish_",
        "selu",
        "where",
        "masked_fill",
        "masked_fill_",
        "lift_fresh_copy",
        "zeros_like",
        "ones_like",
    ]
)
"""Operations on each element, beside those that torch marks as pointwise."""

_RULES: dict[str, Callable[[fx.Node], Axes | None]] = {
    "linear": _linear,
    "addmm": _addmm,
    **dict.fromkeys(("mm", "bmm", "matmul"), _matmul),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "cumsum"), lambda node: _along(node, "dim")),
    "roll": lambda node: _along(node, "dims"),
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    **dict.fromkeys(
        (
            "max_pool1d",
            "max_pool2d",
            "max_pool3d",
            "avg_pool1d",
            "avg_pool2d",
            "avg_pool3d",
            "adaptive_avg_pool1d",
            "adaptive_avg_pool2d",
        ),
        _pooling,
    ),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), _reduction),
    **dict.fromkeys(("permute", "transpose", "t", "numpy_T"), _permuted),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "expand": _expanded,
    "select": _selected,
    "pad": _padded,
}
