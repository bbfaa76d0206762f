"""Expert parallelism: rows go to the rank that holds their expert (dispatch) and back (combine), each by an all-to-all.

Rank r of n holds experts r·E/n to (r+1)·E/n. Each backward is the reverse all-to-all, so an expert's gradient is the
sum over the rows of all ranks: it must not be reduced again among them.

Note "no rows". A rank whose experts get no row runs one row of zeros, so that all ranks run the same operations in the
same order, in the backward too.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pipedejavu.runtime.traffic import Counts, even_counts


class RowGroup(Protocol):
    """One rank's end of the group that divides experts."""

    rank: int
    size: int

    def gather(self, counts: Tensor) -> Tensor:
        """Returns the vectors of all ranks, as rows."""
        ...

    def all_to_all(self, rows: Tensor, table: Counts) -> Tensor:
        """Sends `table[r][s]` rows from each rank r to each rank s; returns the rows for this rank, rank by rank."""
        ...


RunExperts = Callable[..., Tensor]
"""Runs this rank's experts: on rows sorted by expert and the end of each expert's rows, or on [experts, slots, …]."""


def exchange(rows: Tensor, table: Counts, group: RowGroup) -> Tensor:
    """Sends rows to the other ranks and returns the received ones; gradients go back the same way."""
    result: Tensor = _Exchange.apply(rows, table, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, table: Counts, group: RowGroup) -> Tensor:
        ctx.table, ctx.group = table, group
        return group.all_to_all(rows, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.all_to_all(gradients[0], _turned(ctx.table)), None, None


def _turned(table: Counts) -> Counts:
    return [list(column) for column in zip(*table, strict=True)]


def run_sorted(rows: Tensor, ends: Tensor, group: RowGroup, run: RunExperts) -> Tensor:
    """Runs experts on rows that are sorted by expert; expert e has the rows up to `ends[e]`. No row is dropped."""
    counts = torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))
    by_expert = group.gather(counts).view(group.size, group.size, -1)
    table: Counts = by_expert.sum(2).tolist()
    there = exchange(rows, table, group)
    by_source = by_expert[:, group.rank]
    experts = torch.arange(by_source.shape[1], device=rows.device).repeat(group.size)
    order = torch.repeat_interleave(experts, by_source.flatten()).argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=rows.device)
    result = _run_some(there[order], by_source.sum(0).cumsum(0).to(ends.dtype), run)
    return exchange(result[back], _turned(table), group)


def _run_some(rows: Tensor, ends: Tensor, run: RunExperts) -> Tensor:
    if len(rows):
        return run(rows, ends)
    ends = ends.clone()
    ends[-1] = 1
    return run(torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]), ends)[:0]


def run_slots(rows: Tensor, group: RowGroup, run: RunExperts) -> Tensor:
    """Runs experts on [experts, slots, …]; ranks may have different numbers of slots."""
    slots = group.gather(torch.tensor([rows.shape[1]], device=rows.device)).flatten().tolist()
    each = len(rows) // group.size
    table: Counts = [[each * count] * group.size for count in slots]
    there = torch.split(exchange(rows.flatten(0, 1), table, group), [each * count for count in slots])
    joined = torch.cat(
        [part.view(each, count, *part.shape[1:]) for part, count in zip(there, slots, strict=True)], dim=1
    )
    result = run(joined if joined.shape[1] else joined.new_zeros(each, 1, *rows.shape[2:]))
    parts = torch.split(result[:, : joined.shape[1]], slots, dim=1)
    back = exchange(torch.cat([part.flatten(0, 1) for part in parts]), _turned(table), group)
    return back.view(len(rows), rows.shape[1], *back.shape[1:])


def run_capped(rows: Tensor, ends: Tensor, group: RowGroup, run: RunExperts, factor: float) -> Tensor:
    """Runs experts on rows that are sorted by expert, with slots for `factor` times an even share of each rank's rows.

    Rows over an expert's capacity get zeros, so that their tokens pass through the residual connection. The capacity is
    that of the rank with the most rows, so that all messages have one size.
    """
    experts = len(ends)
    most = int(group.gather(torch.tensor([len(rows)], device=rows.device)).max())
    capacity = capacity_of(most, experts, factor)
    ends = ends.to(torch.int64)
    begins = ends - torch.diff(ends, prepend=ends.new_zeros(1))
    expert = torch.bucketize(torch.arange(len(rows), device=rows.device), ends, right=True)
    slot = torch.arange(len(rows), device=rows.device) - begins[expert]
    kept = slot < capacity
    place = torch.where(kept, expert * capacity + slot, experts * capacity)  # one more row for all that are dropped
    slots = rows.new_zeros(experts * capacity + 1, *rows.shape[1:]).index_copy(0, place, rows)[:-1]
    each = experts // group.size
    table = even_counts(group.size, experts * capacity)
    there = exchange(slots, table, group).view(group.size, each, capacity, *rows.shape[1:]).transpose(0, 1)
    filled = ends.new_full((each,), group.size * capacity).cumsum(0)
    result = run(there.reshape(each * group.size * capacity, *rows.shape[1:]), filled.to(torch.int32))
    result = result.view(each, group.size, capacity, *result.shape[1:]).transpose(0, 1).flatten(0, 2)
    back = exchange(result, table, group)
    return torch.cat([back, back.new_zeros(1, *back.shape[1:])])[place]


def capacity_of(num_rows: int, experts: int, factor: float) -> int:
    """Returns the slots per expert for this many rows: tokens times experts per token."""
    return min(math.ceil(factor * num_rows / experts), num_rows)
