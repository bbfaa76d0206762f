"""Which wire the tensors between two ranks take, and the sums of a group: a pure function of what the ranks are.

cuda-ipc        GPU memory that processes of one host map: one GPU, or GPUs that reach each other
nccl            GPUs of different hosts, or that cannot be mapped; NCCL refuses two ranks on one GPU
shared-memory   processes of one host, at least one on a CPU; a GPU's end copies through pinned memory
gloo            all else
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import combinations
from typing import Literal, NamedTuple

from pipedejavu.facts import Record


class WireKind(StrEnum):
    """How tensors pass between ranks."""

    CUDA_IPC = "cuda-ipc"
    NCCL = "nccl"
    SHARED_MEMORY = "shared-memory"
    GLOO = "gloo"

    @property
    def is_in_memory(self) -> bool:
        """Whether the ranks map each other's memory."""
        return self in (WireKind.CUDA_IPC, WireKind.SHARED_MEMORY)

    @property
    def is_on_gpu(self) -> bool:
        """Whether tensors never leave the GPUs, so that transfers are issued to streams."""
        return self in (WireKind.CUDA_IPC, WireKind.NCCL)


class WireEnd(Record):
    """What one rank tells the others about itself."""

    host: str
    """The running system and its namespaces: ranks with the same one can pass open files to each other."""
    device: Literal["cpu", "gpu"]
    gpu: str = ""
    """The UUID of the rank's GPU."""
    reachable: tuple[str, ...] = ()
    """GPUs whose memory the rank's GPU can read, as far as its process sees them; its own among them."""
    shares_memory: bool = False
    """Whether the rank can share host memory: Linux has memory files and abstract sockets."""
    shares_gpu: bool = False
    """Whether the rank's GPU can export memory and events."""
    has_nccl: bool = False
    name: str = ""
    """The name of the socket on which the rank listens."""
    secret: str = ""
    """What a rank that connects must know."""


class WireChoice(NamedTuple):
    """A wire, and why it was chosen."""

    kind: WireKind
    reason: str


def choose_wire(one: WireEnd, other: WireEnd) -> WireChoice:
    """Returns the wire between two ranks; the same whichever comes first."""
    return choose_group_wire((one, other))


def choose_group_wire(ends: Sequence[WireEnd]) -> WireChoice:
    """Returns the wire for the sums of a group."""
    on_one_host = len({end.host for end in ends}) == 1
    on_gpus = all(end.device == "gpu" for end in ends)
    can_share = on_one_host and all(end.shares_memory for end in ends)
    if can_share and on_gpus and all(_can_map(one, other) for one, other in combinations(ends, 2)):
        is_one = len({end.gpu for end in ends}) == 1
        reason = "the ranks share one GPU" if is_one else "the ranks map each other's GPU memory"
        return WireChoice(WireKind.CUDA_IPC, reason)
    if on_gpus and _can_use_nccl(ends):
        why = "cannot map each other's GPU" if can_share else "are not processes of one host"
        return WireChoice(WireKind.NCCL, f"the ranks have different GPUs and {why}")
    if can_share:
        why = "cannot map each other's GPU" if on_gpus else "are not all on GPUs"
        return WireChoice(WireKind.SHARED_MEMORY, f"the ranks are processes of one host and {why}")
    if on_one_host:
        return WireChoice(WireKind.GLOO, "this system has no memory files or no abstract sockets")
    return WireChoice(WireKind.GLOO, "the ranks are not processes of one host")


def _can_use_nccl(ends: Sequence[WireEnd]) -> bool:
    """Whether all ranks have NCCL and no two of them one GPU, which NCCL refuses."""
    return len({end.gpu for end in ends}) == len(ends) and all(end.has_nccl for end in ends)


def _can_map(one: WireEnd, other: WireEnd) -> bool:
    can_share = one.shares_gpu and other.shares_gpu
    return can_share and one.gpu in other.reachable and other.gpu in one.reachable
