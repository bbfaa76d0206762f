"""What is known of a model: its units in order, what each costs on each kind of device, and its edges."""

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Self

from pydantic import Field, model_validator

from pipedejavu.facts.error import InputError, nearest, repeated
from pipedejavu.facts.quantity import Bytes, PartBytes, Seconds
from pipedejavu.facts.record import Record


class Cost(Record):
    """A time that grows with the microbatch: fixed_s + per_sample_s × samples, or what was measured where it bends."""

    fixed_s: Seconds = 0.0
    per_sample_s: Seconds = 0.0
    measured_s: dict[Annotated[int, Field(ge=1)], Seconds] = Field(default_factory=dict)
    """Times by number of samples that the line misses. Between them, and from `fixed_s` at none to the first, the time
    goes straight; behind the last it grows by `per_sample_s`."""
    issue_s: Seconds = 0.0
    """What the host takes to issue the work, where the device is a GPU. The work takes no less, unless the host has
    issued it before."""
    spread: float = Field(default=0.0, ge=0)
    """How far the middle half of what was measured lies from these times at most, as a part of them."""

    def at(self, samples: float) -> float:
        """Returns the time for a microbatch of `samples`."""
        return max(self.issue_s, self.work_s(samples))

    def work_s(self, samples: float) -> float:
        """Returns the device's time for a microbatch of `samples`, once it is issued."""
        if not self.measured_s:
            return self.fixed_s + self.per_sample_s * samples
        sizes, times = self._points
        last = bisect_right(sizes, samples) - 1
        beyond = samples - sizes[last]
        if last == len(sizes) - 1:
            return times[last] + self.per_sample_s * beyond
        return times[last] + (times[last + 1] - times[last]) * beyond / (sizes[last + 1] - sizes[last])

    @cached_property
    def _points(self) -> tuple[list[int], list[float]]:
        """The corners: sizes in order, and the time of each."""
        points = sorted({0: self.fixed_s, **self.measured_s}.items())
        return [size for size, _ in points], [time_s for _, time_s in points]

    def times(self, factor: float) -> "Cost":
        """Returns the time as many times as long; the host's stays."""
        return self.replace(
            fixed_s=self.fixed_s * factor,
            per_sample_s=self.per_sample_s * factor,
            measured_s={size: time_s * factor for size, time_s in self.measured_s.items()},
        )

    def plus(self, *others: "Cost") -> "Cost":
        """Returns the time with others behind it, at every size; the spread stays this one's."""
        every = (self, *others)
        return self.replace(
            fixed_s=sum(cost.fixed_s for cost in every),
            per_sample_s=sum(cost.per_sample_s for cost in every),
            measured_s={size: sum(cost.work_s(size) for cost in every) for cost in every for size in cost.measured_s},
            issue_s=sum(cost.issue_s for cost in every),
        )


def joint_spread(costs: Iterable[Cost], samples: float) -> float:
    """Returns how far several times together lie from their lines, as a part of them: each counts by its time."""
    known = [(cost.at(samples), cost.spread) for cost in costs]
    total_s = sum(time_s for time_s, _ in known)
    return sum(time_s * spread for time_s, spread in known) / total_s if total_s else 0.0


class UnitTime(Record):
    """What one unit takes on one kind of device."""

    forward: Cost = Cost()
    backward: Cost = Cost()
    """Both halves: the gradient of the input and that of the weights."""
    weight_backward: Cost = Cost()
    """The weight half alone."""
    input_backward: Cost | None = None
    """The input half alone; by default the rest of `backward`. Halves apart may take more than both at once."""
    recompute: Cost = Cost()
    """Running forward again for the backward pass."""
    update_s: Seconds = 0.0
    """One optimizer step over the unit's parameters, on this kind of device."""
    copy_s: dict[str, Seconds] = Field(default_factory=dict)
    """Copies between the device and its host that were measured, by what an action of a program says: 'FETCH:w'. All
    others take what the machine's links say."""

    def times(self, factor: float) -> "UnitTime":
        """Returns what the unit takes on a device that computes so many times as long; copies stay as they are."""
        return self.replace(
            forward=self.forward.times(factor),
            backward=self.backward.times(factor),
            weight_backward=self.weight_backward.times(factor),
            input_backward=self.input_backward and self.input_backward.times(factor),
            recompute=self.recompute.times(factor),
            update_s=self.update_s * factor,
        )


