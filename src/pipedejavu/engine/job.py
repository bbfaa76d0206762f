"""Jobs: the model as a chain of units, its loss, optimizer and samples, and the log of a run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from pipedejavu.engine.byzantine import Byzantine
from pipedejavu.engine.optimizer import Optimizer
from pipedejavu.plan import Precision
from pipedejavu.program import Program
from pipedejavu.runtime.axis_region import UnitGraph
from pipedejavu.runtime.compiled_unit import UnitCompiler


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and how to train it: all that the engine knows of the user's training."""

    units: Sequence[tuple[str, nn.Module]]
    """Names and modules in order; each module takes the output of the one before it. A parameter's full name has the
    unit's name as a prefix (`named_parameters(prefix=unit)`). A parameter that requires no gradient is frozen: it has
    no gradient and no optimizer state, and never changes."""
    loss: Callable[[Any, Any], Tensor]
    """Returns the sum, not the mean, of the losses over the samples or tokens of a microbatch."""
    optimizer: Optimizer
    seed: int = 0
    clip_norm: float | None = None
    """The norm over all pieces that gradients are clipped to, if the plan clips."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What to do if the loss or a gradient is not finite, or too large for the optimizer: stop the run, or skip the
    update. To skip, the plan needs a global norm (`reduce.clip`), by which all workers agree."""
    max_consecutive_skips: int | None = None
    """Consecutive updates that may be skipped before the run stops; None for no limit."""
    elasticity: float = 0.5
    """How strongly an elastic combiner pulls weights and centre together (ρ)."""
    byzantine: Byzantine | None = None
    """Faults to inject into some replicas."""
    graphs: Callable[..., list[UnitGraph]] | None = None
    """Records consecutive units as graphs, given what the first one takes and, to record the loss too, a `LossCall`;
    plans that divide operators need it."""
    compiler: UnitCompiler | None = None
    """Runs units compiled, if the plan says so; it may have compiled them before. By default a new one."""

    def compiler_for(self, program: Program) -> UnitCompiler | None:
        """Returns the compiler of a program's units; None if they run eagerly."""
        return (self.compiler or UnitCompiler()) if program.plan.is_compiled else None

    @cached_property
    def ties(self) -> tuple[frozenset[str], ...]:
        """The full names of each trained parameter that several units share, in the order of the units."""
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
        shared = [uses for uses in names.values() if len({unit for unit, _ in uses}) > 1]
        return tuple(frozenset(full for _, full in uses) for uses in shared)


def with_moments(job: Job, precision: Precision) -> Job:
    """Returns a job whose optimizer keeps its moments in the format of a plan's precision."""
    return replace(job, optimizer=job.optimizer.with_moments(precision.moments))


class Batches(Protocol):
    """The samples of each microbatch by number; a server scores gradients on the microbatches below 0."""

    def inputs(self, microbatch: int) -> Any:
        """Returns what the first piece reads."""

    def targets(self, microbatch: int) -> Any:
        """Returns what the loss compares with."""

    def length(self, microbatch: int) -> int:
        """Returns the number of samples."""

    def count(self, microbatch: int) -> int:
        """Returns the number of samples or tokens that count in the loss."""


class Read(NamedTuple):
    """A forward: the weight version that a microbatch read on a piece; microbatch -1 is a pull after a round."""

    piece: int
    replica: int
    microbatch: int
    version: int
    wave: int = -1
    """The wave whose consensus was pulled before it; -1 for none."""


class Reread(NamedTuple):
    """A backward that reads other weights than its forward, and their version."""

    piece: int
    replica: int
    microbatch: int
    version: int


class Applied(NamedTuple):
    """An update: the microbatches whose gradients it applied, and their coefficient."""

    piece: int
    replica: int
    version: int
    microbatches: tuple[int, ...]
    coefficient: float


class Scored(NamedTuple):
    """The score of a replica's gradient for the update that makes a version."""

    piece: int
    replica: int
    version: int
    score: float


class Masked(NamedTuple):
    """The filters that a replica trains in an update: the number of a vector in the plan's table, by rising cost."""

    replica: int
    update: int
    choice: int


Event = Read | Reread | Applied | Scored | Masked


class _Nothing(list[Event]):
    """A list that stays empty."""

    def append(self, event: Event) -> None:
        """Drops the event."""


class _Nowhere(dict[int, float]):
    """A table that stays empty."""

    def __setitem__(self, number: int, loss: float) -> None:
        """Drops the loss."""


@dataclass
class Log:
    """The reads, updates and scores of a worker in order; enough to replay its run."""

    events: list[Event] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    """The summed loss of each microbatch, on the worker that has the last piece."""
    skipped: dict[int, str] = field(default_factory=dict)
    """Steps whose update was skipped, with the reason, on the worker that found the fault."""
    noted_s: dict[int, float] = field(default_factory=dict, compare=False)
    """When each loss was known, by the clock of its process."""
    peak_live: int = 0
    peak_versions: int = 0

    def note_loss(self, number: int, loss: float) -> None:
        """Notes the loss of a microbatch, and when."""
        self.noted_s[number] = time.perf_counter()
        self.losses[number] = loss

    def silence(self) -> None:
        """Notes no events and losses from now on: another worker of the group notes the same."""
        self.events, self.losses = _Nothing(), _Nowhere()

    def forget_losses(self) -> None:
        """Clears the losses before the next round."""
        self.losses.clear()
        self.noted_s.clear()
