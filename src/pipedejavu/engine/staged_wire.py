"""The wire of a worker on a GPU over one of the host: copies through pinned memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipedejavu.engine.device import CPU, moved
from pipedejavu.engine.wire import Key, Wire
from pipedejavu.runtime.traffic import Counts


@dataclass(frozen=True)
class StagedWire:
    """The wire of a worker on a GPU: copies through pinned host memory."""

    wire: Wire
    device: torch.device

    def send(self, tensors: tuple[Tensor, ...], to: int, key: Key) -> None:
        """Copies to the host, then sends."""
        self.wire.send(on_host(tensors, self.device), to, key)

    def expect(self, source: int, key: Key) -> None:
        """Forwards to the wrapped wire."""
        self.wire.expect(source, key)

    def receive(self, source: int, key: Key) -> tuple[Tensor, ...]:
        """Receives, then copies to the device."""
        received: tuple[Tensor, ...] = moved(self.wire.receive(source, key), self.device)
        return received

    def add_up(self, tensor: Tensor, group: str) -> Tensor:
        """Sums on the hosts."""
        (on_cpu,) = on_host((tensor,), self.device)
        return self.wire.add_up(on_cpu, group).to(tensor.device, non_blocking=True)

    def push_pull(self, vector: Tensor, group: str) -> Tensor:
        """Sums on the hosts."""
        (on_cpu,) = on_host((vector,), self.device)
        return self.wire.push_pull(on_cpu, group).to(vector.device, non_blocking=True)

    def serve(self, group: str) -> None:
        """Sums on the host."""
        self.wire.serve(group)

    def reduce_scatter(self, vector: Tensor, group: str) -> Tensor:
        """Sums on the hosts."""
        (on_cpu,) = on_host((vector,), self.device)
        return self.wire.reduce_scatter(on_cpu, group).to(vector.device, non_blocking=True)

    def all_gather(self, run: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """Gathers on the hosts."""
        (on_cpu,) = on_host((run,), self.device)
        whole = self.wire.all_gather(on_cpu, group)
        return whole.to(run.device, non_blocking=True) if out is None else out.copy_(whole, non_blocking=True)

    def all_to_all(self, rows: Tensor, group: str, counts: Counts | None = None) -> Tensor:
        """Exchanges rows between the hosts."""
        (on_cpu,) = on_host((rows,), self.device)
        return self.wire.all_to_all(on_cpu, group, counts).to(rows.device, non_blocking=True)

    def traffic(self) -> tuple[int, int]:
        """Forwards to the wrapped wire."""
        return self.wire.traffic()

    def is_issued(self, lane: str) -> bool:  # noqa: ARG002
        """Returns False: the host copies."""
        return False

    def flush(self) -> None:
        """Forwards to the wrapped wire."""
        self.wire.flush()

    def stop(self) -> None:
        """Forwards to the wrapped wire."""
        self.wire.stop()


def staged(wire: Wire, device: torch.device) -> Wire:
    """Returns a wire of the host as the wire of a worker on a device."""
    return wire if device == CPU else StagedWire(wire, device)


def on_host(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Returns tensors of a GPU in pinned host memory, after waiting for the copies."""
    copies: tuple[Tensor, ...] = moved(tensors, CPU)
    torch.cuda.current_stream(device).synchronize()
    return copies
