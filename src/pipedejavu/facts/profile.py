"""Profiles: a model's units in order, the cost of each unit on each kind of device, and the edges between units."""

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Self

from pydantic import Field, model_validator

from pipedejavu.facts.error import InputError, nearest, repeated
from pipedejavu.facts.head_form import HeadForm, form_at
from pipedejavu.facts.quantity import Bytes, PartBytes, Seconds
from pipedejavu.facts.record import Record


class Cost(Record):
    """Time by microbatch size: fixed_s + per_sample_s × samples, or measured points if a line does not fit."""

    fixed_s: Seconds = 0.0
    per_sample_s: Seconds = 0.0
    measured_s: dict[Annotated[int, Field(ge=1)], Seconds] = Field(default_factory=dict)
    """Times by number of samples, if the line misses them. Between points, and from `fixed_s` at zero samples to the
    first point, times are interpolated linearly; after the last point they grow by `per_sample_s`."""
    issue_s: Seconds = 0.0
    """On a GPU, the host's time to issue the work; the work takes at least this long unless it was issued ahead."""
    spread: float = Field(default=0.0, ge=0)
    """Largest distance of the measured quartiles from these times, as a share of them."""

    def at(self, samples: float) -> float:
        """Returns the time for a microbatch of `samples`, including the time to issue it."""
        return max(self.issue_s, self.work_s(samples))

    def work_s(self, samples: float) -> float:
        """Returns the device's time for a microbatch of `samples` that has been issued."""
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
        """Points of the piecewise linear function: sizes in ascending order, and their times."""
        points = sorted({0: self.fixed_s, **self.measured_s}.items())
        return [size for size, _ in points], [time_s for _, time_s in points]

    def times(self, factor: float) -> "Cost":
        """Returns the cost with the device's time multiplied by `factor`; the issue time stays."""
        return self.replace(
            fixed_s=self.fixed_s * factor,
            per_sample_s=self.per_sample_s * factor,
            measured_s={size: time_s * factor for size, time_s in self.measured_s.items()},
        )

    def divided(self, size: int, share: float = 1.0) -> "Cost":
        """Returns the cost of one part if `size` devices divide a share of the work; fixed times and issuing stay."""
        factor = 1 - share + share / size
        return self.replace(
            per_sample_s=self.per_sample_s * factor,
            measured_s={n: self.fixed_s + (time_s - self.fixed_s) * factor for n, time_s in self.measured_s.items()},
        )

    def plus(self, *others: "Cost") -> "Cost":
        """Returns the cost of this work followed by others, at every size; the spread stays this one's."""
        every = (self, *others)
        return self.replace(
            fixed_s=sum(cost.fixed_s for cost in every),
            per_sample_s=sum(cost.per_sample_s for cost in every),
            measured_s={size: sum(cost.work_s(size) for cost in every) for cost in every for size in cost.measured_s},
            issue_s=sum(cost.issue_s for cost in every),
        )


def joint_spread(costs: Iterable[Cost], samples: float) -> float:
    """Returns the spread of several times together: their mean spread, weighted by time."""
    known = [(cost.at(samples), cost.spread) for cost in costs]
    total_s = sum(time_s for time_s, _ in known)
    return sum(time_s * spread for time_s, spread in known) / total_s if total_s else 0.0


class UnitTime(Record):
    """Times of one unit on one kind of device."""

    forward: Cost = Cost()
    backward: Cost = Cost()
    """Both halves: gradients of the inputs and of the weights."""
    weight_backward: Cost = Cost()
    """Gradients of the weights alone."""
    input_backward: Cost | None = None
    """Gradients of the inputs alone; by default the rest of `backward`. Two halves may take longer than `backward`."""
    recompute: Cost = Cost()
    """Repeated forward in the backward pass."""
    update_s: Seconds = 0.0
    """One optimizer step over the unit's parameters, on this kind of device."""
    copy_s: dict[str, Seconds] = Field(default_factory=dict)
    """Measured copies between the device and its host, by the text of a program's action, such as 'FETCH:w'. All other
    copies take the time that the machine's links give."""
    is_estimated: bool = False
    """Whether forward and backward were estimated when the other units were measured."""

    def times(self, factor: float) -> "UnitTime":
        """Returns the unit's times on a device that is `factor` times slower; copies stay as they are."""
        return self.replace(
            forward=self.forward.times(factor),
            backward=self.backward.times(factor),
            weight_backward=self.weight_backward.times(factor),
            input_backward=self.input_backward and self.input_backward.times(factor),
            recompute=self.recompute.times(factor),
            update_s=self.update_s * factor,
        )

    def divided(self, size: int, share: float = 1.0) -> "UnitTime":
        """Returns the times of one part of the unit if `size` devices divide a share of its work."""
        return self.replace(
            forward=self.forward.divided(size, share),
            backward=self.backward.divided(size, share),
            weight_backward=self.weight_backward.divided(size, share),
            input_backward=self.input_backward and self.input_backward.divided(size, share),
            recompute=self.recompute.divided(size, share),
            update_s=self.update_s * (1 - share + share / size),
        )


