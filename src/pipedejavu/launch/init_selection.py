r"""Selects one of several initialisations by their losses alone.

All candidates train on the same samples. Losses are averaged over windows of equal length. The fall of a window is how
much lower its mean is than that of the window before, as a median over the candidates. A window is on a plateau if it
falls by less than a quarter of the steepest fall so far; the first steep fall is therefore never a plateau. At the end
of such a window the worse half of the candidates, by mean loss, is dropped:

    loss  \                             windows of 5, candidates 8
           \.
             `-._                      steepest fall: window 2
                 `----.______          window 4 falls by less than a quarter of it: 4 go on
          |    |    |    |    |        window 5 does too: 2 go on
"""

import math
from statistics import fmean, median

PLATEAU = 0.25
"""Fraction of the steepest fall so far; a window that falls by less is on a plateau."""


class InitSelection:
    """The candidates that are left, numbered from 0; over when one is left or all have made `steps` updates."""

    def __init__(self, count: int, steps: int):
        self.alive = tuple(range(count))
        self.steps, self.window = steps, max(1, min(steps, max(3, steps // 10)))
        self.losses: list[list[float]] = [[] for _ in range(count)]
        """Per candidate, the loss of each of its updates."""
        self.drops: list[tuple[int, tuple[int, ...]]] = []
        """Updates after which candidates were dropped, with the numbers of those candidates."""
        self._steepest = 0.0

    @property
    def updates(self) -> int:
        """Updates that the remaining candidates have made."""
        return len(self.losses[self.alive[0]])

    @property
    def is_over(self) -> bool:
        """Whether one candidate is left or all updates are made."""
        return len(self.alive) == 1 or self.updates >= self.steps

    @property
    def winner(self) -> int:
        """The candidate with the lowest mean loss over the last window; ties go to the lowest number."""
        return min(self.alive, key=lambda candidate: (self._mean(candidate, self.updates), candidate))

    def take(self, losses: list[float]) -> None:
        """Takes the loss of each candidate in this update, and drops the worse half at the end of a plateau window.

        Losses of dropped candidates are ignored.
        """
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
        """Returns the mean loss of the window that ends with update `end`; infinity if it is not finite."""
        mean = fmean(self.losses[candidate][max(0, end - self.window) : end])
        return mean if math.isfinite(mean) else math.inf
