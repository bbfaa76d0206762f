"""Models whose recording would compute something else are refused, with the unit, the line, the size and the cause."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW
from pipedejavu.facts import InputError
from pipedejavu.model_check import check
from pipedejavu.session import Trainer
from tests.bugs.plain import ROUNDING, batch, furthest, make_trainer, sum_of_squares, trained, trained_plainly


class Net(nn.Module):
    """Three layers with something between the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.calls = 0

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.layers[0](x).tanh())
        return self.layers[2](self.layers[1](x).tanh())


class WithNumpyMask(Net):
    def between(self, x: Tensor) -> Tensor:
        start = np.random.randint(0, 4)  # as SpecAugment does
        mask = torch.ones(6)
        mask[start : start + 2] = 0
        return x * mask


class WithPythonNoise(Net):
    def between(self, x: Tensor) -> Tensor:
        return x * random.uniform(0.5, 1.5)


class WithRareNumpyMask(Net):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if np.random.rand() < 0.4 else x


class WithCounter(Net):
    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class WithOwnGenerator(Net):
    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * torch.rand(6, generator=torch.Generator().manual_seed(self.calls))


class WithTensorHook(Net):
    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.5 * gradient)
        return x


def with_module_backward_hook() -> nn.Module:
    model = Net()
    model.layers[1].register_full_backward_hook(lambda _module, given, _made: (0.5 * given[0],))
    return model


def with_parameter_hook(model: nn.Module | None = None) -> nn.Module:
    model = model or Net()
    next(model.parameters()).register_hook(lambda gradient: 0.5 * gradient)
    return model


def with_accumulate_hook() -> nn.Module:
    model = Net()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    return model


def chain_with_parameter_hook() -> nn.Module:
    return with_parameter_hook(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))


class Lister(Net):
    """Lists all its layers, and runs more than them."""

    def units(self) -> list[tuple[str, nn.Module]]:
        return [(f"layers.{n}", layer) for n, layer in enumerate(self.layers)]


