"""The order in which a worker's lanes are shown: compute, then copies, then network."""

from collections.abc import Iterable

COMPUTE = "compute"
_LOCAL = (COMPUTE, "copy-in", "copy-out", "host")
_NETWORK = ("net>", "net<", "net*", "net")


def is_network(lane: str) -> bool:
    """Whether a lane moves data between workers."""
    return lane.startswith("net")


def sort_lanes(lanes: Iterable[str]) -> list[str]:
    """Sorts lane names: compute, copies, host, unknown lanes, sends, receives, collectives."""
    return sorted(lanes, key=_rank)


def _rank(lane: str) -> tuple[int, int, str]:
    if lane in _LOCAL:
        return _LOCAL.index(lane), 0, lane
    if not is_network(lane):
        return len(_LOCAL), 0, lane
    group = next(i for i, prefix in enumerate(_NETWORK) if lane.startswith(prefix))
    peer = lane[4:]
    return len(_LOCAL) + 1 + group, int(peer) if peer.isdecimal() else 0, lane
