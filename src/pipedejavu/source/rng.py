"""The random generators of torch, Python and numpy: seeding, restoring, and detecting draws."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restores all generators on exit."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_all(number: int) -> None:
    """Seeds all generators; numpy's takes 32 bits of the number."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def drawn_since(number: int) -> tuple[str, ...]:
    """Returns which of Python's and numpy's generators were used since `seed_all(number)`; seeds them again."""
    python, numpy = random.getstate(), np.random.get_state()
    seed_all(number)
    fresh: Any = np.random.get_state()
    is_numpy = not all(np.array_equal(one, other) for one, other in zip(numpy, fresh, strict=True))
    drawn = {"Python's random": python != random.getstate(), "numpy.random": is_numpy}
    return tuple(name for name, is_drawn in drawn.items() if is_drawn)
