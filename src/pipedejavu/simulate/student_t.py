"""Prediction of one more value from earlier ones that are related to it, with an interval that is honest about few.

The values are a Student t process: jointly normal with known correlations, and with a common scale that is itself
uncertain. Its prior is worth as many values as it has degrees of freedom; every value adds one. What is predicted has a
Student t distribution, in closed form: its tails are heavy as long as little is known.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FREEDOM = 4.0
"""Degrees of freedom of the prior: it is given up after a handful of values that deviate more, or less."""


class StudentT(NamedTuple):
    """A Student t distribution: its centre, its scale and its degrees of freedom."""

    centre: float
    scale: float
    freedom: float

    def draw(self, source: np.random.Generator, count: int) -> np.ndarray:
        """Returns independent draws."""
        return self.centre + self.scale * source.standard_t(self.freedom, count)


def predict_next(
    values: Sequence[float], kinship: Sequence[Sequence[float]], kin: Sequence[float], scale: float
) -> StudentT:
    """Returns the distribution of the next value, of prior mean 0 and prior `scale`.

    `kinship` has the correlations between the values, `kin` those between the next value and each of them.
    """
    if not values:
        return StudentT(0.0, scale, FREEDOM)
    seen, to_next = np.array(values), np.array(kin)
    weights = np.linalg.solve(np.array(kinship), np.column_stack((seen, to_next)))
    centre, known = float(to_next @ weights[:, 0]), float(to_next @ weights[:, 1])
    freedom = FREEDOM + len(values)
    common = (FREEDOM * scale**2 + float(seen @ weights[:, 0])) / freedom
    return StudentT(centre, (common * max(0.0, 1.0 - known)) ** 0.5, freedom)