class Unit(Record):
    """The smallest piece of a model that is placed."""

    name: str
    times: dict[str, UnitTime] = Field(default_factory=dict)
    """By the device's kind."""
    flop: float = Field(default=0.0, ge=0)
    """Floating-point operations of a forward, for each sample."""
    num_parameters: int = Field(default=0, ge=0)
    parameter_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    expert_share: float = Field(default=0.0, ge=0, le=1)
    """Part of the parameters that belongs to experts, which an 'expert' layout divides over workers."""
    activation_bytes: PartBytes = 0.0
    """What autograd saves for the backward pass, for each sample."""
    shared_bytes: PartBytes = 0.0
    """Of these: its output, which the unit behind it saves as its input. In one place it is there once."""
    forward_work_bytes: PartBytes = 0.0
    """Most memory that is there inside of a forward only, for each sample."""
    backward_work_bytes: PartBytes = 0.0
    """Most that a backward adds to memory, for each sample, as what was saved goes; without gradients of weights."""
    parameter_parts: tuple[Bytes, ...] = ()
    """The bytes of each parameter. Where they are known, so is what the engine adds to memory while it works."""
    activation_parts: tuple[PartBytes, ...] = ()
    """The bytes of each memory that autograd saves, for each sample."""
    boundary_bytes: PartBytes = 0.0
    """The unit's output, for each sample."""
    has_batch_statistics: bool = False
    """Whether it holds running statistics (BatchNorm): buffers that no weight version covers."""


class Edge(Record):
    """A value that one unit makes and a later one reads."""

    source: str
    target: str
    bytes_: PartBytes | None = Field(default=None, alias="bytes")
    """For each sample; by default the source's boundary_bytes."""


class Tie(Record):
    """Parameters that several units share: their gradients add up, their versions move together."""

    units: tuple[str, ...] = Field(min_length=2)
    size_bytes: Bytes


class Profile(Record):
    """A model as units in order; without `edges` each unit reads the one before it."""

    name: str
    units: tuple[Unit, ...] = Field(min_length=1)
    edges: tuple[Edge, ...] | None = None
    ties: tuple[Tie, ...] = ()
    batch: dict[str, Cost] = Field(default_factory=dict)
    """Making a microbatch's samples, by the device's kind. The forward of the first unit has it in it; whoever has the
    last unit and not the first makes them too, for their targets."""
    drift: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """By the device's kind: how all of its times vary together, as a part of them. A machine that others share is
    slower for seconds and faster again; this is the standard deviation from one turn of measuring to the next."""
    begins: tuple[int, ...] = ()
    """Of a model that was cut in its recorded graph: the operation with which each unit after the first begins, and at
    the end the number of all."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns names given twice, units that are missing, and edges that go backward."""
        names = [u.name for u in self.units]
        position = {n: i for i, n in enumerate(names)}
        faults = [f"two units are called '{n}'" for n in repeated(names)]
        ends = [(f"edges[{i}]", n) for i, e in enumerate(self.edges or ()) for n in (e.source, e.target)]
        ends += [(f"ties[{i}]", n) for i, t in enumerate(self.ties) for n in t.units]
        faults += [
            f"{where} names unit '{n}', which is missing{nearest(n, names)}" for where, n in ends if n not in position
        ]
        faults += [
            f"edges[{i}] goes from '{e.source}' back to '{e.target}'; list units in an order where edges go forward"
            for i, e in enumerate(self.edges or ())
            if position.get(e.source, -1) >= position.get(e.target, len(names))
        ]
        return faults

    @cached_property
    def position(self) -> dict[str, int]:
        """Each unit's place in the order, by its name."""
        return {u.name: i for i, u in enumerate(self.units)}

    @cached_property
    def links(self) -> tuple[tuple[int, int, float], ...]:
        """All edges as (source, target, bytes for each sample), units by their position."""
        units, position = self.units, self.position
        if self.edges is None:
            return tuple((i, i + 1, units[i].boundary_bytes) for i in range(len(units) - 1))
        ends = [(position[e.source], position[e.target], e.bytes_) for e in self.edges]
        return tuple((s, t, units[s].boundary_bytes if b is None else b) for s, t, b in ends)

    def time(self, unit: Unit, kind: str) -> UnitTime:
        """Returns a unit's times on a kind of device; raises InputError where there are none."""
        if kind not in unit.times:
            raise InputError(
                f"profile '{self.name}' has no times of unit '{unit.name}' on device kind '{kind}'"
                f"{nearest(kind, unit.times)}"
            )
        return unit.times[kind]
