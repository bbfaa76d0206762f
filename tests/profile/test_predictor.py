"""Predictors: what each finds again in rows that follow from it, and what it says of groups that it has not seen."""

import math
import random

import pytest

pytest.importorskip("torch")

from pipedejavu.profile.operator import CLASSES, OperatorRow, known_rows
from pipedejavu.profile.predictor import (
    PREDICTORS,
    Efficiency,
    fit_efficiency,
    fit_linear,
    fit_roofline,
    known_efficiencies,
    leave_one_out,
)

REAL = Efficiency(
    launch_s={"forward": 5e-6, "backward": 2e-5},
    shares={name: 0.1 + 0.1 * n for n, name in enumerate(CLASSES)},
)
DEVICES = {"small": (1e11, 1e10), "large": (4e12, 2e11)}


def rows_of(efficiency: Efficiency, device: str) -> list[OperatorRow]:
    chance, (flop_per_s, bytes_per_s) = random.Random(device), DEVICES[device]
    found = []
    for class_ in efficiency.shares:
        for _ in range(12):
            size = 10 ** chance.uniform(4, 9)
            flop = size * chance.choice([0, 1, 300]) if class_ in ("matmul", "conv", "attention") else 0.0
            pass_ = chance.choice(["forward", "backward"])
            row = OperatorRow(device, "cpu", "float32", class_, pass_, "", flop, size, 1.0, flop_per_s, bytes_per_s)
            found.append(row._replace(time_s=efficiency.time_s(row)))
    return found


def test_an_efficiency_is_found_again_and_holds_on_another_device() -> None:
    found = fit_efficiency(rows_of(REAL, "small"))
    for name, share in REAL.shares.items():
        assert found.shares[name] == pytest.approx(share, rel=0.06)  # two steps of what is tried
    for name, launch_s in REAL.launch_s.items():
        assert found.launch_s[name] == pytest.approx(launch_s, rel=0.25)
    ratios = leave_one_out(rows_of(REAL, "small") + rows_of(REAL, "large"), lambda row: row.device, fit_roofline)
    assert ratios.keys() == {"small", "large"}
    assert max(abs(math.log(ratio)) for own in ratios.values() for ratio in own) < 0.25


def test_what_was_measured_of_rows_that_are_asked_for_is_not_looked_at() -> None:
    rows = rows_of(REAL, "small")
    for name in ("roofline", "linear"):
        predict = PREDICTORS[name](rows)
        assert predict(rows) == predict([row._replace(time_s=1e9) for row in rows])


def test_an_unknown_class_is_in_the_middle_of_the_others() -> None:
    efficiency = Efficiency({"forward": 0.0}, {"matmul": 0.1, "norm": 0.4})
    assert efficiency.share("conv") == pytest.approx(0.2)
    ratios = leave_one_out(rows_of(REAL, "small"), lambda row: row.class_, fit_roofline)
    assert ratios.keys() == set(CLASSES)
    assert min(ratios["update"]) > 1  # it is the most efficient, and taken to be of the middle


def test_a_type_without_rows_goes_by_all_others() -> None:
    rows = rows_of(REAL, "small")
    gpu = [row._replace(type="gpu") for row in rows]
    assert fit_roofline(rows)(gpu) == fit_roofline(rows)(rows)


def test_a_line_of_logarithms_is_found_again() -> None:
    plain = Efficiency({"forward": 1e-12, "backward": 1e-12}, REAL.shares)
    rows = rows_of(plain, "small")
    predicted = fit_linear(rows)(rows)
    assert max(abs(math.log(p / row.time_s)) for p, row in zip(predicted, rows, strict=True)) < 0.1


@pytest.mark.parametrize("name", ["svr", "forest"])
def test_what_scikit_learn_fits_is_near_its_rows(name: str) -> None:
    pytest.importorskip("sklearn")
    rows = rows_of(REAL, "small")
    predicted = PREDICTORS[name](rows)(rows)
    errors = sorted(abs(math.log(p / row.time_s)) for p, row in zip(predicted, rows, strict=True))
    assert errors[len(errors) // 2] < 0.15


def test_the_project_knows_cpus() -> None:
    efficiency = known_efficiencies()["cpu"]
    assert efficiency.shares.keys() == set(CLASSES)
    assert all(0 < share < 3 for share in efficiency.shares.values())
    assert len(known_rows()) > 100
