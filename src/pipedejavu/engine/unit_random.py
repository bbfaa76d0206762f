"""Random numbers inside units: the state of the generators when a unit runs.

In training they depend only on the run's seed, the microbatch and the unit, so that every run of the unit draws the
same ones. A comparison with the uncut model draws them in the order of its operations instead.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipedejavu.engine.recompute_span import Value, tensors_of
from pipedejavu.runtime.divided_unit import DividedGraph
from pipedejavu.runtime.recompute import generators_of

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)

_drawing = threading.Lock()
"""Held while a unit may draw: threads of a process share its generators."""
_drawn = threading.local()
"""In the thread that holds the lock, the generators that its unit draws from."""

Unit = tuple[int, str, nn.Module]
"""A unit's number, name and module."""


class SeededRandom:
    """Seeds the generators for each unit of a piece that may draw random numbers."""

    def __init__(self, seed: int, units: Sequence[Unit]):
        self.seed = seed
        self._random = {number for number, _, unit in units if _looks_random(unit)}
        """Units that contain dropout."""
        self._divided = {number: unit for number, _, unit in units if isinstance(unit, DividedGraph)}
        self._deterministic: set[int] = set()
        """Units that were seen to draw no random numbers; the others need the lock on the generators."""

    def is_deterministic(self, number: int) -> bool:
        """Whether a unit was seen to draw no random numbers."""
        return number in self._deterministic

    def run(self, number: int, unit: Callable[[Value], Value], value: Value, microbatch: int) -> Value:
        """Runs a unit; seeds the generators if it may draw random numbers."""
        if number in self._divided:  # its ranks wait for each other, so none may wait for the lock
            self._divided[number].seed(mixed(self.seed, microbatch, number), tensors_of(value)[0].device)
            return unit(value)
        return unit(value) if number in self._deterministic else self.run_seeded(number, unit, value, microbatch)

    def run_seeded(self, number: int, unit: Callable[[Value], Value], value: Value, microbatch: int) -> Value:
        """Runs a unit that may draw random numbers, with the generators seeded for it."""
        with _drawing, _drawing_from(generators_of(tensors_of(value)[0].device)):
            generators = self.seed_generators(number, value, microbatch)
            if number in self._random:
                return unit(value)
            before = [generator.get_state() for generator in generators]
            value = unit(value)
            if all(
                torch.equal(generator.get_state(), state) for generator, state in zip(generators, before, strict=True)
            ):
                self._deterministic.add(number)
        return value

    def seed_generators(self, number: int, value: Value, microbatch: int) -> list[torch.Generator]:
        """Seeds the generators that a unit may draw from; returns them."""
        generators = generators_of(tensors_of(value)[0].device)
        for generator in generators:
            generator.manual_seed(mixed(self.seed, microbatch, number))
        return generators


@contextmanager
def _drawing_from(generators: list[torch.Generator]) -> Iterator[None]:
    _drawn.generators = generators
    try:
        yield
    finally:
        _drawn.generators = None


@contextmanager
def paused_draws() -> Iterator[None]:
    """Lets units in other threads draw while the unit of this thread waits for them, and then goes on as before."""
    generators: list[torch.Generator] | None = getattr(_drawn, "generators", None)
    if generators is None:
        yield
        return
    states = [generator.get_state() for generator in generators]
    _drawing.release()
    try:
        yield
    finally:
        _drawing.acquire()
        _restore(generators, states)


class OrderedRandom(SeededRandom):
    """Lets units draw in the order of operations, as the uncut model does; recomputed units draw the same again."""

    def __init__(self, seed: int, units: Sequence[Unit]):
        super().__init__(seed, units)
        self._states: dict[tuple[int, int], list[Tensor]] = {}
        """By unit and microbatch, the states of the generators before the first run."""

    def run_seeded(self, number: int, unit: Callable[[Value], Value], value: Value, microbatch: int) -> Value:
        """Runs a unit; a second run on the same microbatch starts from the same generator states as the first."""
        generators, key = generators_of(tensors_of(value)[0].device), (number, microbatch)
        now = [generator.get_state() for generator in generators]
        before = self._states.setdefault(key, now)
        _restore(generators, before)
        value = unit(value)
        if before is not now:
            _restore(generators, now)
        return value


def _restore(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _looks_random(module: nn.Module) -> bool:
    """Whether a module contains dropout."""
    return any(isinstance(m, _RANDOM) or getattr(m, "dropout", 0) for m in module.modules())


def mixed(*numbers: int) -> int:
    """Returns a seed that depends on all numbers (the finaliser of splitmix64 over each)."""
    seed = 0
    for number in numbers:
        seed = (seed ^ number) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        seed ^= seed >> 31
    return seed & (1 << 63) - 1
