"""Expert parallelism: rows go to the rank that holds their expert (dispatch) and back (combine), each by an all-to-all.

Rank r of n holds experts r·E/n to (r+1)·E/n. Each backward is the reverse all-to-all, so an expert's gradient is the
sum over the rows of all ranks: it must not be reduced again among them.

Note "no rows". A rank whose experts get no row runs one row of zeros, so that all ranks run the same operations in the
same order, in the backward too.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pipedejavu.runtime.tensor_group import TensorGroup, exchange

RunExperts = Callable[..., Tensor]
"""Runs this rank's experts: on rows sorted by expert and the end of each expert's rows, or on [experts, slots, …]."""


def counts_of_all(counts: Tensor, group: TensorGroup) -> list[list[int]]:
    """Returns, for each rank, how many rows it sends to each expert of this rank, from this rank's count per expert."""
    each = len(counts) // group.size
    received = group.all_to_all(counts.to(torch.int64), [each] * group.size, [each] * group.size)
    rows: list[list[int]] = received.view(group.size, each).tolist()
    return rows


def run_sorted(rows: Tensor, ends: Tensor, group: TensorGroup, run: RunExperts) -> Tensor:
    """Runs experts on rows that are sorted by expert; expert e has the rows up to `ends[e]`. No row is dropped."""
    counts = torch.diff(ends.to(torch.int64), prepend=ends.new_zeros(1, dtype=torch.int64))
    arriving = counts_of_all(counts, group)
    sent = counts.view(group.size, -1).sum(1).tolist()
    received = [sum(part) for part in arriving]
    there = exchange(rows, sent, received, group)
    by_source = torch.tensor(arriving, device=rows.device)
    experts = torch.arange(by_source.shape[1], device=rows.device).repeat(group.size)
    order = torch.repeat_interleave(experts, by_source.flatten()).argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=rows.device)
    result = _run_some(there[order], by_source.sum(0).cumsum(0).to(ends.dtype), run)
    return exchange(result[back], received, sent, group)


def _run_some(rows: Tensor, ends: Tensor, run: RunExperts) -> Tensor:
    if len(rows):
        return run(rows, ends)
    ends = ends.clone()
    ends[-1] = 1
    return run(torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]), ends)[:0]


def run_slots(rows: Tensor, group: TensorGroup, run: RunExperts) -> Tensor:
    """Runs experts on [experts, slots, …]; ranks may have different numbers of slots."""
    slots = [part[0] for part in counts_of_all(torch.full((len(rows),), rows.shape[1], device=rows.device), group)]
    each = len(rows) // group.size
    sent, received = [each * rows.shape[1]] * group.size, [each * count for count in slots]
    there = exchange(rows.flatten(0, 1), sent, received, group).split(received)
    joined = torch.cat([part.unflatten(0, (each, count)) for part, count in zip(there, slots, strict=True)], dim=1)
    result = run(joined if joined.shape[1] else joined.new_zeros(each, 1, *rows.shape[2:]))
    parts = result[:, : joined.shape[1]].split(slots, dim=1)
    back = exchange(torch.cat([part.flatten(0, 1) for part in parts]), received, sent, group)
    return back.unflatten(0, (len(rows), rows.shape[1]))


def run_capped(rows: Tensor, ends: Tensor, group: TensorGroup, run: RunExperts, factor: float) -> Tensor:
    """Runs experts on rows that are sorted by expert, with slots for `factor` times an even share of each rank's rows.

    Rows over an expert's capacity get zeros, so that their tokens pass through the residual connection. The capacity is
    that of the rank with the most rows, so that all messages have one size.
    """
    experts = len(ends)
    most = max(part[0] for part in counts_of_all(ends.new_full((group.size,), len(rows)), group))
    capacity = capacity_of(most, experts, factor)
    ends = ends.to(torch.int64)
    begins = ends - torch.diff(ends, prepend=ends.new_zeros(1))
    expert = torch.bucketize(torch.arange(len(rows), device=rows.device), ends, right=True)
    slot = torch.arange(len(rows), device=rows.device) - begins[expert]
    kept = slot < capacity
    place = torch.where(kept, expert * capacity + slot, experts * capacity)  # one more row for all that are dropped
    slots = rows.new_zeros(experts * capacity + 1, *rows.shape[1:]).index_copy(0, place, rows)[:-1]
    each = experts // group.size
    sizes = [each * capacity] * group.size
    there = exchange(slots, sizes, sizes, group).view(group.size, each, capacity, *rows.shape[1:]).transpose(0, 1)
    filled = ends.new_full((each,), group.size * capacity).cumsum(0)
    result = run(there.reshape(each * group.size * capacity, *rows.shape[1:]), filled.to(torch.int32))
    result = result.view(each, group.size, capacity, *result.shape[1:]).transpose(0, 1).flatten(0, 2)
    back = exchange(result, sizes, sizes, group)
    return torch.cat([back, back.new_zeros(1, *back.shape[1:])])[place]


def capacity_of(num_rows: int, experts: int, factor: float) -> int:
    """Returns the slots per expert for this many rows: tokens times experts per token."""
    return min(math.ceil(factor * num_rows / experts), num_rows)
