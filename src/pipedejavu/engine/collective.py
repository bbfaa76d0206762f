"""Collectives of a process group by torch.distributed: runs of equal length, one per member, in the order of the ranks.

Gloo's own reduce-scatter is an all-reduce that throws most of its result away, and sends twice the bytes. An all-to-all
sends the least, and lets each member add in the order of the members, as all other wires of the host do.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from pipedejavu.runtime.memory_group import sum_in_order
from pipedejavu.runtime.traffic import Counts

# torch 2.13 renamed them and warns about the old names, which are all that earlier versions have.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(vector: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns this member's run of rows of the sum of the members' tensors."""
    size, vector = group.size(), vector.detach().contiguous()
    shape = (len(vector) // size, *vector.shape[1:])
    if dist.get_backend(group) != "gloo":
        run = vector.new_empty(shape)
        _reduce_scatter(run, vector, group=group)
        return run
    received = torch.empty_like(vector)
    dist.all_to_all_single(received, vector, group=group)
    return sum_in_order(received.view(size, *shape).unbind())


def all_gather(run: Tensor, group: dist.ProcessGroup, out: Tensor | None = None) -> Tensor:
    """Returns the rows of all members, one member after the other, in `out` if given."""
    run = run.detach().contiguous()
    whole = run.new_empty((len(run) * group.size(), *run.shape[1:])) if out is None else out
    _all_gather(whole, run, group=group)
    return whole


def all_to_all(rows: Tensor, group: dist.ProcessGroup, counts: Counts) -> Tensor:
    """Sends rows to each member; returns the rows that the members sent to this one."""
    rows, position = rows.detach().contiguous(), group.rank()
    sent, received = counts[position], [row[position] for row in counts]
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows, received, sent, group=group)
    return result
