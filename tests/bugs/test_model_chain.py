"""Chains whose order, frozen parameters or own forward were lost, against plain loops over the uncut model."""

import pytest
import torch
from torch import Tensor, nn

from tests.bugs.plain import ROUNDING, far_from_start, furthest, trained, trained_plainly

PLANS = ["1f1b", "ddp"]


def line() -> nn.Linear:
    return nn.Linear(6, 6)


def with_one_activation_twice() -> nn.Module:
    a = nn.Tanh()
    return nn.Sequential(line(), a, line(), a, line())


def with_one_layer_twice() -> nn.Module:
    a = line()
    return nn.Sequential(line(), a, nn.Tanh(), a, line())


def with_frozen_first_layers() -> nn.Module:
    model = nn.Sequential(line(), nn.Tanh(), line(), nn.Tanh(), line())
    model[0].requires_grad_(False)
    return model


def with_a_frozen_bias() -> nn.Module:
    model = nn.Sequential(line(), nn.Tanh(), line(), nn.Tanh(), line())
    model[2].bias.requires_grad_(False)
    return model


def with_a_frozen_layer_twice() -> nn.Module:
    a = line().requires_grad_(False)
    return nn.Sequential(line(), a, nn.Tanh(), a, line())


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * super().forward(x)


def with_its_own_forward() -> nn.Module:
    return Residual(line(), nn.Tanh(), line(), nn.Tanh(), line())


def with_a_hook_before_it() -> nn.Module:
    model = nn.Sequential(line(), nn.Tanh(), line(), nn.Tanh(), line())
    model.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    return model


def with_a_hook_after_it() -> nn.Module:
    model = nn.Sequential(line(), nn.Tanh(), line(), nn.Tanh(), line())
    model.register_forward_hook(lambda _module, _args, output: 2 * output)
    return model


class Meter(nn.Module):
    """Has a method that happens to be called `units`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(line() for _ in range(3))

    def units(self) -> str:
        return "metres"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Counter(Meter):
    def units(self, kind: str) -> int:  # type: ignore[override]
        return len(kind)


class Partial(Meter):
    """Lists only some of its layers."""

    def units(self) -> list[tuple[str, nn.Module]]:  # type: ignore[override]
        return [("layers.0", self.layers[0])]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "make",
    [
        with_one_activation_twice,
        with_one_layer_twice,
        with_frozen_first_layers,
        with_a_frozen_bias,
        with_a_frozen_layer_twice,
    ],
)
def test_a_chain_trains_as_the_plain_loop_does(make, plan) -> None:
    model = make()
    expected = trained_plainly(model)
    assert furthest(trained(model, plan), expected) < ROUNDING
    assert far_from_start(model, expected) > 0.01
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    assert all(torch.equal(expected[name], model.state_dict()[name]) for name in frozen)


@pytest.mark.parametrize(
    "make", [with_its_own_forward, with_a_hook_before_it, with_a_hook_after_it, Meter, Counter, Partial]
)
def test_a_model_that_is_more_than_its_list_is_recorded(make) -> None:
    model = make()
    expected = trained_plainly(model)
    assert furthest(trained(model), expected) < ROUNDING
    assert far_from_start(model, expected) > 0.01
