"""Background load: keeps cores busy while a model is measured, as a host's other workers do during training.

Cores share caches, memory bandwidth and clock frequency, and two logical cores are often one physical core; so a worker
is slower beside others than alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SIDE = 384
"""Side of the matrices that are multiplied: each product takes a millisecond or more outside the interpreter lock."""


@contextmanager
def background_load(num_threads: int) -> Iterator[None]:
    """Keeps `num_threads` threads busy inside the `with` block."""
    num_before, is_over = torch.get_num_threads(), threading.Event()
    started = threading.Barrier(num_threads + 1)

    def work() -> None:
        torch.set_num_threads(1)
        factor, product = torch.ones(SIDE, SIDE), torch.empty(SIDE, SIDE)
        started.wait()
        while not is_over.is_set():
            torch.mm(factor, factor, out=product)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    started.wait()
    torch.set_num_threads(num_before)  # the setting is per thread, and new threads inherit the last one
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
