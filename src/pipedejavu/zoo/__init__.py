"""Reference models that ship with the project; so far by their shape alone."""

from pipedejavu.zoo.shape import SHAPES, estimate_profile

__all__ = ["SHAPES", "estimate_profile"]
