"""Estimates: sizes equal those that are measured, and times follow from counts and rates."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.facts import Device, Host, InputError, Machine, Survey
from pipedejavu.profile import (
    Efficiency,
    UnitSample,
    cut_model,
    estimate_units,
    make_meta_model,
    make_mode,
    meta_like,
    read_rates,
)


def device(**changes) -> Device:
    made = Device(name="d0", kind="d", type="gpu", host="h", memory_bytes=1, flop_per_s=100.0, memory_bytes_per_s=10.0)
    return made.replace(**changes)


def machine(*devices: Device) -> Machine:
    return Machine(name="m", hosts=(Host(name="h"),), devices=devices)


def estimate(model: nn.Module, rates, *batches):
    mode, unit_samples = make_mode(), []
    make_meta_model(model, mode)
    for x in batches:
        inputs = meta_like(x, mode)
        loss = lambda output, target: output.sum() + 0 * target.sum()  # noqa: E731
        unit_samples.append(UnitSample(cut_model(model, inputs).units, inputs, inputs, loss))
    return estimate_units("net", unit_samples, (), rates, [].append)


def test_a_matrix_product_is_bound_by_its_arithmetic_or_by_its_memory() -> None:
    with torch.device("meta"):
        chain = nn.Sequential(nn.ReLU(), nn.Linear(8, 4, bias=False), nn.ReLU())
    flop, size = 2 * 5 * 8 * 4, 4 * (5 * 8 + 8 * 4 + 5 * 4)
    for rate in (1.0, 1e6):
        unit = estimate(chain, read_rates(machine(device(flop_per_s=rate)), {}, 0.5), torch.zeros(5, 8)).units[1]
        assert unit.flop == flop / 5
        assert unit.times["d"].forward.at(5) == pytest.approx(max(flop / (0.5 * rate), size / 10))
        assert unit.times["d"].update_s == 7 * unit.parameter_bytes / 10


def test_an_efficiency_has_launches_and_a_share_for_each_class() -> None:
    with torch.device("meta"):
        chain = nn.Sequential(nn.ReLU(), nn.Linear(8, 4, bias=False), nn.ReLU())
    flop, size = 2 * 8 * 4, 4 * (8 + 4)  # of each sample; the weights come once
    efficiency = Efficiency({"forward": 3.0}, {"matmul": 0.5, "elementwise": 0.25, "update": 2.0})
    survey = Survey(date="2026-01-01T00:00:00+00:00", time_s=1.0)
    for is_measured in (True, False):
        made = machine(device(flop_per_s=1e9)).replace(survey=survey if is_measured else None)
        rates = read_rates(made, {"gpu": efficiency}, 0.1)
        unit = estimate(chain, rates, torch.zeros(2, 8), torch.zeros(5, 8)).units[1]
        rate = 10.0 if is_measured else 0.8 * 10.0
        for samples in (2, 5, 50):
            expected = 3.0 + (samples * size + unit.parameter_bytes) / rate / 0.5
            assert unit.times["d"].forward.at(samples) == pytest.approx(expected)
        assert unit.flop == flop
        assert unit.times["d"].forward.spread == 0
        assert unit.times["d"].update_s == pytest.approx(3.0 + 7 * unit.parameter_bytes / rate / 2)


def test_operators_of_a_cpu_are_slower_inside_a_model() -> None:
    efficiency = Efficiency({"forward": 0.0}, {"elementwise": 1.0})
    rates = read_rates(
        machine(device(), device(name="c", kind="c", type="cpu")), dict.fromkeys(("gpu", "cpu"), efficiency), 1.0
    )
    assert rates["c"].flop_per_s == pytest.approx(0.7 * rates["d"].flop_per_s)
    assert rates["c"].bytes_per_s == pytest.approx(0.7 * rates["d"].bytes_per_s)


def test_an_update_takes_what_the_machine_says() -> None:
    with torch.device("meta"):
        chain = nn.Sequential(nn.Linear(8, 4, bias=False), nn.ReLU())
    rates = read_rates(machine(device(parameters_per_s=16.0)), {}, 1.0)
    first, second = estimate(chain, rates, torch.zeros(5, 8)).units
    assert (first.times["d"].update_s, second.times["d"].update_s) == (2.0, 0.0)


def test_views_move_no_bytes() -> None:
    chain = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 3)), nn.Linear(3, 1))
    first, second, _ = estimate(chain, read_rates(machine(device()), {}, 1.0), torch.zeros(5, 3, 2)).units
    assert first.times["d"].forward.at(5) == second.times["d"].forward.at(5) == 0


def test_tied_parameters_stay_one() -> None:
    chain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    chain[1].weight = chain[0].weight
    make_meta_model(chain, make_mode())
    assert chain[1].weight is chain[0].weight
    assert chain[1].bias is not chain[0].bias


def test_devices_without_rates_are_left_out() -> None:
    known, unknown = device(), device(name="x", kind="x", flop_per_s=0.0)
    assert read_rates(machine(known, unknown), {}, 1.0).keys() == {"d"}
    with pytest.raises(InputError, match="of x, none has both flop_per_s and memory_bytes_per_s; add them to the mac"):
        read_rates(machine(unknown), {}, 1.0)


class Choosy(nn.Module):
    """Its output's shape depends on values."""

    def forward(self, x):
        return x[x > 0] if bool((x > 0).any()) else x


def test_a_unit_that_depends_on_values_is_refused() -> None:
    with pytest.raises(InputError, match=r"unit '1' cannot be estimated, .* profile it without --estimate"):
        estimate(nn.Sequential(nn.Linear(3, 3), Choosy()), read_rates(machine(device()), {}, 1.0), torch.zeros(2, 3))
