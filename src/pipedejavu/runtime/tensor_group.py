"""Groups of ranks that compute operators together, and collectives on them that autograd differentiates.

    forward             backward            function
    identity            all-reduce          `sum_backward`: before operators that are divided by their outputs
    all-reduce          identity            `sum_forward`: after operators that are divided by their inputs
    own part            all-gather          `take_part`: a part of a tensor that all ranks have
    all-gather          own part            `join_parts`: whole again, for operators that all ranks compute alike
    all-gather          reduce-scatter      `gather`: whole, for operators of which each rank computes another part
    reduce-scatter      all-gather          `scatter_sum`: sums of parts, of which each rank keeps one
    all-to-all          all-to-all back     `exchange`: rows go to other ranks
    all-to-all          all-to-all back     `transpose`: divided along another dimension than before

All ranks of a group call the same collectives in the same order, as the same graph on each of them does. A group does
not know what is divided: `param_layout` says how parameters lie on the ranks.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipedejavu.runtime.param_layout import ParamLayout

Parts = tuple[int, ...]
"""Sizes of consecutive parts of a dimension, each divided evenly; by default the dimension is one part."""


class TensorGroup(Protocol):
    """One rank's end of a group. Results are new tensors with the same bits on all ranks that get them."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which have one shape."""
        ...

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> Tensor:
        """Takes a tensor for each rank, all of one shape; returns the sum of those for this rank."""
        ...

    def swap(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sends a tensor to each rank, all of one shape; returns those that the ranks sent to this one."""
        ...

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends the first `sent[0]` rows to rank 0, the next to rank 1, …; returns the received rows in rank order."""
        ...


def sum_backward(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Returns the tensor; its gradient is the sum over the ranks."""
    return _apply(_SumBackward, tensor, group)


def sum_forward(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Returns the sum over the ranks; each rank's gradient is that of the sum."""
    return _apply(_SumForward, tensor, group)


def take_part(tensor: Tensor, dim: int, group: TensorGroup, parts: Parts = ()) -> Tensor:
    """Returns this rank's part along a dimension; the gradients of the parts are gathered."""
    return _apply(_TakePart, tensor, dim, parts, group)


def join_parts(tensor: Tensor, dim: int, group: TensorGroup, parts: Parts = ()) -> Tensor:
    """Returns the parts of all ranks joined along a dimension, for operators that all ranks compute alike."""
    return _apply(_JoinParts, tensor, dim, parts, group)


def gather(tensor: Tensor, dim: int, group: TensorGroup, parts: Parts = ()) -> Tensor:
    """Returns the parts of all ranks joined along a dimension; the gradients of all ranks are summed for each part."""
    return _apply(_Gather, tensor, dim, parts, group)


def scatter_sum(tensor: Tensor, dim: int, group: TensorGroup, parts: Parts = ()) -> Tensor:
    """Returns this rank's part, along a dimension, of the sum over the ranks."""
    return _apply(_ScatterSum, tensor, dim, parts, group)


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: TensorGroup) -> Tensor:
    """Sends rows to the other ranks and returns the received ones; gradients go back the same way."""
    return _apply(_Exchange, rows, tuple(sent), tuple(received), group)


def transpose(tensor: Tensor, before: int, after: int, group: TensorGroup) -> Tensor:
    """Returns this rank's part along dimension `after` of a tensor that is divided along dimension `before`."""
    return _apply(_Transpose, tensor, before, after, group)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    if args[-1].size == 1:
        tensor: Tensor = args[0]
        return tensor
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _part(tensor: Tensor, dim: int, parts: Parts, group: TensorGroup) -> Tensor:
    return ParamLayout(tuple(tensor.shape), dim, parts).local(tensor, group.rank, group.size).contiguous()


def _joined(tensor: Tensor, dim: int, parts: Parts, group: TensorGroup) -> Tensor:
    shards = group.all_gather(tensor.contiguous())
    shape = tuple(n * group.size if d == dim else n for d, n in enumerate(tensor.shape))
    return torch.cat(shards, dim) if len(parts) < 2 else ParamLayout(shape, dim, parts).whole(shards)


def _scattered(tensor: Tensor, dim: int, parts: Parts, group: TensorGroup) -> Tensor:
    layout = ParamLayout(tuple(tensor.shape), dim, parts)
    return group.reduce_scatter([layout.local(tensor, rank, group.size).contiguous() for rank in range(group.size)])


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.all_reduce(gradients[0]), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:  # noqa: ARG004
        return group.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        return gradients[0], None


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, parts: Parts, group: TensorGroup) -> Tensor:
        ctx.place = dim, parts, group
        return _part(tensor, dim, parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _joined(gradients[0], *ctx.place), None, None, None


class _JoinParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, parts: Parts, group: TensorGroup) -> Tensor:
        ctx.place = dim, parts, group
        return _joined(tensor, dim, parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _part(gradients[0], *ctx.place), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, parts: Parts, group: TensorGroup) -> Tensor:
        ctx.place = dim, parts, group
        return _joined(tensor, dim, parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _scattered(gradients[0], *ctx.place), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, parts: Parts, group: TensorGroup) -> Tensor:
        ctx.place = dim, parts, group
        return _scattered(tensor, dim, parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _joined(gradients[0], *ctx.place), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: TensorGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return group.all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sent, received = ctx.sizes
        return ctx.group.all_to_all(gradients[0], received, sent), None, None, None


def _transposed(tensor: Tensor, before: int, after: int, group: TensorGroup) -> Tensor:
    return torch.cat(group.swap([part.contiguous() for part in tensor.detach().chunk(group.size, after)]), before)


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, before: int, after: int, group: TensorGroup) -> Tensor:
        ctx.place = after, before, group
        return _transposed(tensor, before, after, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _transposed(gradients[0], *ctx.place), None, None, None
