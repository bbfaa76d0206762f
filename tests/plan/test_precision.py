"""The axis `precision`: its text, plan files with and without it, and the combinations that are refused."""

import re
from typing import Any

import pytest

from pipedejavu.facts import Profile, Unit
from pipedejavu.plan import Keep, Plan, Precision, Reduce, faults_of

PROFILE = Profile(name="one", units=(Unit(name="unit"),))
SPLIT = Precision(compute="bf16", masters="split")


def faults(**axes: Any) -> list[str]:
    plan = Plan(**axes)
    return faults_of(plan, PROFILE)


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        (Precision(), "fp32"),
        (SPLIT, "bf16, split masters"),
        (SPLIT.replace(moments="int8", accumulate="bf16"), "bf16, split masters, int8 moments, sums in bf16"),
        (Precision(compute="fp16", masters="fp32"), "fp16, fp32 masters"),
    ],
)
def test_precision_prints_as_one_text(precision: Precision, text: str) -> None:
    assert str(precision) == text == Plan(precision=precision).axes().get("precision", "fp32")


def test_a_plan_file_without_precision_is_fp32() -> None:
    assert Plan.from_json("{}").precision == Precision()
    assert '"precision"' not in Plan(name="p").to_json()
    plan = Plan(precision=SPLIT)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"precision": SPLIT},
        {"precision": SPLIT.replace(moments="int8", accumulate="bf16")},
        {"precision": Precision(compute="bf16", masters="fp32")},
        {"precision": Precision(compute="fp16", masters="fp32"), "reduce": Reduce(clip="global")},
        {"precision": Precision(compute="tf32")},
        {"precision": Precision(compute="fp64")},
    ],
)
def test_combinations_that_make_sense_break_no_rule(axes: dict[str, Any]) -> None:
    assert faults(**axes) == []


@pytest.mark.parametrize(
    ("axes", "part"),
    [
        ({"precision": Precision(masters="split")}, "compute 'fp32' cannot have masters 'split'.*set .* to 'none'"),
        ({"precision": Precision(compute="bf16")}, "compute 'bf16' cannot have masters 'none'.*set .* to 'split'"),
        (
            {"precision": Precision(compute="fp16", masters="split"), "reduce": Reduce(clip="global")},
            "compute 'fp16' cannot have masters 'split'.*set .* to 'fp32'",
        ),
        ({"precision": Precision(accumulate="bf16")}, "masters 'none' have float32 weights; leave"),
        ({"precision": Precision(compute="fp64", moments="int8")}, "moments of int8 would round away"),
        ({"precision": Precision(compute="fp16", masters="fp32")}, "gradients of fp16 may overflow.*reduce.clip"),
        (
            {"precision": SPLIT, "keep": Keep(kind="shared"), "reduce": Reduce(wire="shared-memory", gate="none")},
            "keep 'shared' with gate 'none' and combiner 'sum' adds to the weights.*set precision.masters to 'fp32'",
        ),
        (
            {"precision": SPLIT, "reduce": Reduce(wire="all-reduce", combiner="average")},
            "combiner 'average' adds to the weights",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_refused_with_a_remedy(axes: dict[str, Any], part: str) -> None:
    [fault] = faults(**axes)
    assert re.search(part, fault), fault
