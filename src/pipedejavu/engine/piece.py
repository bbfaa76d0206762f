"""A piece at work: its units, run forward under one version of their weights; `leg` goes back through them.

It owns no weights and no versions; both are handed in. Randomness inside a unit (dropout) depends on the
run's seed, the microbatch and the unit alone, so that it is the same wherever, whenever and however often the
unit runs.
"""

import math
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipedejavu.engine.finite import nonfinite
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.recompute_span import RecomputeSpan, Saved, Value, like, tensors_of
from pipedejavu.runtime.recompute import generators_of
from pipedejavu.runtime.saved_storage import SavedTensorOffload, begin_at, end_of, stub

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)

_random = threading.Lock()


Unit = tuple[int, str, nn.Module]
"""Its number, its name and its module."""


_Buffer = tuple[dict[str, Any], str, Tensor]
"""A module's dictionary, the key there, and what is there."""


class _Run(NamedTuple):
    """The units of a leg."""

    units: list[Unit]
    names: tuple[str, ...]
    """Of their weights."""
    is_again: bool
    """Whether only what they read is kept, and they run forward again."""
    works_in_place: bool
    """Whether they may change what they read. A leaf, and what will be read again, must not be changed; a copy may."""


class PieceRunner:
    """Runs one piece, its units in order; those whose number is in `again` run twice. For one thread at a time.

    What it leaves can be carried elsewhere meanwhile, where it is said that it `departs`.
    """

    def __init__(self, units: Sequence[Unit], seed: int, again: Collection[int] = (), departs: bool = False):
        self.units, self.seed, self.departs = units, seed, departs
        self.names: dict[str, str] = {}
        """Each parameter's full name, and the name that stands for it where the piece holds it twice."""
        self.initial: Tensors = {}
        """The parameters that are trained, at the start."""
        self._frozen: list[tuple[dict[str, Any], str, str]] = []
        """Where the modules have parameters that are not: a module's dictionary, the key there, and the full name."""
        self._slots: list[tuple[dict[str, Any], str, str, Tensor]] = []
        """Where the modules look for parameters: a module's own dictionary, the key there, the full name, and the
        tensor that is there while the piece is at rest."""
        first: dict[int, str] = {}
        of_unit: dict[int, dict[str, None]] = {}
        for number, unit, module in units:
            of_unit[number] = {}
            for path, part in module.named_modules(prefix=unit, remove_duplicate=False):
                for key, parameter in part._parameters.items():
                    if parameter is None:
                        continue
                    full = ".".join(filter(None, (path, key)))
                    if not parameter.requires_grad:
                        self._frozen.append((part._parameters, key, full))
                        continue
                    self.names[full] = first.setdefault(id(parameter), full)
                    of_unit[number][self.names[full]] = None
                    self._slots.append((part._parameters, key, self.names[full], parameter))
                    if self.names[full] == full:
                        self.initial[full] = parameter.detach()
        self._unbounded = dict(nonfinite(self.initial | dict(self.saved_buffers())))
        """Parameters and buffers that the model makes infinite on purpose, such as a mask, and what they hold."""
        self._random = {number for number, _, unit in units if _looks_random(unit)}
        """Units that hold dropout, whatever they draw."""
        self._calm: set[int] = set()
        """Units that were seen to draw no random numbers; the others wait for their turn with the generator."""
        rows = [(is_again, list(row)) for is_again, row in groupby(units, lambda unit: unit[0] in again)]
        self._runs: list[_Run] = []
        for is_again, row in rows:
            names = tuple(dict.fromkeys(name for number, _, _ in row for name in of_unit[number]))
            in_place = any(getattr(part, "inplace", False) for part in row[0][2].modules())
            # Of a piece that runs again as a whole nothing is kept: it is one leg, as if nothing did.
            self._runs.append(_Run(row, names, is_again and len(rows) > 1, in_place))

    def forward(
        self, weights: Tensors, value: Value, microbatch: int, keeps_buffers: bool = False, is_first: bool = False
    ) -> tuple[Value, Saved]:
        """Runs the units; with `keeps_buffers`, running statistics stay as they are (for recomputing).

        The first piece's inputs are samples, whose gradient nobody wants.
        """
        saved: list[RecomputeSpan] = []
        with self._dressed(weights, self.buffers() if keeps_buffers else []):
            for run in self._runs:
                leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors_of(value)]
                if not saved:
                    leaves = [
                        t.requires_grad_((t.is_floating_point() or t.is_complex()) and not is_first) for t in leaves
                    ]
                given = value = like(value, leaves)  # the graph behind it goes, where it runs again
                if self.departs and not run.is_again:
                    given = like(value, [stub(t) for t in leaves])
                    value = like(value, list(map(begin_at, tensors_of(given), leaves)))
                value = self._run_units(run, value, microbatch)
                outputs = () if run.is_again else tensors_of(value)
                own = {name: weights[name] for name in run.names}
                saved.append(RecomputeSpan(given, own, tuple(map(end_of, outputs)) if self.departs else outputs))
        return value, tuple(saved)

    def tensor_offload(self, weights: Tensors) -> SavedTensorOffload:
        """Returns boxes for what its forward saves, beside weights and buffers."""
        buffers = [buffer for _, _, buffer in self.buffers()]
        return SavedTensorOffload([*weights.values(), *buffers, *self.frozen.values()])

    @property
    def frozen(self) -> Tensors:
        """The parameters that are not trained, under all their full names."""
        return {full: place[key].detach() for place, key, full in self._frozen}

    def forward_again(self, weights: Tensors, saved: Saved, microbatch: int) -> tuple[Value, Saved]:
        """Runs the units again of which only what they read was kept; returns what the last of them make, and all."""
        found, value = list(saved), None
        buffers = self.buffers([unit for run in self._runs if run.is_again for unit in run.units])
        with self._dressed(weights, buffers):
            for n, run in enumerate(self._runs):
                if run.is_again:
                    value = self._run_units(run, saved[n].input_value, microbatch)
                    own = {name: weights[name] for name in run.names}
                    found[n] = replace(saved[n], weights=own, outputs=tensors_of(value))
        return value, tuple(found)

    def _run_units(self, run: _Run, value: Value, microbatch: int) -> Value:
        if run.works_in_place:
            value = like(value, [t.clone() for t in tensors_of(value)])
        for number, _, module in run.units:
            value = module(value) if number in self._calm else self.run_seeded(number, module, value, microbatch)
        return value

    @contextmanager
    def _dressed(self, weights: Tensors, buffers: list[_Buffer]) -> Iterator[None]:
        """Puts weights into the modules, and copies of buffers that are to stay as they are."""
        try:
            for place, key, name, _ in self._slots:
                place[key] = weights[name]
            for place, key, buffer in buffers:
                place[key] = buffer.clone()
            yield
        finally:
            for place, key, _, tensor in self._slots:
                place[key] = tensor
            for place, key, tensor in buffers:
                place[key] = tensor

    def buffers(self, units: Sequence[Unit] | None = None) -> list[_Buffer]:
        """Returns the buffers of all units or of some, and where they are."""
        parts = [part for _, _, module in (self.units if units is None else units) for part in module.modules()]
        return [(p._buffers, key, buffer) for p in parts for key, buffer in p._buffers.items() if buffer is not None]

    def is_meant(self, name: str, value: float) -> bool:
        """Whether a parameter or buffer that holds a value that is not finite was so from the start."""
        return name in self._unbounded and (math.isinf(value) or math.isnan(self._unbounded[name]))

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each buffer that belongs to a model's state, with its name."""
        for _, unit, module in self.units:
            for path, part in module.named_modules(prefix=unit):
                for key, buffer in part._buffers.items():
                    if buffer is not None and key not in part._non_persistent_buffers_set:
                        yield ".".join(filter(None, (path, key))), buffer

    def to(self, device: torch.device) -> "PieceRunner":
        """Moves buffers and frozen parameters to a device, those that are one to one; weights come with each call."""
        buffers = self.buffers() + [(place, key, place[key]) for place, key, _ in self._frozen]
        moved = {id(buffer): buffer.to(device) for _, _, buffer in buffers}
        for place, key, buffer in buffers:
            place[key] = moved[id(buffer)]
        return self

    def run_seeded(self, number: int, module: nn.Module, value: Value, microbatch: int) -> Value:
        """Runs a unit that may draw random numbers."""
        with _random:
            generators = generators_of(tensors_of(value)[0].device)
            for generator in generators:
                generator.manual_seed(mixed(self.seed, microbatch, number))
            if number in self._random:
                return module(value)
            before = [generator.get_state() for generator in generators]
            value = module(value)
            if all(
                torch.equal(generator.get_state(), state) for generator, state in zip(generators, before, strict=True)
            ):
                self._calm.add(number)
        return value


def _looks_random(module: nn.Module) -> bool:
    """Whether a module holds dropout, whatever it drew this time."""
    return any(isinstance(m, _RANDOM) or getattr(m, "dropout", 0) for m in module.modules())


def mixed(*numbers: int) -> int:
    """Mixes numbers into a seed (the finaliser of splitmix64 over each)."""
    seed = 0
    for number in numbers:
        seed = (seed ^ number) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        seed ^= seed >> 31
    return seed & (1 << 63) - 1
