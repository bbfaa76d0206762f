"""Measures the two rates of a device in a fraction of a second: one matrix product and one copy."""

from statistics import median

import torch

from pipedejavu.profile.predictor import known_efficiencies
from pipedejavu.profile.rates import INSIDE, Rates
from pipedejavu.profile.stopwatch import Stopwatch

_SIDE = {"cpu": 768, "cuda": 4096}
_COPIED_BYTES = 64 << 20
"""More than the caches of most cores hold."""
_PASSES = 4


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Returns what a device reaches in a format now, with the efficiencies of devices of its type inside a model."""
    side = _SIDE[device.type]
    factor = torch.ones(side, side, dtype=dtype, device=device)
    source = torch.ones(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    product_s, copy_s = list[float](), list[float]()
    for _ in range(_PASSES):
        watch = Stopwatch(device)
        with watch.part("product"):
            torch.mm(factor, factor)
        with watch.part("copy"):
            target.copy_(source)
        product_s.append(watch.time_s("product"))
        copy_s.append(watch.time_s("copy"))
    type_ = "gpu" if device.type == "cuda" else "cpu"
    inside, efficiency = INSIDE.get(type_, 1.0), known_efficiencies()[type_]
    return Rates(
        inside * 2 * side**3 / median(product_s[1:]), inside * 2 * _COPIED_BYTES / median(copy_s[1:]), efficiency
    )
