"""A limit on the time that all measurements of a model take together."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipedejavu.facts import InputError
from pipedejavu.facts.measurement import MEASURE_S


class TimeBudget:
    """Counts the time that is spent within `spending`; what starts after the budget is spent is left out."""

    def __init__(self, total_s: float = MEASURE_S):
        if not 0 <= total_s < math.inf:
            raise InputError(f"measuring may take a number of seconds, 0 or more, not {total_s:g}")
        self.total_s = total_s
        self._spent_s = 0.0
        self._since: float | None = None

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time inside the `with` block, once if blocks are nested."""
        if self._since is not None:
            yield
            return
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s += time.perf_counter() - self._since
            self._since = None

    @property
    def left_s(self) -> float:
        """The time that is left; negative if more was spent."""
        running_s = 0.0 if self._since is None else time.perf_counter() - self._since
        return self.total_s - self._spent_s - running_s

    @property
    def spent_share(self) -> float:
        """The share of the budget that is spent, at most 1."""
        return min(1.0, 1.0 - self.left_s / self.total_s) if self.total_s else 1.0

    def part(self, share: float) -> "BudgetPart":
        """Returns a share of what is left now."""
        return BudgetPart(self, (1.0 - share) * max(0.0, self.left_s))


class BudgetPart:
    """A part of a budget, which is spent while the budget still has `kept_s`."""

    def __init__(self, budget: TimeBudget, kept_s: float):
        self._budget, self._kept_s = budget, kept_s

    @property
    def left_s(self) -> float:
        """The time that is left; negative if more was spent."""
        return self._budget.left_s - self._kept_s

    def allows(self, time_s: float) -> bool:
        """Whether something that takes `time_s` may start."""
        return self.left_s > time_s
