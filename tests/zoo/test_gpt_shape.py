import pytest

from pipedejavu.facts import Device, Host, Machine
from pipedejavu.zoo import SHAPES, estimate_profile

DEVICE = Device(name="d", kind="k", type="gpu", host="h", memory_bytes=1, flop_per_s=1e12, memory_bytes_per_s=1e12)
MACHINE = Machine(name="m", hosts=(Host(name="h"),), devices=(DEVICE,))


@pytest.mark.parametrize(("name", "parameters"), [("gpt-1.3b", 1.2e9), ("gpt-6.7b", 6.4e9), ("gpt-175b", 175e9)])
def test_parameters_are_what_the_name_says(name: str, parameters: float) -> None:
    profile = estimate_profile(name, MACHINE)
    assert sum(u.parameter_bytes for u in profile.units) / 2 == pytest.approx(parameters, rel=0.02)
    assert len(profile.units) == SHAPES[name].layers + 2


def test_operations_are_six_for_each_parameter_and_token_and_those_of_attention() -> None:
    layers, width, context, _ = SHAPES["gpt-1.3b"]
    profile = estimate_profile("gpt-1.3b", MACHINE)
    blocks = [u for u in profile.units if u.name.startswith("block")]
    time = sum(u.times["k"].forward.per_sample_s + u.times["k"].backward.per_sample_s for u in blocks)
    flop = 6 * layers * context * (12 * width**2 + 2 * context * width)
    copies = 3 * layers * 4 * context * width / 1e12
    assert time == pytest.approx(flop / 0.4e12 + copies)


def test_the_weight_half_is_half_of_the_backward() -> None:
    for unit in estimate_profile("gpt-tiny", MACHINE).units:
        time = unit.times["k"]
        assert time.weight_backward.at(3) * 2 == time.backward.at(3)
