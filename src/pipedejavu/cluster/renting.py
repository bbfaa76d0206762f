"""Rents servers for jobs that do not fit on those that are on, and gives them back when they are empty."""

from pipedejavu.cluster.cluster_job import Share
from pipedejavu.cluster.cluster_state import ClusterState
from pipedejavu.cluster.server_pool import ServerPart, ServerPool
from pipedejavu.facts import Record
from pipedejavu.facts.quantity import Seconds


class RentedTime(Record):
    """A time in which a rented server was paid for."""

    server: int
    start_s: Seconds
    end_s: Seconds


class Renting:
    """The servers that may be rented, and since when those in use are."""

    def __init__(self, state: ClusterState):
        self.state = state
        servers = state.pool.servers
        self.known = sorted((s.price_per_hour, n) for n, s in enumerate(servers) if s.is_rented)
        self.since_s: dict[int, float] = {}
        self.times: list[RentedTime] = []

    def review(self) -> None:
        """Rents what the waiting jobs need, the cheapest first, and gives back empty servers that no job waits for."""
        state = self.state
        if not state.waiting:
            for server in [n for n in self.since_s if state.pool.is_on[n] and state.pool.is_empty(n)]:
                self.give_back(server)
            return
        coming = state.pool.copy()
        for _, server in self.known:
            coming.is_on[server] = server in self.since_s
        for choice in state.rank(list(state.waiting)):
            run = state.runs[choice.number]
            shares = [s for kind in choice.kinds for s in state.shares(run, kind, run.job.gpu_milli)]
            parts = next((p for share in shares if (p := coming.find(share)) is not None), None)
            if parts is None:
                parts = self._rent(shares, coming)
            if parts is not None:
                coming.take(parts)

    def _rent(self, shares: list[Share], coming: ServerPool) -> list[ServerPart] | None:
        """Rents the cheapest server on which one of the shares fits; returns its place there."""
        for _, server in self.known:
            if server in self.since_s:
                continue
            alone = coming.only(server)
            parts = next((p for share in shares if (p := alone.find(share)) is not None), None)
            if parts is not None:
                self.since_s[server] = self.state.now_s
                coming.is_on[server] = True
                self.state.push(self.state.now_s + self.state.options.rent_start_s, "on", server)
                return parts
        return None

    def give_back(self, server: int) -> None:
        """Ends the rent of a server."""
        self.state.pool.is_on[server] = False
        self.times.append(RentedTime(server=server, start_s=self.since_s.pop(server), end_s=self.state.now_s))
