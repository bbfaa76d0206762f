"""Some ranks of a tensor group, as a group of their own: collectives among them are all-to-alls of the whole group."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipedejavu.runtime.tensor_group import TensorGroup


class MemberGroup:
    """The ranks `members` of a group; all ranks of that group make the same calls, each in a part of its own."""

    def __init__(self, group: TensorGroup, members: Sequence[int]):
        self.group, self.members = group, members
        self.rank, self.size = members.index(group.rank), len(members)

    def _counts(self, length: int) -> list[int]:
        return [length * (rank in self.members) for rank in range(self.group.size)]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of the members, which have one shape."""
        return self.swap([tensor] * self.size)

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> Tensor:
        """Takes a tensor for each member, all of one shape; returns the sum of those for this one."""
        return torch.stack(self.swap(tensors)).sum(0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the members' tensors."""
        return torch.stack(self.all_gather(tensor)).sum(0)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends rows to each member in order; returns those that the members sent to this one."""
        tables = [[0] * self.group.size, [0] * self.group.size]
        for table, counts in zip(tables, (sent, received), strict=True):
            for member, count in zip(self.members, counts, strict=True):
                table[member] = count
        return self.group.all_to_all(rows, *tables)

    def swap(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sends a tensor to each member, all of one shape; returns what the members sent to this one."""
        rows = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        counts = self._counts(tensors[0].numel())
        received = self.group.all_to_all(rows, counts, counts)
        return [part.view(tensors[0].shape) for part in torch.split(received, tensors[0].numel())]
