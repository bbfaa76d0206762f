"""Evaluation mode for the duration of a `with` block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(*parts: object) -> Iterator[None]:
    """Puts those parts that are modules into evaluation mode; restores the mode of each inner module on exit."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    before = [(inner, inner.training) for module in modules for inner in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for module, training in before:
            module.training = training
