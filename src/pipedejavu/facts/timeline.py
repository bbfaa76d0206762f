"""What happened, or what is predicted to happen: every action with its start and end, and memory.

Predicted and measured timelines have the same shape and name actions by the same text, so that the two
can be joined. Columns, not rows: a timeline may hold very many actions.
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
    """Bytes in use in one worker's memory: from times_s[i] on, classes[c][i] bytes of class c."""

    memory: Literal["device", "host"]
    capacity_bytes: Bytes
    times_s: tuple[Seconds, ...]
    classes: dict[str, tuple[float, ...]]
    peak_bytes: float
    peak_classes: dict[str, float]
    """What the peak consists of."""


class WorkerSummary(Record):
    """One worker's share of a timeline; `copies` workers behave exactly like it."""

    worker: int = Field(ge=0)
    device: str
    copies: int = Field(default=1, ge=1)
    busy_s: Seconds
    peak_bytes: float
    """In the device's own memory."""
    allocated_bytes: float | None = None
    """The same with every tensor's size rounded up as a GPU's allocator does; None where tensors are not known."""
    reserved_bytes: float | None = None
    """What that allocator holds of the device for them."""
    peak_live_microbatches: int
    """Most (piece, microbatch) pairs between their forward and the end of their backward at once."""
    weight_versions: int
    """Most versions of one piece's weights held at once."""
    memory: tuple[MemoryCurve, ...] = ()


class Timeline(Record):
    """Columns over actions, and one summary for each worker."""

    most_bytes: ClassVar[int] = 1 << 30

    origin: Literal["predicted", "measured"]
    makespan_s: Seconds
    bubble_fraction: float
    """Share of the compute lanes, over the workers that compute and the whole makespan, that is idle."""
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
        """Returns a fault where the columns differ in length, an action ends early or lacks its worker."""
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
        """Yields the actions as rows, in the columns' order."""
        return map(Span, self.worker, self.lane, self.action, self.start_s, self.end_s)
