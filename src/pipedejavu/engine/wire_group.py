"""The tensor group of a worker over its wire: collectives inside units take the wire of the group's members."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipedejavu.engine.wire import Wire


class WireGroup:
    """One worker's end of a group of workers that compute operators together."""

    def __init__(self, wire: Wire, name: str, members: Sequence[int], worker: int):
        self.wire, self.name, self.members = wire, name, sorted(members)
        self.rank, self.size = self.members.index(worker), len(self.members)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors."""
        # Some wires sum in place, and autograd may still need the tensor.
        return self.wire.add_up(tensor.detach().clone(memory_format=torch.contiguous_format), self.name)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which have one shape."""
        run = tensor.detach().reshape(-1)
        whole = self.wire.all_gather(run, self.name)
        return [part.view(tensor.shape) for part in torch.split(whole, run.numel())]

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> Tensor:
        """Takes a tensor for each rank, all of one shape; returns the sum of those for this rank."""
        vector = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return self.wire.reduce_scatter(vector, self.name).view(tensors[0].shape)

    def swap(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sends a tensor to each rank, all of one shape; returns those that the ranks sent to this one."""
        rows = torch.stack([tensor.detach() for tensor in tensors])
        return [*self.wire.all_to_all(rows, self.name)]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Sends the first `sent[0]` rows to rank 0, the next to rank 1, …; returns the received rows in rank order."""
        table = torch.stack(self.all_gather(torch.tensor([*sent])))
        return self.wire.all_to_all(rows.detach().contiguous(), self.name, table.tolist())
