"""The gradient of a weight that enters a matrix product or a convolution, from autograd's node of the operation.

Each rule is autograd's own formula, with the layout that autograd gives the result. It knows nothing of graphs.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

Unpack = TypeVar("Unpack", bound=Callable[..., Any])


def repeatable(unpack: Unpack) -> Unpack:
    """Marks an unpack hook of saved tensors that may be called more than once per backward pass."""
    unpack.__dict__["is_repeatable"] = True
    return unpack


class WeightRule:
    """Computes the gradients of one operation's weights from the gradient of its output."""

    def __init__(self, positions: Sequence[int], tensors: Sequence[Tensor], formula: Callable[..., list[Tensor]]):
        self.positions = positions
        """Which edges of the node the results belong to."""
        self.tensors = tensors
        """What it needs of the forward pass."""
        self._formula = formula

    def __call__(self, gradient: Tensor) -> list[Tensor]:
        """Returns the gradients in the order of `positions`."""
        return self._formula(gradient, *self.tensors)


def _saved(node: Node, name: str) -> Tensor | None:
    """Returns a saved tensor, or None if it is not a plain one or can be unpacked only once."""
    hook = getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", _unknown)
    if hook is not None and not getattr(hook, "is_repeatable", False):
        return None
    tensor: Tensor | None = getattr(node, f"_saved_{name}")
    is_plain = tensor is not None and tensor.layout == torch.strided and not tensor.is_complex()
    return tensor.detach() if tensor is not None and is_plain else None


def _unknown() -> None:
    """Stands for the hook of a saved tensor in versions of torch that do not tell it."""


def _product(names: tuple[str, str], first: int) -> Callable[[Node, frozenset[int]], WeightRule | None]:
    """Returns the maker of rules for a product of two operands, at the edges `first` and `first` + 1.

    The edge before them, if there is one, is a summand: `beta` times it plus `alpha` times the product.
    """

    def make(node: Node, ways: frozenset[int]) -> WeightRule | None:
        is_left = first in ways
        if is_left == (first + 1 in ways):  # a summand alone
            return None
        operand = _saved(node, names[is_left])
        if operand is None:
            return None
        own, flips = names[not is_left], False
        if operand.dim() == 2:
            sizes, strides = (getattr(node, f"_saved_{own}_sym_{what}") for what in ("sizes", "strides"))
            flips = strides[0] == 1 and strides[1] == sizes[0]  # column-major
        alpha, beta = getattr(node, "_saved_alpha", 1), getattr(node, "_saved_beta", 1)
        shape = None
        if first and 0 in ways:
            summand, number = node.next_functions[0]
            shape = summand._input_metadata[number].shape  # type: ignore[union-attr]
        multiply = _left if is_left else _right

        def formula(gradient: Tensor, operand: Tensor) -> list[Tensor]:
            weight = multiply(gradient, operand, flips)
            results = [weight if alpha == 1 else weight * alpha]
            if shape is not None:
                results.append((gradient if beta == 1 else gradient * beta).sum_to_size(shape))
            return results

        return WeightRule((first if is_left else first + 1, *(0,) * (shape is not None)), (operand,), formula)

    return make


def _left(gradient: Tensor, right: Tensor, flips: bool) -> Tensor:
    """Returns the gradient of the left operand; as the transpose of a row-major matrix if it `flips`."""
    if flips:
        return (right @ gradient.mT).mT
    return gradient @ right.mT


def _right(gradient: Tensor, left: Tensor, flips: bool) -> Tensor:
    """Returns the gradient of the right operand; as the transpose of a row-major matrix if it `flips`."""
    if flips:
        return (gradient.mT @ left).mT
    return left.mT @ gradient


def _convolution(node: Any, ways: frozenset[int]) -> WeightRule | None:
    """Returns the rule of a convolution's weight and bias."""
    operand, weight = _saved(node, "input"), _saved(node, "weight")
    if 1 not in ways or 0 in ways or operand is None or weight is None:
        return None
    bias_sizes = node._saved_bias_sym_sizes_opt
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    settings = [getattr(node, f"_saved_{name}") for name in names]
    positions = sorted(ways)

    def formula(gradient: Tensor, operand: Tensor, weight: Tensor) -> list[Tensor]:
        wanted = [n in positions for n in range(3)]
        results = torch.ops.aten.convolution_backward(gradient, operand, weight, bias_sizes, *settings, wanted)
        return [results[n] for n in positions]

    return WeightRule(positions, (operand, weight), formula)


RULES: dict[str, Callable[[Node, frozenset[int]], WeightRule | None]] = {
    "MmBackward0": _product(("self", "mat2"), 0),
    "AddmmBackward0": _product(("mat1", "mat2"), 1),
    "BmmBackward0": _product(("self", "mat2"), 0),
    "BaddbmmBackward0": _product(("batch1", "batch2"), 1),
    "ConvolutionBackward0": _convolution,
}
"""By name of autograd's node: takes the node and the edges that lead to weights alone; None if it cannot wait."""
