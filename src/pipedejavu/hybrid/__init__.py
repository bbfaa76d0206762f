"""One GPU and its CPU as one machine: exact AdamW on both their memories, inside the user's own loop."""

from pipedejavu.hybrid.hybrid_adamw import HybridAdamW

__all__ = ["HybridAdamW"]
