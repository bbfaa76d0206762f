"""What a search is asked for: the batch, the objective, what is allowed, and how long it may take."""

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from pipedejavu.facts import Record
from pipedejavu.facts.quantity import Seconds

Searcher = Literal["auto", "exhaustive", "dp", "mcmc", "gradient"]
Progress = Callable[[float, str], None]
"""Takes the part that is done, from 0 to 1, and what goes on."""


class SearchOptions(Record):
    """One question to the planner; `search` refuses fields that disagree."""

    batch: int = Field(default=32, ge=1)
    """Samples of one update, over all replicas."""
    searcher: Searcher = "auto"
    objective: Literal["time", "price", "batch", "blocks"] = "time"
    """What of a sample is to be least. `batch` and `blocks` are `find_largest`'s: what fits counts, and then time;
    under `batch` an update is one pass, as any batch fits in parts."""
    prices: dict[str, float] = Field(default_factory=dict)
    """Of an hour on a device, by its kind; those that are not named cost nothing."""
    staleness: int = Field(default=0, ge=0)
    """How many updates old the weights may be that a microbatch reads; 0 asks for synchronous plans."""
    samples: int | None = Field(default=None, ge=1)
    """Of a microbatch; by default the best of those that divide the batch."""
    clip: Literal["none", "global"] = "none"
    """Whether gradients are clipped by their norm."""
    is_runnable: bool = False
    """Whether only plans count that the engine runs: no ZeRO, no divided operators."""
    devices: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Of the machine, those that may be used; by default all whose times the profile knows."""
    time_budget_s: Seconds = 60.0
    """When it is over, the best so far is the answer."""
    seed: int = 0
    candidates: int = Field(default=5, ge=1)
    """How many plans the answer holds at most; about three times as many are simulated, but for one."""

    @property
    def finalists(self) -> int:
        """About how many plans are simulated: drafts, and other orders beside them."""
        return 3 * self.candidates - 2

    def disagreements(self) -> list[str]:
        """Returns a fault where microbatches do not make up the batch, or a price is negative."""
        faults = []
        if self.samples is not None and self.batch % self.samples:
            faults.append(
                f"microbatches of {self.samples} samples do not make up a batch of {self.batch}; use a divisor of it"
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
