"""What is trained: the model as a chain of units, its loss, its optimizer, its samples, and the log of a run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from pipedejavu.engine.byzantine import Byzantine
from pipedejavu.engine.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and how to train it; the engine asks nothing else of either."""

    units: Sequence[tuple[str, nn.Module]]
    """Names and modules in order; each module takes the value of the one before it. A parameter's full name is what the
    module calls it under the unit's name as a prefix (`named_parameters(prefix=unit)`). One that requires no
    gradient is frozen: it is no weight, has no gradient and no optimizer state, and stays as it is."""
    loss: Callable[[Any, Any], Tensor]
    """The sum, not the mean, of the losses of a microbatch's samples or tokens."""
    optimizer: Optimizer
    seed: int = 0
    clip_norm: float | None = None
    """Gradients are scaled down to this norm over all pieces where the plan clips."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What to do if the loss or a gradient is not finite, or too large for the optimizer: stop the run, or leave out
    the update, which needs a plan with a norm (`reduce.clip`) for all workers to agree by."""
    max_consecutive_skips: int | None = None
    """Updates in a row that may be left out before the run stops; None for any number."""
    elasticity: float = 0.5
    """How strongly an elastic combiner pulls weights and centre together (ρ)."""
    byzantine: Byzantine | None = None
    """Replicas that are faulty on purpose."""

    @cached_property
    def ties(self) -> tuple[frozenset[str], ...]:
        """The full names of each parameter that several units share and train, in the order of the units."""
        return self._shared(is_trained=True)

    @cached_property
    def frozen_ties(self) -> tuple[frozenset[str], ...]:
        """The full names of each frozen parameter that several units share."""
        return self._shared(is_trained=False)

    def _shared(self, is_trained: bool) -> tuple[frozenset[str], ...]:
        names: dict[int, list[tuple[str, str]]] = {}
        for unit, module in self.units:
            for full, parameter in module.named_parameters(prefix=unit, remove_duplicate=False):
                if parameter.requires_grad == is_trained:
                    names.setdefault(id(parameter), []).append((unit, full))
        shared = [found for found in names.values() if len({unit for unit, _ in found}) > 1]
        return tuple(frozenset(full for _, full in found) for found in shared)


class Batches(Protocol):
    """The samples of each microbatch, by its number; below 0 are those that a server scores contributions on."""

    def inputs(self, microbatch: int) -> Any:
        """Returns what the first piece reads."""

    def targets(self, microbatch: int) -> Any:
        """Returns what the loss compares with."""

    def length(self, microbatch: int) -> int:
        """Returns how many samples there are."""

    def count(self, microbatch: int) -> int:
        """Returns how many samples or tokens count in the loss."""


class Read(NamedTuple):
    """A forward: which weights a microbatch read on a piece; microbatch -1 pulls a wave at the end of a round."""

    piece: int
    replica: int
    microbatch: int
    version: int
    wave: int = -1
    """Of a consensus that was pulled for it; -1 for none."""


class Applied(NamedTuple):
    """An update: which microbatches fed it, and with which coefficient."""

    piece: int
    replica: int
    version: int
    microbatches: tuple[int, ...]
    coefficient: float


class Scored(NamedTuple):
    """A score that a server gave a replica's contribution to the update that makes a version."""

    piece: int
    replica: int
    version: int
    score: float


Event = Read | Applied | Scored


@dataclass
class Log:
    """What a worker did, in the order it did it: the meaning of its run."""

    events: list[Event] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    """The summed loss of each microbatch, on the worker that has the last piece."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Steps whose update was left out, with the reason, on the worker that has found it."""
    noted_s: dict[int, float] = field(default_factory=dict, compare=False)
    """When each loss was known, by the clock of its process."""
    peak_live: int = 0
    peak_versions: int = 0

    def note_loss(self, number: int, loss: float) -> None:
        """Notes the loss of a microbatch, and when."""
        self.noted_s[number] = time.perf_counter()
        self.losses[number] = loss

    def forget_losses(self) -> None:
        """Makes room for those of the next round."""
        self.losses.clear()
        self.noted_s.clear()
