"""Private sources of random numbers, each a pure function of its key.

Nothing in this room draws from torch's global generator, except dropout, whose masks the caller seeds.
"""

from hashlib import blake2b

import torch


def generator(*key: int | str) -> torch.Generator:
    """Returns a CPU generator whose numbers depend on `key` alone, not on what was drawn before."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    made = torch.Generator(device="cpu")
    made.manual_seed(int.from_bytes(digest) >> 1)
    return made
