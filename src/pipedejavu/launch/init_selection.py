r"""Which of several initialisations to go on with, told by their losses alone.

All candidates see the same samples. Their losses are averaged over windows of equal length; the fall of a window is
what the mean has lost against the window before it, and the candidates' median fall is the race's. A window is on a
plateau when the race falls by less than a quarter of its steepest fall so far: never in the first steep fall, which is
the steepest itself. At the end of such a window the worse half, by its mean, leaves:

    loss  \                             windows of 5, candidates 8
           \.
             `-._                      steepest fall: window 2
                 `----.______          window 4 falls by less than a quarter of it: 4 go on
          |    |    |    |    |        window 5 does too: 2 go on
"""

import math
from statistics import fmean, median

PLATEAU = 0.25
"""Of the steepest fall so far; a window that falls by less is on a plateau."""


class InitSelection:
    """Candidates, numbered from 0, until one is left or each has made its `steps` updates."""

    def __init__(self, count: int, steps: int):
        self.alive = tuple(range(count))
        self.steps, self.window = steps, max(1, min(steps, max(3, steps // 10)))
        self.losses: list[list[float]] = [[] for _ in range(count)]
        """Of each update that a candidate made."""
        self.drops: list[tuple[int, tuple[int, ...]]] = []
        """Behind which update candidates left, and which."""
        self._steepest = 0.0

    @property
    def updates(self) -> int:
        """Updates that whoever is left has made."""
        return len(self.losses[self.alive[0]])

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to decide."""
        return len(self.alive) == 1 or self.updates >= self.steps

    @property
    def winner(self) -> int:
        """The candidate to go on with: the one with the lowest mean over the last window, of equals the first."""
        return min(self.alive, key=lambda candidate: (self._mean(candidate, self.updates), candidate))

    def take(self, losses: list[float]) -> None:
        """Takes the loss that each candidate had in this update; what those that have left say is not looked at."""
        for candidate in self.alive:
            self.losses[candidate].append(losses[candidate])
        if self.updates % self.window == 0 and self.updates >= 2 * self.window and self._is_on_plateau():
            ranked = sorted(self.alive, key=lambda candidate: (self._mean(candidate, self.updates), candidate))
            better = tuple(sorted(ranked[: (len(ranked) + 1) // 2]))
            self.drops.append((self.updates, tuple(c for c in self.alive if c not in better)))
            self.alive = better

    def _is_on_plateau(self) -> bool:
        means = [(self._mean(c, self.updates - self.window), self._mean(c, self.updates)) for c in self.alive]
        falls = [before - after for before, after in means if math.isfinite(before) and math.isfinite(after)]
        fall = median(falls) if falls else 0.0
        self._steepest = max(self._steepest, fall)
        return self._steepest > 0 and fall < PLATEAU * self._steepest

    def _mean(self, candidate: int, end: int) -> float:
        """Returns the mean loss of the window that ends behind an update; infinity where it is no number."""
        found = fmean(self.losses[candidate][max(0, end - self.window) : end])
        return found if math.isfinite(found) else math.inf
