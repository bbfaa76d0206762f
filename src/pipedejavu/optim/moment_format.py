"""The formats in which AdamW's moments rest: float32, bf16, or 8 bits per value with a float32 scale per block.

An update computes with float32 and rounds its results when it writes them. With beta2 = 0.999 a second moment changes
by a thousandth per step, which is less than half a unit of either format: rounded to the nearest it would stay where
it is. So results are rounded up or down at random, with the probabilities that make the mean exact. The random
bits are a hash of the element's index and of the step, so every implementation draws the same ones.

    bf16    the upper 16 of the 32 bits
    int8    3 bits of the mantissa; the exponent counts down from the largest one of 256 consecutive values
            m: a sign, 4 bits of exponent: down to 2^-15 of the largest, below that zero
            v: 5 bits of exponent: down to 2^-31 of the largest; a value above zero never becomes zero

The scale of a block is the power of two with its largest exponent. All operations are on integers, and exact.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

MomentFormat = Literal["fp32", "bf16", "int8"]
MOMENT_FORMATS: tuple[MomentFormat, ...] = ("fp32", "bf16", "int8")
SCALE_BLOCK = 256
"""Values per scale of an int8 moment."""
_INFINITY, _MAGNITUDE, _WORD = 0x7F800000, 0x7FFFFFFF, 0xFFFFFFFF
_TOP = {torch.int8: 127, torch.uint8: 255}
"""The largest code of a block: all bits of exponent and mantissa."""


class Moments(NamedTuple):
    """Both moments of a parameter, one-dimensional: float32 or bf16; or codes, with their scales."""

    m: Tensor
    v: Tensor
    m_scale: Tensor | None = None
    v_scale: Tensor | None = None


def moment_parts(form: MomentFormat, numel: int) -> Iterator[tuple[torch.dtype, int]]:
    """Yields dtype and number of elements of the tensors of both moments, in the order of `Moments`."""
    if form != "int8":
        dtype = torch.float32 if form == "fp32" else torch.bfloat16
        yield from ((dtype, numel), (dtype, numel))
        return
    yield from ((torch.int8, numel), (torch.uint8, numel))
    yield from ((torch.float32, num_scales(numel)),) * 2


def num_scales(numel: int) -> int:
    """Returns the number of blocks of a parameter."""
    return -(-numel // SCALE_BLOCK)


def moment_bytes(form: MomentFormat, numel: int) -> int:
    """Returns the bytes of both moments of a parameter."""
    return sum(dtype.itemsize * count for dtype, count in moment_parts(form, numel))


def zero_moments(form: MomentFormat, numel: int, device: torch.device | None = None) -> Moments:
    """Returns the moments of a parameter before its first update."""
    return Moments(*(torch.zeros(count, dtype=dtype, device=device) for dtype, count in moment_parts(form, numel)))


def widened(moment: Tensor, scale: Tensor | None) -> Tensor:
    """Returns the float32 values of a moment."""
    if scale is None:
        return moment.float()
    code, top = moment.to(torch.int32), _TOP[moment.dtype]
    exponents = (scale.view(torch.int32) >> 23).repeat_interleave(SCALE_BLOCK)[: code.numel()].view(code.shape)
    magnitude = code & top
    bits = torch.where(magnitude == 0, 0, (magnitude + 8 * exponents + 7 - top) << 20)
    return (bits | ((code & 128) << 24 if moment.dtype == torch.int8 else 0)).view(torch.float32)


def write_moments(m: Tensor, v: Tensor, new: Moments, seed: int) -> None:
    """Rounds float32 moments into the format of `new`; `seed` is that of the update."""
    if new.m.dtype == torch.float32:
        new.m.copy_(m)
        new.v.copy_(v)
        return
    noise = random_bits(m.numel(), seed, m.device).view(m.shape)
    if new.m_scale is None or new.v_scale is None:
        _write_bf16(m, new.m, (noise >> 16) & 0xFFFF, least=0)
        _write_bf16(v, new.v, noise & 0xFFFF, least=1)
    else:
        noise = noise.view(-1)
        _write_codes(m.reshape(-1), new.m.view(-1), new.m_scale, (noise >> 12) & 0xFFFFF, least=0)
        _write_codes(v.reshape(-1), new.v.view(-1), new.v_scale, noise & 0xFFFFF, least=1)


def convert_moments(source: Moments, target: Moments) -> None:
    """Copies moments into another format, rounded to the nearest; what the format can hold stays as it is."""
    if source.m.dtype == target.m.dtype:
        for old, new in zip(source, target, strict=True):
            if old is not None and new is not None:
                new.copy_(old.reshape(new.shape))
        return
    m, v = (widened(code.reshape(-1), scale) for code, scale in zip(source[:2], source[2:], strict=True))
    m, v = m.to(target.m.device), v.to(target.v.device)
    if target.m_scale is not None and target.v_scale is not None:
        half = torch.full((), 0x80000, dtype=torch.int32, device=m.device)
        _write_codes(m, target.m.view(-1), target.m_scale, half, least=0)
        _write_codes(v, target.v.view(-1), target.v_scale, half, least=1)
    else:
        target.m.copy_(m.view(target.m.shape))
        target.v.copy_(v.view(target.v.shape))


def seed_of(step: int) -> int:
    """Returns the seed of the random bits of an update."""
    h = step & _WORD
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & _WORD
    return h ^ (h >> 16)


def random_bits(numel: int, seed: int, device: torch.device | None = None) -> Tensor:
    """Returns 32 random bits per element, as int32."""
    h = (torch.arange(numel, device=device) + seed) & _WORD
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & _WORD
    h = h ^ (h >> 16)
    return (h - ((h >> 31) << 32)).to(torch.int32)


def _split_sign(value: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns sign, magnitude, and magnitude with noise added, as bits; infinities and NaN get none."""
    bits = value.contiguous().view(torch.int32)
    magnitude = bits & _MAGNITUDE
    return (bits >> 31) & 1, magnitude, magnitude + torch.where(magnitude < _INFINITY, noise, 0)


def _write_bf16(value: Tensor, out: Tensor, noise: Tensor, *, least: int) -> None:
    sign, magnitude, noisy = _split_sign(value, noise)
    upper = torch.maximum(noisy >> 16, (magnitude > 0).int() * least)
    out.copy_((upper | (sign << 15)).to(torch.int16).view(torch.bfloat16))


def _write_codes(value: Tensor, out: Tensor, scale: Tensor, noise: Tensor, *, least: int) -> None:
    """Writes the codes and scales of a moment."""
    top, numel = _TOP[out.dtype], value.numel()
    if not numel:
        return
    sign, magnitude, noisy = _split_sign(value, noise)
    blocks = pad(noisy, (0, -numel % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    exponent = (blocks.amax(1) >> 23).clamp(min=(top - 7) // 8)
    scale.copy_((exponent << 23).view(torch.float32))
    first = (8 * exponent + 7 - top).repeat_interleave(SCALE_BLOCK)[:numel]
    code = torch.maximum((noisy >> 20) - first, (magnitude > 0).int() * least)
    out.copy_((code | (sign << 7) if top == 127 else code).to(torch.uint8).view(out.dtype))
