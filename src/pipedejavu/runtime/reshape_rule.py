"""How a division of a dimension passes through operations that join, part or cut dimensions.

A divided dimension consists of consecutive parts, each divided evenly: fused queries, keys and values are three.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

Shape = Sequence[int]


class Split(NamedTuple):
    """A divided dimension of a tensor."""

    dim: int
    parts: tuple[int, ...]
    """Sizes of its consecutive parts, each divided evenly."""


class UndividedError(Exception):
    """A division that an operation cannot follow. `parts` are sizes, of the same dimension, that might do."""

    def __init__(self, reason: str, parts: Sequence[int] = ()):
        super().__init__(reason)
        self.parts = tuple(parts)


def through_view(before: Shape, after: Shape, split: Split, size: int) -> Split:
    """Returns the division of a view's result, given that of its argument, over `size` ranks."""
    inside, outside = _block(before, after, split.dim)
    inner = prod(before[d] for d in inside if d > split.dim)
    outer = prod(before[d] for d in inside if d < split.dim)
    runs = tuple(part * inner for part in split.parts) * outer
    for dim in outside:
        if after[dim] > 1 and (parts := _parts_of(runs, after, outside, dim, size)):
            return Split(dim, parts)
    sizes = [after[d] for d in outside if after[d] > 1]
    first = sizes[0] if sizes else 1
    parts = (before[split.dim] // first,) * first if before[split.dim] % first == 0 else ()
    raise UndividedError(f"{_product(sizes)} cannot be divided by {size} along one dimension", parts)


def _parts_of(runs: tuple[int, ...], after: Shape, block: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """Returns the parts of a dimension of a block whose elements are divided in `runs`; empty if they do not fit it."""
    inner = prod(after[d] for d in block if d > dim)
    outer = prod(after[d] for d in block if d < dim)
    parts = runs[: len(runs) // outer]
    if len(runs) % outer or parts * outer != runs or any(part % (inner * size) for part in parts):
        return ()
    return tuple(part // inner for part in parts)


def _block(before: Shape, after: Shape, dim: int) -> tuple[list[int], list[int]]:
    """Returns the dimensions, before and after, whose elements are those of the block of dimensions around `dim`."""
    start_before = start_after = 0
    while start_before < len(before):
        end_before, end_after = start_before + 1, start_after + 1
        one, other = before[start_before], after[start_after] if start_after < len(after) else 1
        while one != other:
            if one < other:
                one *= before[end_before]
                end_before += 1
            else:
                other *= after[end_after]
                end_after += 1
        if start_before <= dim < end_before:
            return [*range(start_before, end_before)], [*range(start_after, min(end_after, len(after)))]
        start_before, start_after = end_before, end_after
    raise AssertionError("the dimension is one of the tensor's")


def cut_sizes(length: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the sizes between all starts and ends of some slices of a dimension."""
    edges = sorted({0, length, *(edge for cut in cuts for edge in cut)})
    return tuple(b - a for a, b in pairwise(edges))


def through_slice(split: Split, start: int, end: int, sizes: Sequence[int]) -> Split:
    """Returns the division of a slice of the divided dimension; `sizes` are those that all its slices need as parts."""
    edges = [0, *accumulate(split.parts)]
    if start not in edges or end not in edges:
        raise UndividedError("it is cut inside a part", sizes)
    return Split(split.dim, split.parts[edges.index(start) : edges.index(end)])


def local_shape(shape: Shape, split: Split | None, size: int) -> list[int]:
    """Returns the shape of a rank's part."""
    return [n // size if split is not None and d == split.dim else n for d, n in enumerate(shape)]


def _product(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes)) or "1"
