"""Tensor groups of two kinds: ranks of a torch.distributed process group, and threads of one process."""

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class ProcessTensorGroup:
    """One rank of a process group: of Gloo for tensors of the host, or of NCCL for those of GPUs."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which have one shape."""
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, tensor.detach().contiguous(), group=self.group)
        return parts

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> Tensor:
        """Takes a tensor for each rank, all of one shape; returns the sum of those for this rank."""
        total = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(total, [tensor.detach().contiguous() for tensor in tensors], group=self.group)
        return total

    def swap(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sends a tensor to each rank, all of one shape; returns those that the ranks sent to this one."""
        rows = torch.stack([tensor.detach() for tensor in tensors])
        return [*self.all_to_all(rows, (1,) * self.size, (1,) * self.size)]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends the first `sent[0]` rows to rank 0, the next to rank 1, …; returns the received rows in rank order."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.detach().contiguous(), [*received], [*sent], group=self.group)
        return result


class ThreadMeeting:
    """Where the threads of a group meet: a barrier, and what each of them brings."""

    def __init__(self, size: int):
        self.size, self.barrier = size, threading.Barrier(size)
        self.brought: list[Sequence[Tensor]] = [()] * size

    def stop(self) -> None:
        """Makes all threads that wait, now or later, raise `threading.BrokenBarrierError`."""
        self.barrier.abort()


class ThreadTensorGroup:
    """One thread of several in a process. Sums are in the order of the ranks."""

    def __init__(self, meeting: ThreadMeeting, rank: int):
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def _meet(self, brought: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Returns what all ranks have brought; each tensor stays as it is, and results are made of copies."""
        self.meeting.brought[self.rank] = [tensor.detach() for tensor in brought]
        self.meeting.barrier.wait()
        everything = [*self.meeting.brought]
        self.meeting.barrier.wait()
        return everything

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors."""
        return torch.stack([brought[0] for brought in self._meet([tensor])]).sum(0)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which have one shape."""
        return [brought[0] for brought in self._meet([tensor])]

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> Tensor:
        """Takes a tensor for each rank, all of one shape; returns the sum of those for this rank."""
        return torch.stack([brought[self.rank] for brought in self._meet(tensors)]).sum(0)

    def swap(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sends a tensor to each rank, all of one shape; returns those that the ranks sent to this one."""
        return [brought[self.rank] for brought in self._meet(tensors)]

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Sends the first `sent[0]` rows to rank 0, the next to rank 1, …; returns the received rows in rank order."""
        return torch.cat([brought[self.rank] for brought in self._meet(torch.split(rows, [*sent]))])
