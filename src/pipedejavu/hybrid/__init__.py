"""HybridAdamW: exact AdamW with its state in GPU and host memory, inside the user's own training loop."""

from pipedejavu.hybrid.hybrid_adamw import HybridAdamW

__all__ = ["HybridAdamW"]
