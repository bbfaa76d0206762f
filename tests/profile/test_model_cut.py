"""The cutter: what is cut computes what the whole does, bit for bit, whatever the number of pieces."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.profile import cut_model
from tests.profile.case import PLAIN, Cell, Counting, Mixer, Resnet, Tied, compare, own_loss, run, tokens

WAYS = {
    "ResNet, bottlenecks in place": ("blocks", 8),
    "U-Net": ("graph", 5),
    "MLP-Mixer": ("blocks", 4),
    "LSTM": ("graph", 3),
    "nn.Transformer": ("blocks", 7),
    "dense convolutions": ("blocks", 5),
    "buffers that change": ("blocks", 4),
    "tied language model": ("blocks", 5),
}


@pytest.mark.parametrize(("name", "way"), WAYS.items())
def test_pieces_equal_the_whole_bit_for_bit(name: str, way: tuple[str, int]) -> None:
    torch.manual_seed(0)
    cut, found = compare(*PLAIN[name]())
    assert (cut.method, len(cut.units)) == way
    assert [difference for difference in found if not difference.is_none] == []


def test_a_weight_of_many_units_has_the_same_gradient_but_for_the_order_of_its_sum() -> None:
    """Each piece adds up the uses of its own units, so sums of more than two uses associate in another order."""
    torch.manual_seed(0)
    model, inputs = Cell(), tokens()
    cut, found = compare(model, inputs)
    assert not any(difference.outputs or difference.loss for difference in found)
    own_loss(model(inputs)).backward()
    for pieces in range(1, len(cut.units) + 1):
        for name, gradient in run(cut, inputs, own_loss, pieces)[2].items():
            expected = dict(model.named_parameters())[name].grad
            # Ten additions, each with a rounding error of half a unit in the last place of sums below 1e2.
            assert torch.allclose(gradient, expected, rtol=0, atol=10 * 2**-24 * 1e2)


def test_parameters_are_the_models_own_under_its_own_names() -> None:
    model = Tied()
    units = cut_model(model, tokens()).units
    assert [name for name, _ in units] == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    named = [pair for unit, module in units for pair in module.named_parameters(unit, remove_duplicate=False)]
    own = dict(model.named_parameters(remove_duplicate=False))
    assert all(own[name] is parameter for name, parameter in named)
    assert {name for name, _ in named} == {name for name, _ in model.named_parameters()}
    assert [name for name, _ in named].count("embedding.weight") == 2


def test_what_is_frozen_or_not_used_is_no_weight_of_a_unit() -> None:
    model = Counting()
    units = cut_model(model, torch.randn(3, 4)).units
    weights = [(name, p) for unit, module in units for name, p in module.named_parameters(unit)]
    assert {name for name, p in weights if p.requires_grad} == {
        f"layers.{n}.{name}" for n in range(4) for name in ("weight", "bias")
    }
    assert model.count == 0
    assert not model.mean.any()


def test_statistics_reach_the_models_own_buffers() -> None:
    model, inputs = Resnet(), torch.randn(4, 3, 16, 16)
    plain = copy.deepcopy(model)
    plain(inputs)
    value = inputs
    for _, unit in cut_model(model, inputs).units:
        value = unit(value)
    for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, other), name


def test_dropout_is_the_same_for_every_number_of_pieces() -> None:
    inputs = tokens(4)
    cut = cut_model(Tied(dropout=0.5), inputs)
    first, *others = [run(cut, inputs, own_loss, pieces, seed=7) for pieces in range(1, len(cut.units) + 1)]
    assert not torch.equal(first[0], run(cut, inputs, own_loss, 1, seed=8)[0])
    for other in others:
        assert torch.equal(first[0], other[0])
        assert all(torch.equal(gradient, other[2][name]) for name, gradient in first[2].items())


def test_a_double_unit_computes_in_float64_throughout() -> None:
    """The audit replays in float64; what a model makes in float32 itself, like a mask, must follow."""
    inputs = tokens()
    model = Tied()
    units = copy.deepcopy([module.double() for _, module in copy.deepcopy(cut_model(model, inputs).units)])
    value = inputs
    for unit in units:
        value = unit(value)
    assert value.dtype == torch.float64
    # Both are float32's rounding, of values of size one, away from each other.
    assert torch.allclose(value.float(), model(inputs), atol=1e-5)
    assert (value.float() != value).any()


def test_inputs_keep_their_form() -> None:
    inputs = {"mask": torch.ones(2, 6, 8), "x": torch.randn(2, 6, 8), "scale": 2.0}
    cut = cut_model(Mixer(), inputs)
    first, second = cut.flat({"scale": 2.0, "x": inputs["x"], "mask": inputs["mask"]})
    assert {id(first), id(second)} == {id(inputs["x"]), id(inputs["mask"])}
    with pytest.raises(InputError, match=r"the keyword arguments .'mask', 'scale', 'x'. and is given .'x'."):
        cut.flat({"x": inputs["x"]})
    with pytest.raises(InputError, match="not those of the sample that the model was cut for"):
        cut.flat({**inputs, "scale": 3.0})
    with pytest.raises(InputError, match="not those of the sample that the model was cut for"):
        cut.flat({**inputs, "mask": None})


def test_another_shape_is_refused() -> None:
    cut = cut_model(Tied(), tokens(2))
    with pytest.raises(InputError, match="unit 'embedding' was cut for 2×5 and is given 3×5; give every microbatch"):
        cut.units[0][1](tokens(3))


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if self.layer(x).sum() > 0:  # the line that the sentence names
            x = -x
        return self.layer(x)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.sign()

    @staticmethod
    def backward(_, gradient):
        return gradient


class Straight(Deciding):
    def forward(self, x):
        return Sign.apply(self.layer(x))


class Foreign(Deciding):
    def forward(self, x):
        return self.layer(x) + torch.from_numpy(x.numpy())


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            Deciding,
            r"a Deciding cannot be cut: .*test_model_cut.py:\d+, 'if self.layer\(x\).sum\(\) > 0:.*values of a tensor",
        ),
        (
            Straight,
            r"a Straight cannot be cut: .*, 'return Sign.apply\(self.layer\(x\)\)': the backward of the autograd",
        ),
        (
            Foreign,
            r"a Foreign cannot be cut: .*cut.py:\d+, 'return self.layer\(x\) \+ torch.from_numpy\(x.numpy",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_told_the_line(model, text, capfd) -> None:
    with pytest.raises(InputError, match=text):
        cut_model(model(), torch.randn(2, 4))
    assert capfd.readouterr() == ("", "")


class Dropping(Deciding):
    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return x if torch.rand([]) < self.rate else self.layer(x)


def test_a_layer_that_is_never_dropped_is_cut_and_one_that_may_be_is_refused() -> None:
    assert [name for name, _ in cut_model(Dropping(0.0), torch.randn(2, 4)).units] == ["layer"]
    with pytest.raises(InputError, match=r"a Dropping cannot be cut: .*depends on the values of a tensor"):
        cut_model(Dropping(0.5), torch.randn(2, 4))


class Wide(nn.Module):
    """Between its second and its fourth layer it hands on a table whose size is not that of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(4, 4) for _ in range(5))
        self.table = nn.Parameter(torch.randn(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        table = self.table.tanh()
        x = self.d(self.c(x).relu() + table.mean())
        return self.e(x + table.sum())


def test_a_cut_is_made_where_another_of_other_microbatches_was() -> None:
    model = Wide()
    few, many = cut_model(model, torch.randn(1, 4)), cut_model(model, torch.randn(256, 4))
    assert len(few.units) < len(many.units)  # beside one sample the table weighs much, and beside many nothing
    again = cut_model(model, torch.randn(1, 4), many.begins)
    assert [name for name, _ in again.units] == [name for name, _ in many.units]
    assert again.begins == many.begins
    value = again.flat(x := torch.randn(1, 4))
    for _, unit in again.units:
        value = unit(value)
    assert torch.equal(again.output(value), model(x))


def test_a_cut_of_another_graph_is_refused() -> None:
    *begins, size = cut_model(Wide(), torch.randn(256, 4)).begins
    with pytest.raises(InputError, match=rf"has {size} operations here, and the cut was made for {size + 3} and"):
        cut_model(Wide(), torch.randn(1, 4), (*begins, size + 3))
    with pytest.raises(InputError, match="make the plan for this model and this size of microbatches again"):
        cut_model(Wide(), torch.randn(1, 4), (*reversed(begins), size))


class Counted(nn.Module):
    """Adds positions, which it makes on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) * torch.arange(4, device=x.device)
        return x


def test_units_of_a_model_on_another_device_follow_their_inputs() -> None:
    model = Counted()
    x = torch.randn(3, 4)
    expected = model(x)
    cut = cut_model(copy.deepcopy(model).to("meta"), x.to("meta"))
    value = x
    for name, unit in cut.units:
        assert {body.device.type for body in unit.bodies} == {"meta"}, name
        unit.to_empty(device="cpu")
        for full, parameter in unit.named_parameters():
            parameter.data.copy_(model.get_parameter(full))
        value = unit(value)
    assert torch.equal(value, expected)
