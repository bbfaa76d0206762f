"""Units that are alike: told by what they run, never by names or values."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.profile import UnitSample, cut_model, measure_profile
from pipedejavu.profile.dedup import unit_key
from pipedejavu.profile.unit_time import has_same_units

X = torch.zeros(4, 6)


class Scaled(nn.Module):
    """Its factor is no parameter and in no text."""

    def __init__(self, times: int, act=torch.relu):
        super().__init__()
        self.times, self.act = times, act

    def forward(self, x):
        for _ in range(self.times):
            x = self.act(x)
        return x


class Block(nn.Module):
    """Two layers beside a skip."""

    def __init__(self, width: int):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))


class Net(nn.Module):
    """Four equal blocks and one of another width; no chain, so that it is cut."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(Block, (8, 8, 8, 9, 8)))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_values_do_not_matter() -> None:
    assert unit_key(nn.Linear(6, 3), X) == unit_key(nn.Linear(6, 3), torch.ones(4, 6))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Linear(6, 3), nn.Linear(6, 4)),
        (nn.Linear(6, 3), nn.Linear(6, 3, bias=False)),
        (nn.Linear(6, 3), nn.Linear(6, 3).double()),
        (nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (nn.Dropout(0.1), nn.Dropout(0.1).eval()),
        (nn.ReLU(), nn.GELU()),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU())),
        (Scaled(2), Scaled(3)),
        (Scaled(2), Scaled(2, torch.sigmoid)),
    ],
)
def test_what_runs_differently_is_not_alike(one: nn.Module, other: nn.Module) -> None:
    assert unit_key(one, X) == unit_key(one, X)
    assert unit_key(one, X) != unit_key(other, X)


def test_inputs_of_other_forms_are_not_alike() -> None:
    layer = nn.ReLU()
    assert unit_key(layer, X) != unit_key(layer, X[:3])
    assert unit_key(layer, X) != unit_key(layer, X.double())
    assert unit_key(layer, X) != unit_key(layer, (X, X))


def test_blocks_of_a_cut_model_are_told_by_their_graphs() -> None:
    cut = cut_model(Net(), X)
    keys = [unit_key(module, X) for _, module in cut.units]
    assert cut.method == "blocks"
    assert [keys.index(key) for key in keys] == [0, 1, 1, 3, 1]  # the first is given what has no gradient


def test_alike_units_are_measured_once() -> None:
    cut, seen = cut_model(Net(), X), []
    unit_sample = UnitSample(cut.units, X, X, lambda output, target: (output - target).square().sum())
    profile = measure_profile("net", [unit_sample], (), {"cpu": torch.device("cpu")}, lambda _: int, seen.append)
    names = [text.partition(" ")[0] for text in seen]
    assert sorted({*names}) == ["layers.0", "layers.1", "layers.3", "layers.4"]  # the last has the loss
    assert {*map(names.count, names)} == {3}  # each gets its turns
    assert profile.units[1].replace(name="") == profile.units[2].replace(name="")
    assert profile.units[0].times != profile.units[1].times


def test_units_of_two_sizes_correspond_by_name_and_parameters() -> None:
    net = Net()

    def unit_sample(model, samples, count=5):
        x = torch.zeros(samples, 6)
        return UnitSample(cut_model(model, x).units[:count], x, x, lambda output, target: (output - target).sum())

    assert has_same_units(unit_sample(net, 4), unit_sample(net, 8))
    assert not has_same_units(unit_sample(net, 4), unit_sample(net, 8, count=4))
    assert not has_same_units(unit_sample(net, 4), unit_sample(Net(), 8))
