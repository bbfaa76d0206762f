"""Models with unusual values: complex ones, branches, sparse gradients, dicts, own backwards, packed sequences."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import Sgd
from pipedejavu.facts import InputError
from pipedejavu.session import Trainer


class Layers(nn.Module):
    """Three layers, and what a model does with them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Spectral(nn.Module):
    """Complex values wherever it is cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(5, dtype=torch.float64)) for _ in range(4))

    def forward(self, x):
        z = torch.fft.rfft(x)
        for scale in self.scales:
            z = z * torch.polar(scale.abs(), scale) + z.conj().roll(1, -1)
        return torch.fft.irfft(z, 8)


def batch(dtype=torch.float32):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return x, x.flip(1)


def check_plain(model, plain, sample, plan="1f1b") -> None:
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = Trainer(model, nn.MSELoss(), sample=sample, plan=plan, workers=2, optimizer=Sgd(lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(sample[0]), sample[1]).backward()
        optimizer.step()
        trainer.step(sample)
    for own, other in zip(trainer.save_to_model().parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-12 if own.dtype == torch.float64 else 1e-6)


def test_complex_values_pass_a_cut() -> None:
    check_plain(Spectral(), Spectral(), batch(torch.float64))


class Halved(torch.autograd.Function):
    """Has another backward than its forward says."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient / 2


class OwnBackward(Layers):
    def forward(self, x):
        return Halved.apply(super().forward(x))


class Packed(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        lengths = x[:, 0].abs().long().clamp(1, 3)
        steps = x[:, None].expand(-1, 3, -1)
        packed = nn.utils.rnn.pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
        return super().forward(self.rnn(packed)[1][-1])


@pytest.mark.parametrize("kind", [OwnBackward, Packed])
def test_layers_of_a_sequential_run_as_they_are(kind) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), kind(), nn.Linear(8, 8))

    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    check_plain(model, plain, batch(), "ddp" if kind is Packed else "1f1b")


class Branch(Layers):
    def forward(self, x):
        x = super().forward(x)
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x.sin(), (x,))


class Sparse(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True)

    def forward(self, x):
        return super().forward(self.table(x[:, 0].abs().long()))


class Complex(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x):
        return super().forward((x * self.scale).real)


class AsDict(Layers):
    def forward(self, x):
        return {"x": super().forward(x), "start": x}


class FromDict(Layers):
    def forward(self, values):
        return super().forward(values["x"]) + values["start"]


REFUSED = {
    "branch": (Branch, r"test_models_unusual\.py:\d+, 'return torch\.cond.*: it calls 'cond', .* with torch\.where"),
    "branch in a chain": (lambda: nn.Sequential(Layers(), Branch()), r"it calls 'cond', .* with torch\.where"),
    "sparse": (Sparse, r"layer 'table' \(Embedding\) has sparse=True, .*; make it with sparse=False"),
    "complex": (Complex, r"parameter 'scale' is complex64, .*; keep it as real numbers and use torch\.view_as_complex"),
    "dict": (
        lambda: nn.Sequential(AsDict(), FromDict()),
        r"a dict passes between the layers of a chain, .* as a graph",
    ),
    "own backward": (OwnBackward, r"Halved\.apply.*would be lost; the layers of an nn\.Sequential .* run as they are"),
    "packed": (Packed, r"'packed = .*: the form of a packed sequence depends on .* lengths; .* an nn\.Sequential"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")  # of torch.cond, that a graph is made
def test_what_cannot_be_trained_is_refused_with_the_reason(name) -> None:
    make, said = REFUSED[name]
    with pytest.raises(InputError, match=said):
        Trainer(make(), nn.MSELoss(), sample=batch(), plan="ddp")


class Whole(nn.Module):
    """The same layers, with a forward of its own that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = AsDict(), FromDict()

    def forward(self, x):
        return self.second(self.first(x))


def test_dicts_inside_of_a_module_are_no_obstacle() -> None:
    check_plain(Whole(), Whole(), batch())


class Lower(Layers):
    """Computes in bfloat16, as its own forward says."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = super().forward(x)
        return x.float()


def test_autocast_inside_of_a_forward_stays_whole() -> None:
    trainer = Trainer(Lower(), nn.MSELoss(), sample=batch(), plan="ddp", optimizer=Sgd(lr=0.1))
    assert len(trainer.units) == 1
    model = Lower()
    assert trainer.step(batch()) == pytest.approx(
        nn.functional.mse_loss(model(batch()[0]), batch()[1]).item(), rel=1e-3
    )
