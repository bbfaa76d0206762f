"""Measures the last unit with its linear head and cross-entropy in chunks of tokens, if it ends in these."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, Protocol

import torch
from torch import nn

from pipedejavu.facts import HeadForm
from pipedejavu.profile.operator_count import UnitWork, count_step
from pipedejavu.profile.unit_step import LossHead, NullMeter, StepMeter, run_step, tensors_of
from pipedejavu.runtime.deferred_head import DeferringUnit
from pipedejavu.runtime.deferred_logits import HeadUse

CHUNKS = (4, 16)
"""Numbers of chunks that are measured, beside 1."""
TIMED_BYTES = 32 << 20
"""Logits of this size are timed in chunks; for smaller ones, which no plan needs to divide, only bytes are counted."""
_PASSES = 5
_TIMED = ("forward", "backward")


class Watch(StepMeter, Protocol):
    """Times the parts of a step."""

    def time_s(self, name: str) -> float:
        """Returns the time of a part."""


def measure_head(
    module: nn.Module,
    value: Any,
    head: LossHead,
    *,
    is_first: bool,
    kind: str,
    device: torch.device,
    work: UnitWork,
    samples: int,
    watch: Callable[[], Watch],
    is_timed: bool = True,
) -> tuple[HeadForm, ...]:
    """Returns the unit in 1, 4 and 16 chunks; empty if it has no head that could run in chunks.

    `work` is the counted work of the unit, and `watch` makes a stopwatch for one pass. Unless `is_timed`, only bytes
    are counted.
    """
    unit, use = copy.deepcopy(module).to(device), HeadUse(CHUNKS[-1], is_early=False)
    try:
        run_step(DeferringUnit(unit, use), value, head, is_first, NullMeter())
    except torch.OutOfMemoryError:  # it has no head that chunks make smaller
        return ()
    if not use.num_losses or use.reads:
        return ()
    units = {1: unit} | {chunks: DeferringUnit(unit, HeadUse(chunks, is_early=False)) for chunks in CHUNKS}
    works = {1: work} | {chunks: count_step(units[chunks], value, head, is_first) for chunks in CHUNKS}
    output_bytes, logits_bytes = sum(t.nbytes for t in tensors_of(work.output)), use.num_logits * use.itemsize
    ratios: dict[int, dict[str, float]] = {chunks: {} for chunks in units}
    if is_timed and logits_bytes >= TIMED_BYTES:
        with suppress(torch.OutOfMemoryError):  # one chunk needs more than the device has: bytes alone are known
            ratios = _time_ratios(units, value, head, is_first, watch)
    return tuple(
        HeadForm(
            chunks=chunks,
            forward={kind: ratios[chunks]["forward"]} if ratios[chunks] else {},
            backward={kind: ratios[chunks]["backward"]} if ratios[chunks] else {},
            activation_bytes=counted.saved_bytes / samples,
            activation_parts=tuple(size / samples for size in counted.saved),
            forward_work_bytes=counted.forward_work_bytes / samples,
            backward_work_bytes=counted.backward_work_bytes / samples,
            boundary_bytes=max(0, output_bytes - (logits_bytes if chunks > 1 else 0)) / samples,
        )
        for chunks, counted in works.items()
    )


def _time_ratios(
    units: Mapping[int, nn.Module], value: Any, head: LossHead, is_first: bool, watch: Callable[[], Watch]
) -> dict[int, dict[str, float]]:
    """Times each form in turn; returns its times as multiples of those in one chunk."""
    times: dict[int, dict[str, list[float]]] = {chunks: {part: [] for part in _TIMED} for chunks in units}
    for number in range(_PASSES):
        for chunks, unit in units.items():
            stopwatch = watch()
            run_step(unit, value, head, is_first, stopwatch)
            for part in _TIMED if number else ():  # the first pass warms up
                times[chunks][part].append(stopwatch.time_s(part))
    medians = {chunks: {part: median(taken) for part, taken in parts.items()} for chunks, parts in times.items()}
    whole = medians[1]
    return {
        chunks: {part: max(1e-3, time_s / whole[part]) if whole[part] else 1.0 for part, time_s in parts.items()}
        for chunks, parts in medians.items()
    }


def merge_forms(profiles_forms: Sequence[tuple[HeadForm, ...]], sizes_of: int) -> tuple[HeadForm, ...]:
    """Joins the forms of one head from several kinds of devices; bytes are those at the index `sizes_of`."""
    if not profiles_forms or not all(profiles_forms):
        return ()
    merged = []
    for number, form in enumerate(profiles_forms[sizes_of]):
        same = [forms[number] for forms in profiles_forms]
        forward = {kind: ratio for other in same for kind, ratio in other.forward.items()}
        backward = {kind: ratio for other in same for kind, ratio in other.backward.items()}
        merged.append(form.replace(forward=forward, backward=backward))
    return tuple(merged)
