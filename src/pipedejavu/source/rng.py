"""The generators of torch, Python and numpy: seeded for a pass, seen whether they were drawn from, and put back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Puts back every generator that is seeded inside."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_all(number: int) -> None:
    """Gives every generator a state that depends on the number of a pass alone."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def drawn_since(number: int) -> tuple[str, ...]:
    """Returns the generators of Python and numpy that were drawn from since they were seeded."""
    python, numpy = random.getstate(), np.random.get_state()
    seed_all(number)
    fresh: Any = np.random.get_state()
    is_numpy = not all(np.array_equal(one, other) for one, other in zip(numpy, fresh, strict=True))
    found = {"Python's random": python != random.getstate(), "numpy.random": is_numpy}
    return tuple(name for name, is_drawn in found.items() if is_drawn)
