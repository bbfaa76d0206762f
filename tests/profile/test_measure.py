"""Measuring a chain: sizes are exact, times are there for every kind, and nothing that is measured changes."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.profile import measure_profile, merge_profiles

CPU = torch.device("cpu")


def units() -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    return [
        ("first", nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))),
        ("second", nn.ReLU(inplace=True)),
        ("third", nn.Linear(6, 3)),
    ]


def loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum")


def measure(kinds, chain=None):
    sample, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    return measure_profile("net", chain or units(), (), sample, target, loss, kinds)


def test_sizes_follow_from_the_tensors() -> None:
    first, second, third = measure({"cpu": CPU}).units
    assert [u.parameter_bytes for u in (first, second, third)] == [4 * (4 * 6 + 6 + 6 + 6), 0, 4 * (6 * 3 + 3)]
    assert [u.boundary_bytes for u in (first, second, third)] == [24, 24, 12]
    assert [u.has_batch_statistics for u in (first, second, third)] == [True, False, False]
    assert second.times["cpu"].weight_backward.per_sample_s == 0
    assert second.times["cpu"].update_s == 0


def test_every_kind_has_times_of_its_own() -> None:
    profile = measure({"fast": CPU, "slow": CPU})
    for unit in profile.units:
        assert unit.times.keys() == {"fast", "slow"}
        assert all(times.forward.per_sample_s > 0 and times.backward.per_sample_s > 0 for times in unit.times.values())


def test_profiles_of_different_devices_are_joined() -> None:
    fast, slow = measure({"fast": CPU}), measure({"slow": CPU})
    joined = merge_profiles([fast, slow])
    for unit, one, other in zip(joined.units, fast.units, slow.units, strict=True):
        assert unit.times == {**one.times, **other.times}
        assert unit.but(times={}) == one.but(times={})


def test_what_is_measured_stays_as_it_was() -> None:
    chain = units()
    before = [{name: t.clone() for name, t in module.state_dict().items()} for _, module in chain]
    measure({"cpu": CPU}, chain)
    for (_, module), kept in zip(chain, before, strict=True):
        assert all(torch.equal(t, kept[name]) for name, t in module.state_dict().items())
        assert all(p.grad is None for p in module.parameters())


@pytest.mark.gpu
def test_a_gpu_is_measured_beside_the_cpu() -> None:
    profile = measure({"cpu": CPU, "gpu": torch.device("cuda", 0)})
    for unit in profile.units:
        assert unit.times.keys() == {"cpu", "gpu"}
        assert all(times.forward.per_sample_s > 0 for times in unit.times.values())
