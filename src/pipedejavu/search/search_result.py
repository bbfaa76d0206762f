"""What a search answers: plans, best first, with what each is predicted to take and why it is as it is."""

from math import inf

from pydantic import Field

from pipedejavu.facts import Bytes, Machine, Profile, Record
from pipedejavu.facts.quantity import Seconds
from pipedejavu.plan import Plan


class MemoryNeed(Record):
    """The highest need of one device's memory, and what it has."""

    device: str
    need_bytes: float
    reserved_bytes: float | None = None
    """What a GPU's allocator would reserve for it, where that is known."""
    room_bytes: Bytes

    @property
    def share(self) -> float:
        """The need as a part of what is there."""
        return self.need_bytes / self.room_bytes if self.room_bytes else float("inf")


class RankedPlan(Record):
    """A plan that fits, and its forecast.

    The forecast holds for `machine` and `profile`, which are those of the question unless the plan divides a CPU
    between workers.
    """

    plan: Plan
    time_s: Seconds
    """Of one update."""
    samples: int = Field(ge=1)
    """Of one update."""
    price: float = Field(default=0.0, ge=0)
    """Of one update."""
    bubble_fraction: float
    memory: tuple[MemoryNeed, ...]
    bound: str
    """What keeps it from being faster: 'stage 1 (units 4 to 7) on gpu1 computes 93 % of the time'."""
    reasons: tuple[str, ...] = ()
    estimated_s: Seconds
    """Of one update, by the estimate that the search minimises; `time_s` is the simulator's."""
    only_costed: str = ""
    """Why the engine does not run the plan; empty where it does."""
    machine: Machine
    profile: Profile

    @property
    def time_per_sample_s(self) -> float:
        """The time of one update, divided by its samples."""
        return self.time_s / self.samples

    @property
    def fullest_share(self) -> float:
        """The part of its memory that the fullest device needs."""
        return max((need.share for need in self.memory), default=inf)

    @property
    def is_runnable(self) -> bool:
        """Whether the engine runs the plan."""
        return not self.only_costed


class SearchResult(Record):
    """The answer: candidates that fit, best first; none where nothing fits."""

    candidates: tuple[RankedPlan, ...]
    searcher: str
    """The one that was used."""
    reason: str
    """Why that one."""
    num_estimated: int = Field(ge=0)
    """Plans, or sets of plans, whose time was estimated."""
    num_simulated: int = Field(ge=0)
    is_complete: bool
    """Whether the whole space was looked at within the time budget."""
    time_s: Seconds
    """That the search took."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    @property
    def best(self) -> RankedPlan | None:
        """The first candidate, if any."""
        return self.candidates[0] if self.candidates else None
