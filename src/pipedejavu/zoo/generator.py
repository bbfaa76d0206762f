"""Random number generators, each determined by its key.

Nothing in the zoo draws from torch's global generator, except dropout, whose masks the caller seeds.
"""

from hashlib import blake2b

import torch


def generator(*key: int | str) -> torch.Generator:
    """Returns a CPU generator whose numbers depend only on `key`, not on earlier draws."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    made = torch.Generator(device="cpu")
    made.manual_seed(int.from_bytes(digest) >> 1)
    return made
