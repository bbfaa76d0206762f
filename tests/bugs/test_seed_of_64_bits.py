"""Evaluations of `train` runs with a seed of more than 32 bits ended with a ValueError of numpy."""

import random

import numpy as np
import torch

from pipedejavu.source.rng import preserve_rng, seed_all


def test_all_generators_take_a_seed_of_64_bits_and_depend_on_it() -> None:
    def draws(seed: int) -> tuple[float, float, float]:
        seed_all(seed)
        return float(torch.rand(())), random.random(), float(np.random.random())

    with preserve_rng(torch.device("cpu")):
        large, again, other = draws(2**63 - 1), draws(2**63 - 1), draws(2**63 - 2)
    assert large == again
    assert all(one != two for one, two in zip(large, other, strict=True))