def with_statistics_used_twice() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), norm)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            WithNumpyMask,
            r"output differs by .*; first in unit 'layers.0' at .*test_model_check.py:\d+, 'x = self.between.*'. Its"
            r" forward draws from numpy.random, which happened once while it was recorded; draw with torch",
        ),
        (WithPythonNoise, r"'x = self.between.*'. Its forward draws from Python's random"),
        (WithRareNumpyMask, r"the output differs by .* draws from numpy.random"),
        (WithCounter, r"in pass 2 .*'x = self.between.*'. The first pass agrees"),
        (
            Lister,
            r"the output differs by .* first in unit 'layers.1'. Likely its units .* list other than what forward",
        ),
        (with_statistics_used_twice, r"'1.running_mean' after a pass differs by .* give each use a module"),
    ],
)
def test_what_a_recording_loses_is_found_by_running_both(make, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        make_trainer(make())


@pytest.mark.parametrize("make", [WithNumpyMask, WithPythonNoise, WithCounter, Lister])
def test_without_the_check_they_train_something_else(make) -> None:
    model = make()
    np.random.seed(1)
    random.seed(1)
    expected = trained_plainly(model)
    assert furthest(trained(model, check_model=False), expected) > 1e-3


def test_the_check_changes_nothing_of_the_users() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    make_trainer(model, check_model=False)
    drawn = [(torch.rand(1).item(), random.random(), np.random.rand()) for _ in range(2)]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    make_trainer(model)
    assert drawn == [(torch.rand(1).item(), random.random(), np.random.rand()) for _ in range(2)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            WithTensorHook,
            r"test_model_check.py:\d+, 'x.register_hook.*the hook on a tensor of shape \(2, 6\) would be lost",
        ),
        (
            with_module_backward_hook,
            r"module 'layers.1' of a Net has the backward hook 'with_module_.*' \(.*:\d+\), which",
        ),
        (
            with_parameter_hook,
            r"parameter 'layers.0.weight' of a Net has the gradient hook 'with_para.*' \(.*:\d+\), which",
        ),
        (WithOwnGenerator, r"its forward uses a Generator of its own, and a recording can hold only tensors"),
        (with_accumulate_hook, r"parameter 'layers.0.weight' of a Net has the gradient hook"),
        (chain_with_parameter_hook, r"parameter '0.weight' of a Sequential has the gradient hook"),
    ],
)
def test_hooks_that_would_be_lost_are_refused_by_name(make, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        make_trainer(make(), check_model=False)


class Halved(nn.Module):
    """A unit with a hook on a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.5 * gradient)
        return x * 1


def test_hooks_in_the_units_of_a_chain_work() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Halved(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].register_full_backward_hook(lambda _module, given, _made: (3 * given[0],))
    model[2].register_forward_pre_hook(lambda _, args: (0.7 * args[0],))
    model[4].register_forward_hook(lambda _module, _args, output: output + 1)
    expected = trained_plainly(model)
    for plan in ("1f1b", "zb-h1"):
        assert furthest(trained(model, plan), expected) < ROUNDING


def test_a_forward_hook_of_a_recorded_model_is_trained_with_and_told_of(capsys) -> None:
    model = Net()
    model.layers[1].register_forward_hook(lambda _module, _args, output: 2 * output)
    expected = trained_plainly(model)
    assert furthest(trained(model), expected) < ROUNDING
    assert "of module 'layers.1' ran once, while the model was recorded" in capsys.readouterr().err


def referring_to(model: nn.Module, layers: list[nn.Module]) -> nn.Module:
    """Has a hook that refers to the model by its name, not to the module that it is given."""
    layers[0].register_forward_hook(lambda _module, _args, output: output + layers[1].bias)
    return model


def test_a_copy_that_trains_the_model_itself_is_noticed(capsys) -> None:
    chain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    with pytest.raises(InputError, match=r"a copy of the Sequential computes with '2.bias' of the model itself"):
        make_trainer(referring_to(chain, [chain[0], chain[2]]))
    model = Net()
    make_trainer(referring_to(model, list(model.layers)))
    assert "a copy of the Net computes with 'layers.1.bias' of the model itself" in capsys.readouterr().err


def test_a_model_too_large_for_another_copy_is_left_out_aloud(capsys, monkeypatch) -> None:
    monkeypatch.setattr(check, "free_memory_bytes", lambda: 100)
    make_trainer(WithCounter())
    assert "the model is not compared with its units: that takes 4.9 KiB of 100 B" in capsys.readouterr().err


class WithFactor(Net):
    """Differs from its recording by a factor that grows a little with each call."""

    growth = 0.0

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.growth * self.calls)


class WithRounding(WithFactor):
    growth = 2**-52


class WithLittle(WithFactor):
    growth = 1e-9


def test_rounding_is_allowed_and_no_more(capsys) -> None:
    make_trainer(WithRounding())
    assert "the model" not in capsys.readouterr().err
    with pytest.raises(InputError, match=r"in pass 2 .* the output differs by \d.*e-\d+, where the largest value is"):
        make_trainer(WithLittle())


class Uncopied(Net):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.product = self.layers[0].weight * 2


def test_a_model_that_cannot_be_copied_is_left_out_aloud(capsys) -> None:
    make_trainer(Uncopied())
    assert (
        "the model is not compared with its units: it cannot be copied (Only Tensors created" in capsys.readouterr().err
    )


class Noisy(nn.Module):
    """A unit that draws from numpy."""

    def forward(self, x: Tensor) -> Tensor:
        return x * np.random.uniform(0.5, 1.5)


def test_a_unit_that_draws_from_numpy_runs_as_it_is_but_not_twice() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Noisy(), nn.Tanh(), nn.Linear(6, 6))
    np.random.seed(5)
    make_trainer(model, "gpipe").step(batch(0))
    with pytest.raises(InputError, match=r"gradient of '.*' differs .* when it runs again for its backward: it draws"):
        make_trainer(model, "gpipe-recompute")


class Spare(nn.Linear):
    """Has a parameter that its forward does not use."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.spare = nn.Parameter(torch.ones(6))


def test_a_parameter_without_part_in_the_loss_is_not_shrunk_silently() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Spare())
    sentence = r"parameter '2.spare' of a Sequential has no part in the loss: .* freeze it with requires_grad_"
    with pytest.raises(InputError, match=sentence):
        Trainer(model, sum_of_squares, sample=batch(0), workers=2, optimizer=AdamW(lr=0.01, weight_decay=0.1))
    model[2].spare.requires_grad_(False)
    trainer = Trainer(model, sum_of_squares, sample=batch(0), workers=2, optimizer=AdamW(lr=0.01, weight_decay=0.1))
    trainer.step(batch(1))
    assert torch.equal(trainer.save_to_model()[2].spare, torch.ones(6))


@pytest.mark.parametrize(
    ("free_gpu", "free_host", "flop", "chosen", "reason"),
    [
        (600, 0, 1e15, "cuda", ""),
        (400, 600, 1e9, "cpu", ""),
        (400, 600, 1e12, None, "400 B on the GPU, and 48 TFLOP are too many for the CPU"),
        (400, 400, 1e9, None, "400 B on the GPU and 400 B on the host"),
    ],
)
def test_a_gpu_that_is_too_small_leaves_the_check_to_the_cpu_only_if_it_is_short(
    monkeypatch, free_gpu, free_host, flop, chosen, reason
) -> None:
    # Two models make two passes of four samples, each of three times the forward's operations.
    monkeypatch.setattr(check, "free_memory_bytes", lambda: free_host)
    monkeypatch.setattr(check, "DeviceMemory", lambda _: SimpleNamespace(free_bytes=lambda: free_gpu))
    profile = SimpleNamespace(units=[SimpleNamespace(flop=flop)])
    checked = SimpleNamespace(program=SimpleNamespace(profile=profile, sizes=(4, 4)))
    device, said = check._choose_device(checked, 100, torch.device("cuda"))
    assert (device and device.type, said) == (chosen, reason)