class DividedSums(Record):
    """What devices that divide a unit send each other, by bytes per sample, and what each of them has a part of."""

    forward: tuple[PartBytes, ...] = ()
    """All-reduces; if the sequence is divided, a gather and a scattered sum stand for each."""
    backward: tuple[PartBytes, ...] = ()
    gathers: tuple[PartBytes, ...] = ()
    """All-gathers of the backward: inputs of products that were divided along the sequence."""
    exchanges: tuple[PartBytes, ...] = ()
    """All-to-alls of each pass, by what one device puts in."""
    gradient_bytes: Bytes = 0
    """Gradients of whole parameters that are read on parts of the sequence: summed for each microbatch."""
    parameter_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the unit's parameters that is divided."""
    work_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the unit's work that is divided."""


class Unit(Record):
    """The smallest part of a model that can be placed on a device."""

    name: str
    times: dict[str, UnitTime] = Field(default_factory=dict)
    """By kind of device."""
    tp_times: dict[str, UnitTime] = Field(default_factory=dict)
    """Times of one device's part of the unit, without all-reduces, by kind of tensor-parallel group, such as
    '4xa100-80gb'; by default they follow from `times`."""
    flop: float = Field(default=0.0, ge=0)
    """Floating-point operations of a forward, per sample."""
    num_parameters: int = Field(default=0, ge=0)
    parameter_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    expert_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the parameters that belongs to experts, which an 'expert' layout divides over workers."""
    num_experts: int = Field(default=0, ge=0)
    """Experts that are stacked in its parameters."""
    expert_rows: float = Field(default=0.0, ge=0)
    """Rows that its experts take per sample: tokens times experts per token, or slots."""
    expert_row_bytes: PartBytes = 0.0
    """Bytes of those rows per sample: an 'expert' layout sends them there and back."""
    num_convolutions: int | None = Field(default=None, ge=0)
    """Convolutions in its forward, whose filters and channels may be divided; None if not known."""
    num_products: int | None = Field(default=None, ge=0)
    """Matrix products in its forward, whose columns, rows and heads may be divided; None if not known."""
    divided_sums: dict[str, DividedSums] = Field(default_factory=dict)
    """What it sends if its operators are divided, by layout and number of devices, such as 'pairs/4' or
    'sequence+vocabulary/4'; a division that is missing takes two all-reduces of the output in each pass."""
    num_attentions: int | None = Field(default=None, ge=0)
    """Attentions in its forward, and softmaxes, which may be parts of attentions; None if not known."""
    activation_bytes: PartBytes = 0.0
    """Bytes that autograd saves for the backward pass, per sample."""
    replicated_bytes: PartBytes = 0.0
    """Part of `activation_bytes`: what each device of a tensor-parallel group saves whole."""
    shared_bytes: PartBytes = 0.0
    """Part of `activation_bytes`: the output, if the next unit saves it as its input; on one device it exists once."""
    pending_bytes: PartBytes | None = None
    """Bytes held between the halves of a split backward, per sample: operands of products, and gradients of their
    outputs. If not known, those that autograd saves count in their place."""
    pending_shared_bytes: PartBytes = 0.0
    """Part of `pending_bytes`: the gradient of the output, which the unit after it passes on."""
    input_work_bytes: PartBytes = 0.0
    """Peak of memory that the first half of a split backward adds while saved tensors are freed, per sample."""
    forward_work_bytes: PartBytes = 0.0
    """Peak of temporary memory in a forward, per sample."""
    backward_work_bytes: PartBytes = 0.0
    """Peak of memory that a backward adds while saved tensors are freed, per sample; without gradients of weights."""
    parameter_parts: tuple[Bytes, ...] = ()
    """Bytes of each parameter; if known, the engine's temporary memory during updates can be computed."""
    activation_parts: tuple[PartBytes, ...] = ()
    """Bytes of each storage that autograd saves, per sample."""
    boundary_bytes: PartBytes = 0.0
    """Bytes of the unit's output, per sample."""
    has_batch_statistics: bool = False
    """Whether it has running statistics (BatchNorm): buffers that weight versions do not cover."""


