"""How much memory ranks of one host map to exchange tensors; the runtime allocates by it, and forecasts count it."""

PAGE_BYTES = 1 << 16
"""Mapped memory is a multiple of this."""
MOST_SLOTS = {"cpu": 4, "gpu": 2}
"""Messages of a channel that may be sent and not received; a GPU has few because slots take its memory."""
PART_BYTES = 32 << 20
"""Size of the largest part of a vector that is added at a time; a member has two regions of this size at most."""


def paged(size_bytes: float) -> int:
    """Returns the bytes of mapped memory that hold this many."""
    return -(-int(size_bytes) // PAGE_BYTES) * PAGE_BYTES
