"""The rows that `bench/operators.py` measures are counted as models are."""

import math

import pytest
import torch

from pipedejavu.profile.operator_meter import OperatorMeter
from tests.script import load_script

script = load_script("operators")
CASES = [(name, own[0]) for name, own in script.SHAPES["cpu"].items() if name not in ("update", "copy")]


@pytest.mark.parametrize(("operator", "shape"), CASES)
def test_a_row_is_counted_as_a_model_is(operator: str, shape: tuple[int, ...]) -> None:
    for _, run, flop in script.runs_of(operator, shape, torch.float32, torch.device("cpu")):
        counter = OperatorMeter(torch.nn.Identity())
        with counter.part("it"):
            run()
        done = counter.parts["it"]
        assert sum(work.size_bytes for work in done) == script.count_bytes(operator, shape, torch.float32, run)
        assert sum(work.flop for work in done) == pytest.approx(flop)


def test_of_a_table_the_rows_that_are_asked_for_are_read() -> None:
    table, asked = torch.ones(1000, 8), torch.tensor([1, 2])
    counter = OperatorMeter(torch.nn.Identity())
    with counter.part("it"):
        torch.nn.functional.embedding(asked, table)
    assert [work.size_bytes for work in counter.parts["it"]] == [2 * 8 * 4 + 2 * 8 + 2 * 8 * 4]


def test_a_device_is_measured_with_its_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.SHAPES, "cpu", {"matmul": ((8, 8, 8),), "copy": ((64,),), "update": ((64,),)})
    rows = script.measure(script.Place("here", torch.device("cpu"), torch.get_num_threads()), 0.0)
    passes = [(row["operator"], row["pass"]) for row in rows if row["dtype"] == "float32"]
    assert passes == [("matmul", "forward"), ("matmul", "backward"), ("copy", "forward"), ("update", "forward")]
    assert all(row["time_s"] > 0 and row["spread"] >= 0 for row in rows)
    for dtype in script.DTYPES:
        own = [row for row in rows if row["dtype"] == dtype]
        best = max(row["flop"] / row["time_s"] for row in own)
        assert all(math.isclose(row["flop_per_s"], best) for row in own)


@pytest.mark.parametrize(("operation", "operands"), [("mm", 0), ("addmm", 1)])
def test_products_into_another_dtype_are_counted(operation: str, operands: int) -> None:
    left, right = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 8), (8, 3)))
    total = [torch.empty(4, 3, device="meta")] * operands
    meter = OperatorMeter(torch.nn.Module())
    with meter.part("forward"):
        getattr(torch.ops.aten, operation).dtype(*total, left, right, torch.float32)
    (work,) = meter.parts["forward"]
    assert work.flop == 2 * 4 * 3 * 8
