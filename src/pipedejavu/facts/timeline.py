"""Timelines, predicted or measured: each action with its start and end, and memory over time.

Predicted and measured timelines have the same form and name actions by the same text, so that they can be joined. They
are stored as columns, since a timeline may have very many actions.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from pipedejavu.facts.quantity import Bytes, Seconds
from pipedejavu.facts.record import Record

MEMORY_CLASSES = ("weights", "versions", "gradients", "optimizer", "activations", "buffers")


class Span(NamedTuple):
    """One action of a timeline."""

    worker: int
    lane: str
    action: str
    start_s: float
    end_s: float


class MemoryCurve(Record):
    """Memory in use by one worker: from times_s[i] on, classes[c][i] bytes of class c."""

    memory: Literal["device", "host"]
    capacity_bytes: Bytes
    times_s: tuple[Seconds, ...]
    classes: dict[str, tuple[float, ...]]
    peak_bytes: float
    peak_classes: dict[str, float]
    """Bytes of each class at the peak."""


class WorkerSummary(Record):
    """One worker's figures; it stands for `copies` workers that behave exactly like it."""

    worker: int = Field(ge=0)
    device: str
    copies: int = Field(default=1, ge=1)
    busy_s: Seconds
    peak_bytes: float
    """In the device's own memory."""
    allocated_bytes: float | None = None
    """The same with each tensor's size rounded up as a GPU's allocator does; None if the tensors are not known."""
    reserved_bytes: float | None = None
    """Device memory that this allocator reserves for them."""
    peak_live_microbatches: int
    """Peak number of (piece, microbatch) pairs whose forward has started and whose backward has not ended."""
    weight_versions: int
    """Peak number of versions of one piece's weights."""
    memory: tuple[MemoryCurve, ...] = ()


class Timeline(Record):
    """Actions as columns, and one summary per worker."""

    most_bytes: ClassVar[int] = 1 << 30

    origin: Literal["predicted", "measured"]
    makespan_s: Seconds
    bubble_fraction: float
    """Idle share of the compute lanes, over the whole makespan and all workers that compute."""
    workers: tuple[WorkerSummary, ...]
    worker: tuple[int, ...]
    lane: tuple[str, ...]
    action: tuple[str, ...]
    start_s: tuple[Seconds, ...]
    end_s: tuple[Seconds, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        return self.agreed()

    def disagreements(self) -> list[str]:
        """Returns columns of different lengths, actions that end before they start, and workers without a summary."""
        sizes = {c: len(getattr(self, c)) for c in ("worker", "lane", "action", "start_s", "end_s")}
        if len(set(sizes.values())) > 1:
            return [f"the columns differ in length: {', '.join(f'{c} {n}' for c, n in sizes.items())}"]
        known = {w.worker for w in self.workers} or {*self.worker}  # summaries may be left out
        faults = [f"worker {w} has actions but no summary" for w in sorted({*self.worker} - known)]
        for action, start, end in zip(self.action, self.start_s, self.end_s, strict=True):
            if end < start:
                return [*faults, f"action '{action}' ends at {end} s, before it starts at {start} s"]
        return faults

    def __len__(self) -> int:
        return len(self.worker)

    def spans(self) -> Iterator[Span]:
        """Yields the actions as rows, in the order of the columns."""
        return map(Span, self.worker, self.lane, self.action, self.start_s, self.end_s)
