"""The wire between ranks on different GPUs by NCCL: a communicator per direction of an edge and per group.

So no order on one edge blocks another. Transfers are issued to the current stream, and no host waits for a device.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from pipedejavu.engine.collective import all_gather, all_to_all, reduce_scatter
from pipedejavu.runtime.message_layout import MOST_BYTES, MessageLayout
from pipedejavu.runtime.traffic import Counts, Traffic


class NcclWire:
    """One rank's end of the edges and groups that use NCCL."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        edges: list[tuple[int, int]],
        groups: dict[str, tuple[int, ...]],
        backend: str = "nccl",
    ):
        """Makes the communicators; all ranks call it with the same edges and groups, as torch.distributed requires.

        Tests of the protocol on CPUs pass another backend.
        """
        self.rank, self.device = rank, device
        if name := os.environ.get("GLOO_SOCKET_IFNAME"):  # NCCL listens on no other interface than Gloo
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
        self.edges = {edge: dist.new_group(list(edge), backend=backend) for edge in sorted(edges)}
        self.groups = {name: dist.new_group(list(ranks), backend=backend) for name, ranks in sorted(groups.items())}
        self._sent: dict[tuple[int, object], MessageLayout] = {}
        self._known: dict[tuple[int, object], MessageLayout] = {}
        self.carried = Traffic()

    def send(self, tensors: tuple[Tensor, ...], to: int, key: object) -> None:
        """Sends tensors of this rank's GPU; their layout goes before the first of a key, through the host."""
        tensors = tuple(tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors)
        if (to, key) not in self._sent:
            self._sent[to, key] = layout = MessageLayout.of(tensors)
            form = torch.frombuffer(bytearray(layout.pack()), dtype=torch.uint8)
            dist.send(torch.tensor([len(form)]), to)
            dist.send(form, to)
        for tensor in tensors:
            if tensor.numel():
                work = dist.isend(tensor, to, group=self.edges[self.rank, to])
                assert work is not None, "this process is a member of the edge"
                work.wait()  # the stream waits, not the host
                self.carried.send(to, 1, tensor.nbytes)

    def receive(self, source: int, key: object) -> tuple[Tensor, ...]:
        """Receives the next tensors into memory of this rank's GPU."""
        if (source, key) not in self._known:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, source)
            if not 0 < int(size) <= MOST_BYTES:
                raise ValueError(
                    f"rank {source} announced a layout of {int(size)} bytes; at most {MOST_BYTES} are read"
                )
            form = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(form, source)
            self._known[source, key] = MessageLayout.unpack(form.numpy().tobytes())
        received = []
        for layout in self._known[source, key].tensors:
            tensor = torch.empty(layout.shape, dtype=layout.dtype, device=self.device)
            if tensor.numel():
                work = dist.irecv(tensor, source, group=self.edges[source, self.rank])
                assert work is not None, "this process is a member of the edge"
                work.wait()
            received.append(tensor)
        return tuple(received)

    def add_up(self, tensor: Tensor, group: str) -> Tensor:
        """Sums in place over the members' GPUs."""
        dist.all_reduce(tensor, group=self.groups[group])
        self.carried.add_up(group, self.groups[group].size(), tensor)
        return tensor

    def reduce_scatter(self, vector: Tensor, group: str) -> Tensor:
        """Sums over the members' GPUs."""
        self.carried.reduce_scatter(group, self.groups[group].size(), vector)
        return reduce_scatter(vector, self.groups[group])

    def all_gather(self, run: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """Gathers from the members' GPUs."""
        self.carried.all_gather(group, self.groups[group].size(), run)
        return all_gather(run, self.groups[group], out)

    def all_to_all(self, rows: Tensor, group: str, counts: Counts) -> Tensor:
        """Exchanges rows between the members' GPUs."""
        self.carried.all_to_all(group, self.groups[group].rank(), rows, counts)
        return all_to_all(rows, self.groups[group], counts)

    def traffic(self) -> tuple[int, int]:
        """Returns the messages and bytes that this rank has sent."""
        return self.carried.total()
