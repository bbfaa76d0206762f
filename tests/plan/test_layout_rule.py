"""Layouts of operators that a model does not have are refused."""

import pytest

from pipedejavu.facts import FaultsError, Profile, Unit
from pipedejavu.plan import Cut, Place, Plan, preset
from pipedejavu.plan.rule import check_plan, faults_of


def profile(*counts: tuple[int | None, int | None]) -> Profile:
    units = (Unit(name=f"u{n}", num_convolutions=c, num_products=p) for n, (c, p) in enumerate(counts))
    return Profile(name="mine", units=tuple(units))


@pytest.mark.parametrize("layout", ["stationary-x", "stationary-y", "stationary-w"])
def test_channels_need_a_convolution(layout: str) -> None:
    plan = preset(layout).at(workers=2)
    with pytest.raises(FaultsError, match=f"layout '{layout}' divides the filters .* and model 'mine' has no convol"):
        check_plan(plan, profile((0, 4), (0, 4)))
    check_plan(plan, profile((0, 4), (1, 0)))
    check_plan(plan, profile((0, 4), (None, None)))


def test_pairs_need_two_layers() -> None:
    plan = preset("megatron").at(workers=2)
    with pytest.raises(FaultsError, match="has 1 matrix products and 0 convolutions; use preset:ddp"):
        check_plan(plan, profile((0, 1), (0, 0)))
    check_plan(plan, profile((0, 1), (0, 1)))
    check_plan(plan, profile((2, 0), (0, 0)))
    check_plan(plan, profile((None, None)))


def test_other_plans_need_none() -> None:
    assert not faults_of(preset("ddp").at(workers=2), profile((0, 0)))


@pytest.mark.parametrize("layout", ["sequence", "vocabulary", "context"])
def test_sequences_need_an_attention(layout: str) -> None:
    plan = preset(layout).at(workers=2)
    none, some, unknown = (
        Profile(name="mine", units=tuple(Unit(name=f"u{k}", num_attentions=k and n) for k in range(3)))
        for n in (0, 1, None)
    )
    with pytest.raises(FaultsError, match="divides the sequence of attentions, and model 'mine' has none; use anoth"):
        check_plan(plan, none)
    check_plan(plan, some)
    check_plan(plan, unknown)


def test_an_axis_is_divided_once() -> None:
    both = Plan(cut=Cut(kind="layout", layouts=("col", "row")), place=Place(shards=2, stage_shards=(2,)))
    (fault,) = faults_of(both, profile((0, 2)))
    assert "2 shards of a layout cut and the tensor-parallel groups of place.stage_shards both divide" in fault
