"""What a loop changes in its model between steps: workers train copies, so it is taken up, told, or refused."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu import Trainer
from pipedejavu.facts import InputError


class Scaled(nn.Module):
    """A module of its own, which is recorded; its scale is a plain attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(6, 8), nn.Linear(8, 3), 1.0

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.scale)


def batch(seed: int):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, (x.sum(1) > 0).long()


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = Scaled().double()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), workers=1)
    trainer.step(batch(0))
    return model, trainer


@pytest.mark.parametrize("change", ["load_state_dict", "in place"])
def test_other_weights_are_refused_which_workers_would_not_see(trained, change) -> None:
    model, trainer = trained
    state = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    if change == "in place":
        with torch.no_grad():
            model.first.weight.mul_(0.5)
    else:
        model.load_state_dict(state)
    with pytest.raises(InputError, match=r"parameter 'first.weight' was changed since the last step, and the workers"):
        trainer.step(batch(1))
    plain = Scaled().double()
    plain.load_state_dict(model.state_dict())
    again = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), workers=1)
    again.step(batch(1))
    x, y = batch(1)
    nn.functional.cross_entropy(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    expected = plain.state_dict()
    assert all(torch.allclose(t, expected[n], rtol=0, atol=1e-14) for n, t in model.state_dict().items())


def test_weights_that_are_put_back_before_the_next_step_are_no_change(trained) -> None:
    """As averages are swapped in for an evaluation."""
    model, trainer = trained
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor * 0.5 for name, tensor in kept.items()})
    assert torch.equal(model.first.weight, kept["first.weight"] * 0.5)
    model.load_state_dict(kept)
    trainer.step(batch(1))


def test_weights_changed_before_the_trained_ones_came_back_are_not_overwritten_silently(trained) -> None:
    model, _ = trained
    with torch.no_grad():
        model.last.bias.zero_()
    with pytest.raises(InputError, match=r"parameter 'last.bias' was changed since the last step"):
        model(batch(1)[0])


def test_a_parameter_that_is_frozen_or_freed_between_steps_is_refused(trained) -> None:
    model, trainer = trained
    model.first.requires_grad_(False)
    with pytest.raises(InputError, match=r"'first.weight' is trained by this Trainer and frozen since the last step"):
        trainer.step(batch(1))
    again = Trainer(model, torch.optim.SGD(model.last.parameters(), lr=0.1), nn.CrossEntropyLoss(), workers=1)
    again.step(batch(1))
    model.first.requires_grad_(True)
    with pytest.raises(InputError, match=r"'first.weight' is frozen by this Trainer and to be trained since the last"):
        again.step(batch(2))


def test_an_attribute_that_the_loop_anneals_is_told_once(trained, capsys) -> None:
    model, trainer = trained
    for step in (1, 2):
        model.scale = 1.0 + step
        trainer.step(batch(step))
    said = capsys.readouterr().err
    assert (
        said.count("attribute 'scale' of the model was 1.0 and is 2.0 since the last step; the training goes on") == 1
    )
    assert "attribute" not in said.replace("attribute 'scale' of the model was 1.0", "")
