"""Runs a piece: its units forward, with one version of their weights. `recompute_span` runs their backward.

The runner owns no weights and no versions; the caller passes both.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipedejavu.engine.finite import nonfinite
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.recompute_span import RecomputeSpan, Saved, Value, like, tensors_of
from pipedejavu.engine.unit_random import SeededRandom, Unit
from pipedejavu.runtime.compiled_unit import LossCall, UnitCompiler
from pipedejavu.runtime.compute_precision import FULL, ComputeFormat
from pipedejavu.runtime.deferred_head import DeferredHead
from pipedejavu.runtime.deferred_logits import HeadUse
from pipedejavu.runtime.kept_filters import KeptFilters
from pipedejavu.runtime.param_layout import DividedUnit, ParamLayout
from pipedejavu.runtime.saved_storage import SavedTensorOffload, begin_at, end_of, stub

_Buffer = tuple[dict[str, Any], str, Tensor]
"""A module's dictionary of buffers, the key, and the buffer."""


class _Run(NamedTuple):
    """Consecutive units that are recomputed together, or that all keep their saved tensors."""

    units: list[Unit]
    names: tuple[str, ...]
    """The names of their weights."""
    is_again: bool
    """Whether only their input is kept, and they are recomputed before the backward."""
    works_in_place: bool
    """Whether they may change their input in place. They then run on a copy, as kept inputs must not change."""


