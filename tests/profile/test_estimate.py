"""Estimates: sizes equal those that are measured, and times follow from counts and rates."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.facts import Device, InputError
from pipedejavu.profile import Shot, blank_like, cut_model, estimate_units, make_blank, make_mode, read_rates


def device(**changes) -> Device:
    made = Device(name="d0", kind="d", type="gpu", host="h", memory_bytes=1, flop_per_s=100.0, memory_bytes_per_s=10.0)
    return made.but(**changes)


def estimate(model: nn.Module, x, rates):
    mode = make_mode()
    make_blank(model, mode)
    inputs = blank_like(x, mode)
    shot = Shot(cut_model(model, inputs).units, inputs, inputs, lambda output, target: output.sum() + 0 * target.sum())
    return estimate_units("net", shot, (), rates, [].append)


def test_a_matrix_product_is_bound_by_its_arithmetic_or_by_its_memory() -> None:
    with torch.device("meta"):
        chain = nn.Sequential(nn.ReLU(), nn.Linear(8, 4, bias=False), nn.ReLU())
    flop, size = 2 * 5 * 8 * 4, 4 * (5 * 8 + 8 * 4 + 5 * 4)
    for rate in (1.0, 1e6):
        unit = estimate(chain, torch.zeros(5, 8), read_rates([device(flop_per_s=rate)], 0.5)).units[1]
        assert unit.flop == flop / 5
        assert unit.times["d"].forward.at(5) == pytest.approx(max(flop / (0.5 * rate), size / 10))
        assert unit.times["d"].update_s == 7 * unit.parameter_bytes / 10


def test_views_move_no_bytes() -> None:
    chain = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 3)), nn.Linear(3, 1))
    first, second, _ = estimate(chain, torch.zeros(5, 3, 2), read_rates([device()], 1.0)).units
    assert first.times["d"].forward.at(5) == second.times["d"].forward.at(5) == 0


def test_tied_parameters_stay_one() -> None:
    chain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    chain[1].weight = chain[0].weight
    make_blank(chain, make_mode())
    assert chain[1].weight is chain[0].weight
    assert chain[1].bias is not chain[0].bias


def test_devices_without_rates_are_left_out() -> None:
    known, unknown = device(), device(name="x", kind="x", flop_per_s=0.0)
    assert read_rates([known, unknown], 1.0).keys() == {"d"}
    with pytest.raises(InputError, match="of x, none has both flop_per_s and memory_bytes_per_s; add them to the mac"):
        read_rates([unknown], 1.0)


class Choosy(nn.Module):
    """Its output's shape depends on values."""

    def forward(self, x):
        return x[x > 0] if bool((x > 0).any()) else x


def test_a_unit_that_depends_on_values_is_refused() -> None:
    with pytest.raises(InputError, match=r"unit '1' cannot be estimated, .* profile it without --estimate"):
        estimate(nn.Sequential(nn.Linear(3, 3), Choosy()), torch.zeros(2, 3), read_rates([device()], 1.0))
