"""Counts the work of a unit's step: FLOP, bytes read and written, bytes saved for backward, temporary bytes."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.profile.expert_rows import ExpertRows, counted_rows
from pipedejavu.profile.meta_model import fake_copy, make_mode, meta_like
from pipedejavu.profile.operator_meter import OperatorMeter, OperatorWork, storage_id
from pipedejavu.profile.segment import refusal_of_branches
from pipedejavu.profile.unit_step import LossHead, detached, run_step, tensors_of


@dataclass(frozen=True)
class UnitWork:
    """The work of a unit on one microbatch."""

    parts: Mapping[str, tuple[OperatorWork, ...]]
    saved: tuple[int, ...]
    """Size of each storage that autograd saves in the forward, other than parameters and buffers."""
    saved_input_bytes: int
    """Saved bytes that belong to the unit's inputs."""
    saved_output_bytes: int
    """Saved bytes that belong to the unit's outputs."""
    pending_bytes: int
    """Bytes kept between the halves of a split backward."""
    pending_output_bytes: int
    """Part of them: gradients of the unit's outputs."""
    input_work_bytes: int
    """Peak of memory added in the first half while saved tensors are freed."""
    forward_work_bytes: int
    """Peak of temporary memory in the forward, beyond what remains after it."""
    backward_work_bytes: int
    """Peak of memory added in the backward while saved tensors are freed; gradients of weights do not count."""
    output: Any
    expert_rows: tuple[ExpertRows, ...] = ()
    """The rows that each of the unit's experts take."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd saves in the forward for the backward."""
        return sum(self.saved)

    @property
    def flop(self) -> int:
        """Floating-point operations of the forward."""
        return sum(work.flop for work in self.parts["forward"])

    def num_forward(self, class_: str) -> int:
        """Returns the number of operations of a class in the forward."""
        return sum(work.class_ == class_ for work in self.parts["forward"])


def count_step(module: nn.Module, value: Any, head: LossHead | None, is_first: bool) -> UnitWork:
    """Runs each part of a unit's step once and counts its work."""
    meter = OperatorMeter(module)
    try:
        with counted_rows(module, value) as rows:
            output = run_step(module, value, head, is_first, meter)
    except NotImplementedError as error:
        _, is_of_branches, text = str(error).partition("HigherOrderOperator ")
        if not is_of_branches:
            raise
        raise InputError(f"a {type(module).__name__} cannot run: {refusal_of_branches(text.split()[0])}") from None
    held = {storage_id(t) for t in (*module.parameters(), *module.buffers())}
    saved = {where: size for where, size in meter.saved.items() if where not in held}
    returned = {storage_id(t) for t in tensors_of(output)}
    forward = meter.changes["forward"]
    return UnitWork(
        parts={name: tuple(done) for name, done in meter.parts.items()},
        saved=tuple(saved.values()),
        saved_input_bytes=sum(size for where, size in saved.items() if where not in meter.made),
        saved_output_bytes=sum(size for where, size in saved.items() if where in returned and where in meter.made),
        pending_bytes=sum(meter.pending.values()),
        pending_output_bytes=sum(meter.pending[where] for where in meter.pending_outputs),
        input_work_bytes=_most(meter.changes.get("input_backward", [])),
        forward_work_bytes=_most(forward) - sum(size for _, size in forward),
        backward_work_bytes=_most(meter.changes.get("backward", [])),
        output=detached(output),
        expert_rows=tuple(rows.values()),
    )


class _SavedMeter:
    """Keeps what autograd saves in the forward of a unit that runs without a meter of its operations."""

    def __init__(self) -> None:
        self.saved: list[Tensor] = []

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Records the first forward."""
        if name != "forward":
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        self.saved.append(tensor)
        return tensor


def with_compiled_saves(counted: UnitWork, module: nn.Module, value: Any, is_first: bool) -> UnitWork:
    """Returns a unit's work with the bytes that it saves when it is compiled; `module` has compiled its loss too.

    It saves its inputs whenever the eager unit does. Temporary bytes remain those of the eager unit, which are more.
    """
    meter = _SavedMeter()
    output = run_step(module, value, None, is_first, meter)
    held = {storage_id(t) for t in (*module.parameters(), *module.buffers())}
    saved = {storage_id(t): t.untyped_storage().nbytes() for t in meter.saved}
    saved = {where: size for where, size in saved.items() if where not in held}
    returned = {storage_id(t) for t in tensors_of(output)}
    return replace(
        counted,
        saved=tuple(saved.values()),
        saved_input_bytes=min(counted.saved_input_bytes, sum(saved.values())),
        saved_output_bytes=sum(size for where, size in saved.items() if where in returned),
    )


def count_on_fakes(module: nn.Module, value: Any, head: LossHead | None, is_first: bool) -> UnitWork | None:
    """Counts the work of a unit's step by shapes alone, in milliseconds; None if its operations depend on values."""
    mode = make_mode()
    mode.allow_non_fake_inputs = True  # constants inside losses and recorded graphs
    try:
        unit = fake_copy(module, mode)
        fake_head = head and LossHead(head.loss, meta_like(head.targets, mode))
        with mode:
            return count_step(unit, meta_like(value, mode), fake_head, is_first)
    except Exception:  # rules for shapes are missing, or code reads values; an error of the unit is raised when it runs
        return None


def _most(changes: Iterable[tuple[int, int]]) -> int:
    return max(accumulate((size for _, size in changes), initial=0))
