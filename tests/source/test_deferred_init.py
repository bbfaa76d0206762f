"""Models that are built in their place have the distribution of their constructor's values, wherever they rest."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.source import deferred_init
from pipedejavu.source.deferred_init import build_model


class Plain(nn.Module):
    """Every way in which constructors give values to parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 64, padding_idx=3)
        self.up, self.norm, self.down = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)
        self.conv, self.batch = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.embed.weight
        self.free = nn.Parameter(torch.randn(50, 40) * 3)
        self.ones = nn.Parameter(torch.ones(20))
        self.early = nn.Parameter(nn.init.normal_(torch.empty(30, 30), std=5.0))
        self.square, self.copied = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        with torch.no_grad():
            nn.init.trunc_normal_(self.up.weight, std=0.02)
            self.down.weight.mul_(0.5)
            self.copied.weight.copy_(self.square.weight)
            nn.init.orthogonal_(self.square.weight)
        self.register_buffer("table", torch.arange(7.0).sqrt(), persistent=False)


def same(first: nn.Module, second: nn.Module) -> bool:
    one, two = dict(first.named_parameters()), dict(second.named_parameters())
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_values_are_as_the_constructor_distributes_them() -> None:
    model = build_model(Plain, seed=1)
    assert not any(p.is_meta or p.isnan().any() for p in model.parameters())
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight[3], torch.zeros(64))
    assert model.embed.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert model.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.down.weight.abs().max().item() == pytest.approx(0.5 / math.sqrt(256), rel=0.01)
    assert model.up.bias.abs().max().item() <= 1 / math.sqrt(64)
    assert torch.equal(model.norm.weight, torch.ones(256))
    assert torch.equal(model.ones, torch.ones(20))
    assert model.free.std().item() == pytest.approx(3.0, rel=0.1)
    assert model.early.std().item() == pytest.approx(5.0, rel=0.1)
    assert torch.allclose(model.square.weight @ model.square.weight.T, torch.eye(16), atol=1e-5)
    assert not torch.equal(model.copied.weight, model.square.weight)
    assert model.copied.weight.abs().max().item() <= 1 / math.sqrt(16)
    assert torch.equal(model.table, torch.arange(7.0).sqrt())
    assert torch.equal(model.batch.running_var, torch.ones(8))


def test_a_seed_gives_the_same_values_whatever_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    first = build_model(Plain, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for count in (1, 5):
        monkeypatch.setattr(deferred_init.os, "sched_getaffinity", lambda _, count=count: set(range(count)))
        torch.rand(3)
        assert same(first, build_model(Plain, seed=1))
    assert not same(first, build_model(Plain, seed=2))


def test_alike_parameters_have_values_of_their_own() -> None:
    model = build_model(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert not torch.equal(model[0].weight, model[1].weight)


def test_a_dtype_is_that_of_parameters_and_not_of_buffers() -> None:
    model, whole = build_model(Plain, dtype=torch.bfloat16, seed=1), build_model(Plain, seed=1)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.table.dtype == torch.float32
    assert same(model, whole.to(torch.bfloat16))


def test_no_memory_is_written_while_the_constructor_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def make() -> nn.Module:
        model = nn.Linear(8, 8)
        seen.extend(p.is_meta for p in model.parameters())
        return model

    build_model(make)
    assert seen == [True, True]
    assert not any(p.is_meta for p in nn.Linear(3, 3).parameters())


def test_what_cannot_be_deferred_is_refused() -> None:
    def make() -> nn.Module:
        model = nn.Linear(8, 8)
        nn.init.sparse_(model.weight, 0.5)
        return model

    with pytest.raises(InputError, match=r"^build_model cannot defer nn\.init\.sparse_; call it on the model that it"):
        build_model(make)


def test_weights_of_a_file_take_the_place_of_random_ones(tmp_path: Path) -> None:
    stored: dict[str, Tensor] = {"0.weight": torch.randn(8, 8), "1.bias": torch.randn(4)}
    save_file(stored, tmp_path / "model.safetensors")

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))

    model, drawn = build_model(make, weights=tmp_path), build_model(make)
    assert torch.equal(model[0].weight, stored["0.weight"])
    assert torch.equal(model[1].bias, stored["1.bias"])
    assert torch.equal(model[1].weight, drawn[1].weight)
    with pytest.raises(InputError, match=r"^'0\.weight' of the weights is \(8, 8\), and the model's is \(9, 8\); give"):
        build_model(lambda: nn.Sequential(nn.Linear(8, 9)), weights=tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_values_are_the_same_on_gpu_and_host() -> None:
    one, two = build_model(Plain, device="cuda", seed=1), build_model(Plain, device="cpu", seed=1)
    assert {p.device.type for p in one.parameters()} == {"cuda"}
    assert same(one.cpu(), two)
