"""Predictors of an operator's time on a device that was not measured, fitted to measured rows of other devices.

Each predictor knows only two rates of a device. The roofline fits, per type of device, a launch time for forward and
backward and an efficiency λ per operator class, as in BSP-style models: time = launch + bound / λ. The others learn the
ratio of time to bound from features of operator and device: linear regression, support vector regression and a random
forest, the last two with scikit-learn.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pipedejavu.facts import InputError
from pipedejavu.profile.operator import CLASSES, OperatorRow, known_rows

Predict = Callable[[Sequence[OperatorRow]], list[float]]
"""Returns a time in seconds for each row; does not use the rows' measured times."""

_SHARES = np.geomspace(0.01, 3.0, 229)
_LAUNCHES_S = np.geomspace(1e-7, 1e-3, 161)
"""The grid that is searched, in steps of 2.5 % and 6 %."""
_SWEEPS = 8
_RIDGE = 1e-3


class Efficiency(NamedTuple):
    """How efficiently a type of device runs operators."""

    launch_s: Mapping[str, float]
    """Launch time by pass."""
    shares: Mapping[str, float]
    """Efficiency λ by operator class."""

    def share(self, class_: str) -> float:
        """Returns λ of an operator class, or the geometric mean of all classes if it is unknown."""
        share = self.shares.get(class_)
        return share if share is not None else float(np.exp(np.mean(np.log(list(self.shares.values())))))

    def time_s(self, row: OperatorRow) -> float:
        """Returns the predicted time of an operator."""
        launch_s = self.launch_s.get(row.pass_, min(self.launch_s.values()))
        return launch_s + row.bound_s / self.share(row.class_)


def fit_efficiency(rows: Sequence[OperatorRow]) -> Efficiency:
    """Minimises the sum of |log(predicted ÷ measured)| by coordinate descent."""
    passes, classes = sorted({row.pass_ for row in rows}), sorted({row.class_ for row in rows})
    launches, shares = dict.fromkeys(passes, 1e-5), dict.fromkeys(classes, 0.5)
    bound, time = (np.array(list(values)) for values in zip(*((r.bound_s, r.time_s) for r in rows), strict=True))
    row_passes, row_classes = np.array([r.pass_ for r in rows]), np.array([r.class_ for r in rows])
    for _ in range(_SWEEPS):
        launch = np.array([launches[name] for name in row_passes])
        for name in classes:
            some = row_classes == name
            shares[name] = _best(_SHARES, launch[some] + bound[some] / _SHARES[:, None], time[some])
        reached = bound / np.array([shares[name] for name in row_classes])
        for name in passes:
            some = row_passes == name
            launches[name] = _best(_LAUNCHES_S, _LAUNCHES_S[:, None] + reached[some], time[some])
    return Efficiency(launches, shares)


def _best(tried: Any, predicted: Any, time: Any) -> float:
    """Returns the candidate whose predictions, one row per candidate, are nearest to the measured times."""
    errors = np.abs(np.log(predicted / time)).sum(axis=1)
    return float(tried[int(errors.argmin())])


def fit_roofline(rows: Sequence[OperatorRow]) -> Predict:
    """Fits an efficiency to each type of device, and one to all rows for types that have none."""
    by_type = {type_: fit_efficiency([r for r in rows if r.type == type_]) for type_ in {r.type for r in rows}}
    other = fit_efficiency(rows)
    return lambda asked: [by_type.get(row.type, other).time_s(row) for row in asked]


@cache
def known_efficiencies() -> dict[str, Efficiency]:
    """Returns the efficiency of each type of device, fitted to `operators.csv`."""
    rows = known_rows()
    return {type_: fit_efficiency([r for r in rows if r.type == type_]) for type_ in sorted({r.type for r in rows})}


def fit_linear(rows: Sequence[OperatorRow]) -> Predict:
    """Fits log-times by ridge regression."""
    features, targets = _features(rows), _targets(rows)
    weights = np.linalg.solve(
        features.T @ features + _RIDGE * len(rows) * np.eye(features.shape[1]), features.T @ targets
    )
    return lambda asked: _times(asked, _features(asked) @ weights)


def fit_svr(rows: Sequence[OperatorRow]) -> Predict:
    """Fits a support vector regression."""
    svm, pipeline, scaling = (_sklearn(name) for name in ("svm", "pipeline", "preprocessing"))
    return _learned(rows, pipeline.make_pipeline(scaling.StandardScaler(), svm.SVR(C=10.0, epsilon=0.05)))


def fit_forest(rows: Sequence[OperatorRow]) -> Predict:
    """Fits a random forest."""
    ensemble = _sklearn("ensemble")
    return _learned(rows, ensemble.RandomForestRegressor(300, min_samples_leaf=2, random_state=0))


PREDICTORS: dict[str, Callable[[Sequence[OperatorRow]], Predict]] = {
    "roofline": fit_roofline,
    "linear": fit_linear,
    "svr": fit_svr,
    "forest": fit_forest,
}


def _learned(rows: Sequence[OperatorRow], model: Any) -> Predict:
    model.fit(_features(rows), _targets(rows))
    return lambda asked: _times(asked, model.predict(_features(asked)))


def _sklearn(name: str) -> Any:
    try:
        return __import__(f"sklearn.{name}", fromlist=[name])
    except ImportError:
        raise InputError("this predictor needs scikit-learn: pip install 'pipedejavu[data]'") from None


def _features(rows: Sequence[OperatorRow]) -> Any:
    """Returns the feature matrix: logarithms of sizes and rates, and one-hot categories."""
    return np.array(
        [
            [
                1.0,
                np.log(row.bound_s),
                np.log(row.bound_s) ** 2 / 10,
                np.log(row.size_bytes),
                np.log1p(row.flop / row.size_bytes),
                np.log(row.flop_per_s / row.bytes_per_s),
                float(row.flop / row.flop_per_s > row.size_bytes / row.bytes_per_s),
                float(row.pass_ == "backward"),
                float(row.dtype == "float32"),
                float(row.type == "gpu"),
                *(float(row.class_ == name) for name in CLASSES),
            ]
            for row in rows
        ]
    )


def _targets(rows: Sequence[OperatorRow]) -> Any:
    """Returns the logarithm of each row's time over its bound."""
    return np.array([np.log(row.time_s / row.bound_s) for row in rows])


def _times(rows: Sequence[OperatorRow], targets: Any) -> list[float]:
    return [float(row.bound_s * np.exp(target)) for row, target in zip(rows, targets, strict=True)]


def leave_one_out(
    rows: Sequence[OperatorRow], key: Callable[[OperatorRow], str], fit: Callable[[Sequence[OperatorRow]], Predict]
) -> dict[str, list[float]]:
    """Predicts each group of rows from all other groups; returns predicted ÷ measured by group."""
    ratios = {}
    for name in sorted({key(row) for row in rows}):
        held = [row for row in rows if key(row) == name]
        others = [row for row in rows if key(row) != name]
        if not others:
            raise InputError(f"all {len(rows)} rows are of '{name}'; nothing is left to fit to without them")
        predicted = fit(others)(held)
        ratios[name] = [time / row.time_s for time, row in zip(predicted, held, strict=True)]
    return ratios
