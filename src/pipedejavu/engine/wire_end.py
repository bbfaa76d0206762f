"""What this rank can share with others, and how ranks tell each other."""

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from pipedejavu.engine.wire_choice import WireEnd
from pipedejavu.runtime.cuda_ipc import can_share, visible_gpus
from pipedejavu.runtime.peer_socket import PeerListener

MOST_BYTES = 1 << 16
"""Limit on what a rank tells about itself."""
_NAMESPACES = ("net", "pid", "user")


def describe_end(device: torch.device, listener: PeerListener | None) -> WireEnd:
    """Returns what this rank tells the others; `listener` accepts their connections."""
    gpu, reachable = "", tuple[str, ...]()
    if device.type == "cuda":
        gpus, index = visible_gpus(), device.index or 0
        gpu = gpus[index]
        reachable = tuple(
            other for n, other in enumerate(gpus) if n == index or torch.cuda.can_device_access_peer(index, n)
        )
    return WireEnd(
        host=_host(),
        device="gpu" if gpu else "cpu",
        gpu=gpu,
        reachable=reachable,
        shares_memory=listener is not None,
        shares_gpu=bool(gpu) and listener is not None and can_share(device),
        has_nccl=bool(gpu) and dist.is_nccl_available(),
        name=listener.address.name if listener else "",
        secret=listener.address.secret if listener else "",
    )


def open_listener() -> PeerListener | None:
    """Returns a listener for connections of other processes of this host; None if the system has no such sockets."""
    has_files = sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(socket, "recv_fds")
    return PeerListener() if has_files else None


def gather_ends(end: WireEnd) -> list[WireEnd]:
    """Returns what each rank tells; all ranks call it."""
    data = end.to_json().encode()
    assert len(data) <= MOST_BYTES
    size = max(_gathered(torch.tensor([len(data)])), key=int)
    padded = torch.frombuffer(bytearray(data.ljust(int(size))), dtype=torch.uint8)
    return [WireEnd.from_json(part.numpy().tobytes().decode()) for part in _gathered(padded)]


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


def _host() -> str:
    """Returns a name that two processes share if they run on one system, in the same namespaces, as the same user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in _NAMESPACES]  # noqa: PTH116
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
    return "/".join((boot, *spaces, str(os.geteuid())))
