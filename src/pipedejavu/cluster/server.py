"""The servers of a cluster as a scheduler sees them: GPUs of one kind, cores, memory, and a price."""

from collections.abc import Mapping
from typing import NamedTuple

from pipedejavu.cluster.cluster_job import MILLI
from pipedejavu.facts import InputError, Machine


class Server(NamedTuple):
    """One host; sizes in whole thousandths and bytes, so that sums are exact."""

    name: str
    kind: str
    """Kind of its GPUs, or of its CPU if it has none."""
    gpus: int
    cores_milli: int
    memory_bytes: int
    price_per_hour: float = 0.0
    is_rented: bool = False
    """Whether it costs nothing until a scheduler rents it."""


class ServerShape(NamedTuple):
    """What servers of one kind have at least, and the resources that go with one GPU."""

    gpus: int
    cores_milli: int
    memory_bytes: int

    def proportional(self, gpu_milli: int) -> tuple[int, int]:
        """Returns the cores and the memory that are the share of some GPUs."""
        if not self.gpus:
            return self.cores_milli, self.memory_bytes
        return self.cores_milli * gpu_milli // (MILLI * self.gpus), self.memory_bytes * gpu_milli // (MILLI * self.gpus)


def servers_of(
    machine: Machine, prices: Mapping[str, float] | None = None, *, rent_price: float | None = None
) -> list[Server]:
    """Returns a machine's hosts as servers; with a rent price they are rented by the hour."""
    prices = prices or {}
    servers = []
    for host in machine.hosts:
        devices = [device for device in machine.devices if device.host == host.name]
        gpus = [device for device in devices if device.type == "gpu"]
        cpus = [device for device in devices if device.type == "cpu"]
        kinds = sorted({device.kind for device in gpus})
        if len(kinds) > 1:
            raise InputError(
                f"host '{host.name}' has GPUs of {len(kinds)} kinds ({', '.join(kinds)}); jobs are placed on servers"
                " with one kind, so describe each kind as a host of its own"
            )
        if not devices:
            continue
        price = sum(prices.get(device.kind, 0.0) for device in devices) if rent_price is None else rent_price
        kind = kinds[0] if kinds else cpus[0].kind
        memory = sum(device.memory_bytes - device.reserved_bytes for device in cpus)
        servers.append(
            Server(host.name, kind, len(gpus), MILLI * host.cores, memory, price, is_rented=rent_price is not None)
        )
    return servers


def shapes_of(servers: list[Server]) -> dict[str, ServerShape]:
    """Returns the shape of each kind: the most GPUs on a server, and for each of them the least cores and memory."""
    shapes: dict[str, ServerShape] = {}
    for kind in sorted({server.kind for server in servers}):
        members = [server for server in servers if server.kind == kind]
        gpus = max(server.gpus for server in members)
        cores = min(s.cores_milli * gpus // s.gpus if s.gpus else s.cores_milli for s in members)
        memory = min(s.memory_bytes * gpus // s.gpus if s.gpus else s.memory_bytes for s in members)
        shapes[kind] = ServerShape(gpus, cores, memory)
    return shapes
