"""Keeps cores busy while a model is measured, as the other workers of a host will while it is trained.

Cores share caches, memory and clock, and often two of them are one: beside others a worker takes longer than alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SIDE = 384
"""Of the matrices that are multiplied: a millisecond or more without the interpreter."""


@contextmanager
def background_load(num_threads: int) -> Iterator[None]:
    """Keeps so many threads at work until the end."""
    own, is_over = torch.get_num_threads(), threading.Event()
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
    torch.set_num_threads(own)  # each thread has a number of its own, and new ones get the last that was set
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
