"""The workers of an evaluation as ranks: each process runs the units of its worker and passes values on."""

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from pipedejavu.session.loader_evaluation import Value, WorkerPlaces


class RankPlaces(WorkerPlaces):
    """The device of this rank's worker; other workers are other ranks."""

    def __init__(self, rank: int, device: torch.device):
        super().__init__({rank: device})
        self.rank = rank

    def pass_on(self, value: Value | None, source: int, to: int) -> Value | None:
        """Sends a value from one worker to another; all ranks call it, and only these two exchange something."""
        if source == to:
            return value
        if self.rank == source:
            assert value is not None
            tensors = value if isinstance(value, tuple) else (value,)
            held = {str(n): tensor.detach().cpu().contiguous() for n, tensor in enumerate(tensors)}
            data = torch.frombuffer(bytearray(save(held)), dtype=torch.uint8)
            dist.send(torch.tensor([len(data), isinstance(value, tuple)]), to)
            dist.send(data, to)
        if self.rank != to:
            return None
        head = torch.zeros(2, dtype=torch.int64)
        dist.recv(head, source)
        data = torch.empty(int(head[0]), dtype=torch.uint8)
        dist.recv(data, source)
        received = load(data.numpy().tobytes())
        tensors = tuple(received[str(n)] for n in range(len(received)))
        return tensors if head[1] else tensors[0]
