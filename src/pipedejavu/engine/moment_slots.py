"""The moments of AdamW among the slots of a parameter's state: their names, their zeros, and changes of their format.

m, v                              float32, float64 or bf16
m_code, v_code, m_scale, v_scale  int8, with a scale per block of values in the order of the parameter's elements
"""

import torch
from torch import Tensor

from pipedejavu.optim.moment_format import MomentFormat, Moments, convert_moments, widened, write_moments, zero_moments

WIDE_SLOTS = "m", "v"
CODE_SLOTS = "m_code", "v_code", "m_scale", "v_scale"

Slots = dict[str, Tensor]


def slot_names(form: MomentFormat) -> tuple[str, ...]:
    """Returns the slots of moments in a format."""
    return CODE_SLOTS if form == "int8" else WIDE_SLOTS


def moments_in(slots: Slots) -> Moments | None:
    """Returns the moments of a parameter, or None before its first update."""
    for names in (CODE_SLOTS, WIDE_SLOTS):
        if names[0] in slots:
            return Moments(*(slots[name] for name in names))
    return None


def format_of(moments: Moments) -> MomentFormat:
    """Returns the format of moments; float64 counts as fp32, which rounds nothing either."""
    if moments.m_scale is not None:
        return "int8"
    return "bf16" if moments.m.dtype == torch.bfloat16 else "fp32"


def zero_slots(form: MomentFormat, gradient: Tensor) -> Slots:
    """Returns the moments of a parameter before its first update; in fp32 they have at least float32."""
    if form == "int8":
        zeros = zero_moments(form, gradient.numel(), gradient.device)
        return _named(zeros, gradient.shape)
    is_half = gradient.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.bfloat16 if form == "bf16" else torch.float32 if is_half else gradient.dtype
    return {name: torch.zeros_like(gradient, dtype=dtype) for name in WIDE_SLOTS}


def converted_slots(slots: Slots, form: MomentFormat, shape: torch.Size) -> Slots:
    """Returns slots with their moments in a format, rounded to the nearest; others stay as they are."""
    moments = moments_in(slots)
    if moments is None or format_of(moments) == form:
        return slots
    target = zero_moments(form, shape.numel(), moments.m.device)
    convert_moments(moments, target)
    rest = {name: tensor for name, tensor in slots.items() if name not in (*WIDE_SLOTS, *CODE_SLOTS)}
    return rest | _named(target, shape)


def widened_moments(moments: Moments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns moments to compute with: themselves if nothing is lost by that, or their values in `dtype`."""
    if format_of(moments) == "fp32":
        return moments.m, moments.v
    return widened(moments.m, moments.m_scale).to(dtype), widened(moments.v, moments.v_scale).to(dtype)


def store_moments(m: Tensor, v: Tensor, moments: Moments, seed: int) -> None:
    """Rounds what `widened_moments` returned, after an update, into the format of the moments."""
    if m is not moments.m:
        write_moments(m.float(), v.float(), moments, seed)


def _named(moments: Moments, shape: torch.Size) -> Slots:
    """Returns moments as slots; those with one element per weight have its shape."""
    names = CODE_SLOTS if moments.m_scale is not None else WIDE_SLOTS
    parts = (part for part in moments if part is not None)
    return {
        n: part.view(shape) if n in (*WIDE_SLOTS, *CODE_SLOTS[:2]) else part
        for n, part in zip(names, parts, strict=True)
    }