class PieceRunner:
    """Runs the units of one piece in order; units whose number is in `again` are recomputed. Not thread-safe.

    With `departs`, the saved tensors can be moved to another device between forward and backward. With a `compiler`,
    units run compiled. `form` says how the units compute.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        seed: int,
        again: Collection[int] = (),
        departs: bool = False,
        compiler: UnitCompiler | None = None,
        form: ComputeFormat = FULL,
    ):
        self.units, self.departs, self.compiler, self.form = units, departs, compiler, form
        self.random = SeededRandom(seed, units)
        self.while_compiling: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while a unit is compiled."""
        self.filters: Callable[[int], KeptFilters] | None = None
        """Returns the filters with which a microbatch runs, if some are left out."""
        self.head: HeadUse | None = None
        """How the linear layers of the last unit run, if it ends in a head that runs in chunks; it is not compiled."""
        self.names: dict[str, str] = {}
        """By full name of a parameter, its first full name in the piece, if tied parameters have several."""
        self.initial: Tensors = {}
        """The initial values of the trained parameters: their masters."""
        self.lowered: set[str] = set()
        """Trained parameters that are float32 and computed with as bf16."""
        self._wide: Tensors = {}
        """Frozen parameters that are computed with as bf16: their own values, by full name."""
        self._frozen: list[tuple[dict[str, Any], str, str]] = []
        """Frozen parameters: the module's dictionary, the key in it, and the full name."""
        self._slots: list[tuple[dict[str, Any], str, str, Tensor]] = []
        """Trained parameters: the module's dictionary, the key in it, the full name, and the tensor that is there while
        the piece does not run."""
        self.layouts: dict[str, ParamLayout] = {}
        """By full name, the layout of each parameter and buffer that is divided."""
        first: dict[int, str] = {}
        unit_names: dict[int, dict[str, None]] = {}
        for number, unit, module in units:
            unit_names[number] = {}
            if isinstance(module, DividedUnit):
                self.layouts |= module.layouts
            for path, part in module.named_modules(prefix=unit, remove_duplicate=False):
                for key, parameter in part._parameters.items():
                    if parameter is None:
                        continue
                    full = ".".join(filter(None, (path, key)))
                    if not parameter.requires_grad:
                        self._frozen.append((part._parameters, key, full))
                        if form.is_lowered(part, parameter):
                            self._wide[full] = parameter.detach()
                        continue
                    self.names[full] = first.setdefault(id(parameter), full)
                    unit_names[number][self.names[full]] = None
                    self._slots.append((part._parameters, key, self.names[full], parameter))
                    if self.names[full] == full:
                        self.initial[full] = parameter.detach()
                        if form.is_lowered(part, parameter):
                            self.lowered.add(full)
        self._unbounded = dict(nonfinite(self.initial | dict(self.saved_buffers())))
        """Parameters and buffers that are not finite from the start, such as masks, with their largest value."""
        rows = [(is_again, list(row)) for is_again, row in groupby(units, lambda unit: unit[0] in again)]
        self._runs: list[_Run] = []
        for is_again, row in rows:
            names = tuple(dict.fromkeys(name for number, _, _ in row for name in unit_names[number]))
            divided = isinstance(row[0][2], DividedUnit)  # which copies what it changes
            in_place = not divided and any(getattr(part, "inplace", False) for part in row[0][2].modules())
            # A piece that is recomputed as a whole keeps nothing, so its one run is treated as if not recomputed.
            self._runs.append(_Run(row, names, is_again and len(rows) > 1, in_place))

    def forward(
        self,
        weights: Tensors,
        value: Value,
        microbatch: int,
        keeps_buffers: bool = False,
        is_first: bool = False,
        head: LossCall | None = None,
    ) -> tuple[Value, Saved]:
        """Runs the units and returns the output, or with a `head` the loss, and the saved tensors.

        With `keeps_buffers`, running statistics do not change (for recomputing). With `is_first`, the input is a batch
        and gets no gradient.
        """
        saved: list[RecomputeSpan] = []
        buffers = self.buffers() if keeps_buffers else []
        kept = self.filters(microbatch) if self.filters else None
        with self._with_weights(weights, buffers, kept), self.form.context(tensors_of(value)[0].device):
            for run in self._runs:
                leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors_of(value)]
                if not saved:
                    leaves = [
                        t.requires_grad_((t.is_floating_point() or t.is_complex()) and not is_first) for t in leaves
                    ]
                given = value = like(value, leaves)  # cuts the graph between runs
                if self.departs and not run.is_again:
                    given = like(value, [stub(t) for t in leaves])
                    value = like(value, list(map(begin_at, tensors_of(given), leaves)))
                value = self._run_units(run, value, microbatch, head)
                outputs = () if run.is_again else tensors_of(value)
                run_weights = {name: weights[name] for name in run.names}
                saved.append(
                    RecomputeSpan(given, run_weights, tuple(map(end_of, outputs)) if self.departs else outputs)
                )
        return value, tuple(saved)

    def tensor_offload(self, weights: Tensors) -> SavedTensorOffload:
        """Returns a new offload for the tensors that a forward saves, except weights and buffers."""
        buffers = [buffer for _, _, buffer in self.buffers()]
        return SavedTensorOffload([*weights.values(), *buffers, *(place[key] for place, key, _ in self._frozen)])

    @property
    def frozen(self) -> Tensors:
        """The frozen parameters, under all their full names, as they are saved."""
        return {full: self._wide.get(full, place[key].detach()) for place, key, full in self._frozen}

    def lower_frozen(self) -> None:
        """Rounds the frozen parameters again that are computed with as bf16, after they have got other values."""
        for place, key, full in self._frozen:
            if full in self._wide:
                place[key].data.copy_(self._wide[full])

    def forward_again(
        self, weights: Tensors, saved: Saved, microbatch: int, head: LossCall | None = None
    ) -> tuple[Value, Saved]:
        """Recomputes the units that kept only their input; returns the last output and the saved tensors.

        With a `head`, the last output is the loss if the piece ends with such a unit.
        """
        spans, value = list(saved), None
        buffers = self.buffers([unit for run in self._runs if run.is_again for unit in run.units])
        device = tensors_of(saved[0].input_value)[0].device
        kept = self.filters(microbatch) if self.filters else None
        with self._with_weights(weights, buffers, kept), self.form.context(device):
            for n, run in enumerate(self._runs):
                if run.is_again:
                    value = self._run_units(run, saved[n].input_value, microbatch, head)
                    run_weights = {name: weights[name] for name in run.names}
                    spans[n] = replace(saved[n], weights=run_weights, outputs=tensors_of(value))
        return value, tuple(spans)

    def _run_units(self, run: _Run, value: Value, microbatch: int, head: LossCall | None) -> Value:
        if run.works_in_place:
            value = like(value, [t.clone() for t in tensors_of(value)])
        for unit in run.units:
            number, _, module = unit
            is_last = unit is self.units[-1]
            use = self.head if is_last else None
            call: Callable[[Value], Value] = module
            if self.compiler is not None and use is None:
                call = partial(self.run_compiled, unit, microbatch, head if is_last else None)
            with nullcontext() if use is None else DeferredHead(use):
                value = self.random.run(number, call, value, microbatch)
        return value

    def run_compiled(self, unit: Unit, microbatch: int, head: LossCall | None, value: Value) -> Value:
        """Runs a unit compiled, on the weights that are in its modules; returns its output, or with a `head` the loss.

        The generators must be seeded for it, as `SeededRandom.run` does.
        """
        assert self.compiler is not None
        number, name, module = unit
        is_seeded = not self.random.is_deterministic(number)
        seed = partial(self.random.seed_generators, number, value, microbatch) if is_seeded else None
        return self.compiler.run(name, module, value, head, seed, self.while_compiling)

    @contextmanager
    def _with_weights(self, weights: Tensors, buffers: list[_Buffer], kept: KeptFilters | None) -> Iterator[None]:
        """Puts weights into the modules, and copies of the buffers that must not change, for the duration.

        With `kept`, the modules have the parts of both that belong to the filters that remain.
        """
        parts: list[tuple[str, _Buffer]] = []
        try:
            for place, key, name, _ in self._slots:
                place[key] = weights[name] if kept is None else kept.used(name, weights[name])
            for place, key, buffer in buffers:
                place[key] = buffer.clone()
            for place, key, name in (*self._named_buffers(), *self._frozen) if kept else ():
                if kept and not kept.is_whole(name):
                    parts.append((name, (place, key, place[key])))
                    place[key] = kept.narrow(name, place[key])
            yield
        finally:
            for place, key, _, tensor in self._slots:
                place[key] = tensor
            for name, (place, key, whole) in parts:
                if kept:
                    kept.put(name, whole, place[key])
                place[key] = whole
            for place, key, tensor in buffers:
                place[key] = tensor

    def buffers(self, units: Sequence[Unit] | None = None) -> list[_Buffer]:
        """Returns the buffers of the given units, or of all, with their dictionaries and keys."""
        parts = [part for _, _, module in (self.units if units is None else units) for part in module.modules()]
        return [(p._buffers, key, buffer) for p in parts for key, buffer in p._buffers.items() if buffer is not None]

    def is_meant(self, name: str, value: float) -> bool:
        """Whether a parameter or buffer that holds a non-finite value did so from the start."""
        return name in self._unbounded and (math.isinf(value) or math.isnan(self._unbounded[name]))

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each persistent buffer with its full name."""
        for _, unit, module in self.units:
            for path, part in module.named_modules(prefix=unit):
                for key, buffer in part._buffers.items():
                    if buffer is not None and key not in part._non_persistent_buffers_set:
                        yield ".".join(filter(None, (path, key))), buffer

    def to(self, device: torch.device) -> "PieceRunner":
        """Moves buffers and frozen parameters to a device and keeps shared ones shared; weights come with each call."""
        buffers = self.buffers() + [(place, key, place[key]) for place, key, _ in self._frozen]
        low = {id(place[key]) for place, key, full in self._frozen if full in self._wide}
        moved = {id(t): t.to(device, torch.bfloat16 if id(t) in low else t.dtype) for _, _, t in buffers}
        for place, key, buffer in buffers:
            place[key] = moved[id(buffer)]
        return self

    def share(self, other: "PieceRunner", device: torch.device) -> None:
        """Uses another runner's frozen parameters and buffers of this piece, by name; moves the rest to a device."""
        known = other.frozen | {name: place[key] for place, key, name in other._named_buffers()}
        slots = [(place, key, full) for place, key, full in self._frozen]
        for place, key, name in [*slots, *self._named_buffers()]:
            tensor = known.get(name)
            if tensor is None:
                place[key] = place[key].to(device)
            elif tensor.data_ptr() != place[key].data_ptr():
                place[key] = tensor

    def _named_buffers(self) -> Iterator[tuple[dict[str, Any], str, str]]:
        """Yields each buffer's dictionary, its key there, and its full name."""
        for _, unit, module in self.units:
            for path, part in module.named_modules(prefix=unit, remove_duplicate=False):
                for key, buffer in part._buffers.items():
                    if buffer is not None:
                        yield part._buffers, key, ".".join(filter(None, (path, key)))

    def parameters(self) -> Tensors:
        """Returns the trained parameters of the modules by their first names."""
        return {name: parameter for _, _, name, parameter in reversed(self._slots)}
