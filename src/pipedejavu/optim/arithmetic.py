"""AdamW as a fixed sequence of operations, each rounded once: the reference that all implementations equal bit by bit.

The host's native code and the GPU's kernel do the same operations in the same order, without fused multiply-add, so
the bits of a parameter do not depend on where its state rests. If one of them is missing, the functions here are used.

The float32 master of a bf16 weight is kept as two halves. The high half is the weight that the model computes with:
the master rounded to the nearest bf16, ties away from zero. The low half is the remainder as a signed 16-bit integer.
`master bits = (high bits << 16) + low`, exactly. The weight is computed from the new moments before they are rounded to
the format in which they rest.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from pipedejavu.optim.moment_format import Moments, seed_of, widened, write_moments


class Scalars(NamedTuple):
    """The scalar factors of one update, computed in double precision; kernels take them as float32."""

    scale: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    unroot2: float
    eps: float
    decay: float
    rate: float
    seed: int = 0
    """Of the random bits with which moments of fewer bits are rounded."""


class AdamState(NamedTuple):
    """What an update of one parameter reads and writes: one-dimensional tensors on one device."""

    weight: Tensor
    """bf16, the high half of the master; or float32, the master itself."""
    low: Tensor | None
    """int16, the low half of the master of a bf16 weight."""
    m: Tensor
    v: Tensor
    m_scale: Tensor | None = None
    """float32, a scale for each block of int8 moments."""
    v_scale: Tensor | None = None

    @property
    def moments(self) -> Moments:
        """Both moments, in the format in which they rest."""
        return Moments(*self[2:])


class Part(IntEnum):
    """What an update writes: all of the state, or the weights first and the moments later from the same gradient."""

    ALL = 0
    WEIGHTS = 1
    MOMENTS = 2


def scalars_of(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, scale: float
) -> Scalars:
    """Returns the factors of update number `step` of a parameter, counted from 1."""
    beta1, beta2 = betas
    return Scalars(
        scale=scale,
        beta1=beta1,
        rest1=1 - beta1,
        beta2=beta2,
        rest2=1 - beta2,
        unroot2=1 / math.sqrt(1 - beta2**step),
        eps=eps,
        decay=1 - lr * weight_decay,
        rate=lr / (1 - beta1**step),
        seed=seed_of(step),
    )


def update_(s: Scalars, gradient: Tensor, old: AdamState, new: AdamState, part: Part = Part.ALL) -> None:
    """Updates the state `old` and writes the result, or a part of it, to `new`, which may be the same tensors."""
    x = gradient.float() * s.scale
    m = widened(old.m, old.m_scale) * s.beta1 + x * s.rest1
    v = widened(old.v, old.v_scale) * s.beta2 + (x * s.rest2) * x
    if part != Part.MOMENTS:
        d = _root(v) * s.unroot2 + s.eps
        w = (old.weight if old.low is None else join(old.weight, old.low)) * s.decay - (m / d) * s.rate
        _write_master(w, new)
    if part != Part.WEIGHTS:
        write_moments(m, v, new.moments, s.seed)


def _write_master(w: Tensor, new: AdamState) -> None:
    """Writes a float32 master to a weight, or to the two halves of one."""
    if new.low is None:
        new.weight.copy_(w)
    else:
        high, low = split(w)
        new.weight.copy_(high)
        new.low.copy_(low)


def _root(v: Tensor) -> Tensor:
    """Returns the correctly rounded square root; torch's own may be wrong in the last bit on a CPU."""
    return v.sqrt() if v.device.type != "cpu" else torch.from_numpy(numpy.sqrt(v.numpy()))


def join(high: Tensor, low: Tensor) -> Tensor:
    """Returns the float32 master from its two halves."""
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bf16 high half and the 16-bit low half of a float32 master."""
    bits = master.view(torch.int32)
    low = bits.to(torch.int16)
    return ((bits - low.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16), low