class Edge(Record):
    """A value that one unit makes and a later unit reads."""

    source: str
    target: str
    bytes_: PartBytes | None = Field(default=None, alias="bytes")
    """Bytes per sample; by default the source's `boundary_bytes`."""


class Tie(Record):
    """Parameters that several units share: their gradients are summed, and they are updated together."""

    units: tuple[str, ...] = Field(min_length=2)
    size_bytes: Bytes


class Profile(Record):
    """A model as units in order; without `edges` each unit reads the output of the one before it."""

    name: str
    units: tuple[Unit, ...] = Field(min_length=1)
    edges: tuple[Edge, ...] | None = None
    ties: tuple[Tie, ...] = ()
    tp_sizes: tuple[int, ...] | None = None
    """Numbers of devices over which its operators can be divided, of those that a search tries; None if not known."""
    layout_sizes: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """The same for other layouts, such as 'sequence+vocabulary': those that a search tries."""
    batch: dict[str, Cost] = Field(default_factory=dict)
    """Time to make a microbatch's samples, by kind of device. The first unit's forward includes it; a worker with the
    last unit but not the first makes the samples too, for their targets."""
    batch_bytes: PartBytes = 0.0
    """Bytes of the first unit's inputs, per sample."""
    precision: str = "fp32"
    """The precision that times and bytes are of, as a plan prints it."""
    drift: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Common variation of all times of a kind of device, as a share of them: the standard deviation between rounds of
    measuring. A shared machine is slower for seconds and then faster again."""
    estimated: dict[str, str] = Field(default_factory=dict)
    """By kind of device, which of a measured profile's times are estimated, and why."""
    error: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """For times that were estimated: how far steps of whole models were off, by kind of device, as the standard
    deviation of the logarithm of measured over forecast."""
    begins: tuple[int, ...] = ()
    """For a model cut from a traced graph: index of the first operation of each unit after the first, then the number
    of operations."""
    head_forms: tuple[HeadForm, ...] = ()
    """The last unit with its head and loss in different numbers of chunks, 1 among them, if it ends in a linear layer
    whose result goes only into a cross-entropy."""
    head_chunks: int = Field(default=1, ge=1)
    """The number of chunks that the last unit has its times and bytes for."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns duplicate names, missing units, and edges that go backward."""
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
        """Index of each unit, by name."""
        return {u.name: i for i, u in enumerate(self.units)}

    @cached_property
    def links(self) -> tuple[tuple[int, int, float], ...]:
        """All edges as (source, target, bytes per sample), with units as indices."""
        units, position = self.units, self.position
        if self.edges is None:
            return tuple((i, i + 1, units[i].boundary_bytes) for i in range(len(units) - 1))
        ends = [(position[e.source], position[e.target], e.bytes_) for e in self.edges]
        return tuple((s, t, units[s].boundary_bytes if b is None else b) for s, t, b in ends)

    def with_head_chunks(self, chunks: int) -> "Profile":
        """Returns the profile with the head of the last unit in some number of chunks; itself if it has no such head.

        The times are those of the last unit now, in the proportion of the two forms.
        """
        if chunks == self.head_chunks or not self.head_forms:
            return self
        old, new = (form_at(self.head_forms, count) for count in (self.head_chunks, chunks))
        *others, last = self.units
        times = {}
        for kind, time in last.times.items():
            forward = new.forward_ratio(kind) / old.forward_ratio(kind)
            backward = new.backward_ratio(kind) / old.backward_ratio(kind)
            times[kind] = time.replace(
                forward=time.forward.times(forward),
                recompute=time.recompute.times(forward),
                backward=time.backward.times(backward),
                weight_backward=time.weight_backward.times(backward),
                input_backward=time.input_backward and time.input_backward.times(backward),
            )
        last = last.replace(
            times=times,
            activation_bytes=new.activation_bytes,
            activation_parts=new.activation_parts,
            forward_work_bytes=new.forward_work_bytes,
            backward_work_bytes=new.backward_work_bytes,
            boundary_bytes=new.boundary_bytes,
        )
        return self.replace(units=(*others, last), head_chunks=chunks)

    def time(self, unit: Unit, kind: str) -> UnitTime:
        """Returns a unit's times on a kind of device; raises InputError if there are none."""
        if kind not in unit.times:
            raise InputError(
                f"profile '{self.name}' has no times of unit '{unit.name}' on device kind '{kind}'"
                f"{nearest(kind, unit.times)}"
            )
        return unit.times[kind]
