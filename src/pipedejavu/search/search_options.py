"""Options of a search: the batch, the objective, what is allowed, and the time budget."""

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from pipedejavu.facts import Record
from pipedejavu.facts.quantity import Seconds
from pipedejavu.plan import Precision
from pipedejavu.search.correction_choice import Correction

Searcher = Literal["auto", "exhaustive", "dp", "mcmc", "gradient"]
Progress = Callable[[float, str], None]
"""Called with the share that is done, from 0 to 1, and a description of the current step."""


class SearchOptions(Record):
    """Options of one search; fields that contradict each other are refused."""

    batch: int = Field(default=32, ge=1)
    """Samples per update, over all replicas."""
    searcher: Searcher = "auto"
    objective: Literal["time", "price", "batch", "blocks", "context"] = "time"
    """`time` and `price` are minimised per sample. `batch`, `blocks` and `context` are for `find_largest`: first the
    largest that fits, then time; under `batch` an update is one pass, as any batch fits in microbatches."""
    prices: dict[str, float] = Field(default_factory=dict)
    """Price per device and hour, by kind; other kinds cost nothing."""
    staleness: int = Field(default=0, ge=0)
    """Most updates by which a microbatch's weights may be old; 0 allows only synchronous plans."""
    correction: Correction = "auto"
    """What restores the accuracy of stale plans. `auto`: of the forms of the fastest stale pipeline, the one that lost
    the least accuracy in the study, if it is faster than the exact plans; `rates`: learning rates by delay."""
    samples: int | None = Field(default=None, ge=1)
    """Samples per microbatch; by default the best size that divides the batch."""
    clip: Literal["none", "global"] = "none"
    """Whether gradients are clipped by their global norm."""
    precision: Precision = Precision()
    """The precision of the plans, in which the profile was measured."""
    is_runnable: bool = False
    """Whether to search only plans that the engine runs: no tensor-parallel groups of several sizes."""
    head_chunks: int | None = Field(default=None, ge=1)
    """Chunks of tokens in which the model's head runs; by default the best of those in the profile."""
    devices: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Devices that may be used; by default all for which the profile has times."""
    time_budget_s: Seconds = 60.0
    """When it is over, the result holds the best plans so far."""
    seed: int = 0
    candidates: int = Field(default=5, ge=1)
    """Plans in the result at most; for more than one, about three times as many are simulated."""

    @property
    def finalists(self) -> int:
        """About how many plans are simulated: candidates, and their other schedules."""
        return 3 * self.candidates - 2

    def disagreements(self) -> list[str]:
        """Returns the contradictions: microbatches that do not divide the batch, and missing or negative prices."""
        faults = []
        if self.samples is not None and self.batch % self.samples:
            faults.append(
                f"microbatches of {self.samples} samples do not make up a batch of {self.batch}; use a divisor of it"
            )
        if self.correction not in ("auto", "none") and not self.staleness:
            faults.append(
                f"correction '{self.correction}' restores what stale weights cost, and none may be stale; allow it"
                " (--staleness 1), or leave the correction out"
            )
        faults += [
            f"the price of '{kind}' is {price}; it must be 0 or more"
            for kind, price in self.prices.items()
            if price < 0
        ]
        if self.objective == "price" and not self.prices:
            faults.append(
                "objective 'price' needs the price of an hour on each kind of device; give prices (--price a100=2.5)"
            )
        return faults
