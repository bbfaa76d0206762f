"""The store through which the workers of one host meet and report: a TCPStore in the launcher's memory.

It needs no disk, and listens on loopback only; by default a TCPStore listens on all interfaces.
"""

import socket

from torch._C._distributed_c10d import TCPStore

HOST = "127.0.0.1"


def serve_store() -> TCPStore:
    """Returns a new store on a free loopback port; it ends with this process."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(port: int) -> TCPStore:
    """Returns a new connection to the store; a blocking `get()` on one connection does not delay the others."""
    return TCPStore(HOST, port, is_master=False, wait_for_workers=False)
