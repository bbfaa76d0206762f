"""The result of a search: plans, best first, with their forecasts and reasons."""

from math import inf

from pydantic import Field

from pipedejavu.facts import Bytes, Machine, Profile, Record
from pipedejavu.facts.quantity import Seconds
from pipedejavu.plan import Plan
from pipedejavu.simulate import Chance, estimated_chance


class MemoryNeed(Record):
    """The peak need of one device's memory, and its limit."""

    device: str
    need_bytes: float
    reserved_bytes: float | None = None
    """Bytes that a GPU's allocator would reserve, if known."""
    room_bytes: Bytes
    """The memory limit."""

    @property
    def share(self) -> float:
        """The need relative to the limit."""
        return self.need_bytes / self.room_bytes if self.room_bytes else float("inf")


class RankedPlan(Record):
    """A plan that fits, and its forecast.

    The forecast holds for `machine` and `profile`, which are those passed to `search` unless the plan divides a CPU
    between workers.
    """

    plan: Plan
    time_s: Seconds
    """Simulated time of one update."""
    samples: int = Field(ge=1)
    """Samples per update."""
    price: float = Field(default=0.0, ge=0)
    """Price of one update."""
    bubble_fraction: float
    memory: tuple[MemoryNeed, ...]
    bound: str
    """What keeps it from being faster: 'stage 1 (units 4 to 7) on gpu1 computes 93 % of the time'."""
    reasons: tuple[str, ...] = ()
    estimated_s: Seconds
    """Time of one update by the estimate that the search minimises."""
    only_costed: str = ""
    """Why the engine does not run the plan; empty if it does."""
    machine: Machine
    profile: Profile

    @property
    def time_per_sample_s(self) -> float:
        """Time of one update, divided by its samples."""
        return self.time_s / self.samples

    @property
    def chance(self) -> Chance:
        """The distribution of the time of one update, if its times are estimated with a known error."""
        devices = [self.machine.device(need.device) for need in self.memory]
        kinds = {d.kind for d in devices if d.type == "gpu"} or {d.kind for d in devices}
        return estimated_chance(self.profile.error, kinds, self.time_s)

    @property
    def fullest_share(self) -> float:
        """Largest need relative to its memory limit, over devices."""
        return max((need.share for need in self.memory), default=inf)

    @property
    def is_runnable(self) -> bool:
        """Whether the engine runs the plan."""
        return not self.only_costed


class SearchResult(Record):
    """The plans that fit, best first, and how they were found; no plans if nothing fits."""

    candidates: tuple[RankedPlan, ...]
    searcher: str
    """The searcher that was used."""
    reason: str
    """Why this searcher was used."""
    num_estimated: int = Field(ge=0)
    """Candidates, or sets of candidates, whose time was estimated."""
    num_simulated: int = Field(ge=0)
    is_complete: bool
    """Whether the search covered the whole space within the time budget."""
    time_s: Seconds
    """Time that the search took."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    @property
    def best(self) -> RankedPlan | None:
        """The first candidate, if any."""
        return self.candidates[0] if self.candidates else None
