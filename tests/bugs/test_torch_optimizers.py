"""Optimizers and schedulers of torch, as users make them: the Trainer ends where a plain loop ends."""

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

from pipedejavu import Trainer
from pipedejavu.facts import InputError


def make() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(6, 3)).double()
    model[1][0].bias.requires_grad_(False)
    return model


def loader() -> DataLoader:
    """Batches of 8, 8, 8 and 3 samples: the last has fewer than the plan has microbatches."""
    x = torch.randn(27, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = (x.sum(1) > 0).long()
    return DataLoader(TensorDataset(x, y), 8, shuffle=True, generator=torch.Generator().manual_seed(2))


def groups(model: nn.Module) -> list[dict]:
    """Two groups with settings of their own; the first layer is in none."""
    return [
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias") and n[0] != "0"], "weight_decay": 0.0},
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight") and n[0] != "0"], "lr": 0.03},
    ]


def train_plainly(model, optimizer, scheduler=None, epochs: int = 2):
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


def train(trainer, epochs: int = 2):
    for _ in range(epochs):
        for batch in loader():
            trainer.step(batch)


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, own), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.allclose(own, expected, rtol=0, atol=1e-12), name


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "maximize": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1, maximize=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, weight_decay=0.1, maximize=True),
    **{name: lambda p, name=name: getattr(torch.optim, name)(p) for name in ("Adadelta", "Adamax", "ASGD")},
    **{name: lambda p, name=name: getattr(torch.optim, name)(p) for name in ("NAdam", "RAdam", "Rprop")},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_with_groups_trains_as_in_a_plain_loop(name) -> None:
    plain, model, start = make(), make(), make()
    train_plainly(plain, OPTIMIZERS[name](groups(plain)))
    train(Trainer(model, OPTIMIZERS[name](groups(model)), nn.CrossEntropyLoss()))
    assert_same(model, plain)
    assert torch.equal(model[0][0].weight, start[0][0].weight)
    assert not torch.equal(model[2][0].weight, start[2][0].weight)


SCHEDULERS = {
    "lambda": lambda o: schedulers.LambdaLR(o, [lambda n: 1 / (1 + n), lambda n: 0.9**n]),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "milestones": lambda o: schedulers.MultiStepLR(o, [2, 5, 6]),
    "sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.8)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sets_the_rate_of_each_update_also_of_a_resumed_run(name, tmp_path: Path) -> None:
    plain, model, again = make(), make(), make()
    optimizer = OPTIMIZERS["AdamW"](groups(plain))
    train_plainly(plain, optimizer, SCHEDULERS[name](optimizer))
    own = OPTIMIZERS["AdamW"](groups(model))
    trainer = Trainer(model, own, nn.CrossEntropyLoss(), scheduler=SCHEDULERS[name](own))
    train(trainer, epochs=1)
    trainer.save(tmp_path)
    trainer.wait()
    train(trainer, epochs=1)
    assert_same(model, plain)
    assert [g["lr"] for g in own.param_groups] == pytest.approx([g["lr"] for g in optimizer.param_groups], rel=1e-12)
    new = OPTIMIZERS["AdamW"](groups(again))
    resumed = Trainer(again, new, loss=nn.CrossEntropyLoss(), scheduler=SCHEDULERS[name](new))
    assert resumed.load(tmp_path) == 4
    assert (resumed.updates, resumed.samples) == (4, 27)
    train(resumed, epochs=1)
    assert_same(again, plain)


def test_a_loop_may_change_the_rates_itself() -> None:
    plain, model = make(), make()
    pairs = [(plain, OPTIMIZERS["SGD"](plain.parameters())), (model, OPTIMIZERS["SGD"](model.parameters()))]
    trainer = Trainer(model, pairs[1][1], nn.CrossEntropyLoss())
    for lr in (0.3, 0.01):
        for _, optimizer in pairs:
            optimizer.param_groups[0]["lr"] = lr
        train_plainly(plain, pairs[0][1], epochs=1)
        train(trainer, epochs=1)
    assert_same(model, plain)


def test_the_model_itself_is_trained_when_it_is_called() -> None:
    plain, model = make(), make()
    train_plainly(plain, OPTIMIZERS["SGD"](plain.parameters()))
    trainer = Trainer(model, OPTIMIZERS["SGD"](model.parameters()), nn.CrossEntropyLoss())
    x = torch.randn(4, 6, dtype=torch.float64)
    before = model(x)
    train(trainer)
    assert torch.allclose(model(x), plain(x), rtol=0, atol=1e-12)
    assert not torch.allclose(model(x), before)
    other = Trainer(model, OPTIMIZERS["SGD"](model.parameters()), nn.CrossEntropyLoss(), sample=next(iter(loader())))
    assert len(other.units) == 4  # a chain with the hook is a chain
    assert copy.deepcopy(model)(x).equal(model(x))


def test_the_call_of_before_is_understood() -> None:
    plain, model = make(), make()
    train_plainly(plain, OPTIMIZERS["SGD"](plain.parameters()))
    sample = next(iter(loader()))
    train(Trainer(model, nn.CrossEntropyLoss(), sample=sample, optimizer=OPTIMIZERS["SGD"](model.parameters())))
    assert_same(model, plain)


class Mine(torch.optim.SGD):
    """An optimizer that may do anything in its step."""


def test_what_is_not_taken_is_named() -> None:
    model, loss = make(), nn.CrossEntropyLoss()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = {
        "the optimizer is a Mine; the Trainer takes torch.optim.AdamW, Adam and SGD": [Mine(model.parameters()), loss],
        "Adam has amsgrad=True, which the": [torch.optim.Adam(model.parameters(), amsgrad=True), loss],
        r"group 0 of the optimizer holds a parameter of shape \(6, 6\) that is not the Seq": [
            torch.optim.SGD(make().parameters(), lr=0.1),
            loss,
        ],
        "two optimizers are given; give one": [sgd, sgd],
        "the optimizer and the loss, and one is a float; name the others": [0.1],
    }
    for text, arguments in refused.items():
        with pytest.raises(InputError, match=text):
            Trainer(model, *arguments)
    plateau = schedulers.ReduceLROnPlateau(sgd)
    other = schedulers.ExponentialLR(torch.optim.SGD(model.parameters(), lr=0.1), 0.9)
    for scheduler, text in {plateau: "leave scheduler= out and call", other: "made for another optimizer"}.items():
        with pytest.raises(InputError, match=text):
            Trainer(model, sgd, loss, scheduler=scheduler)
    with pytest.raises(InputError, match="a scheduler changes the rates of a torch optimizer, and none is given"):
        Trainer(model, loss, scheduler=other)
    with pytest.raises(InputError, match="scheduler is a float; give a scheduler of torch"):
        Trainer(model, sgd, loss, scheduler=0.5)


def test_an_optimizer_that_has_moments_is_refused() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    with pytest.raises(InputError, match=r"the AdamW has made updates already, .* call Trainer\.load"):
        Trainer(model, optimizer, nn.CrossEntropyLoss())


def test_without_a_batch_there_is_nothing_to_save_or_forecast(tmp_path: Path) -> None:
    trainer = Trainer(make(), nn.CrossEntropyLoss())
    assert trainer.updates == 0
    for call, what in ((lambda: trainer.save(tmp_path), "a checkpoint"), (trainer.predict, "a prediction")):
        with pytest.raises(InputError, match=f"{what} needs the shape of a batch, and none was seen yet; call step"):
            call()


@pytest.mark.parametrize("name", ["Adagrad", "NAdam", "Rprop"])
def test_the_state_of_other_optimizers_is_saved_and_loaded(name, tmp_path: Path) -> None:
    model, again = make(), make()
    trainer = Trainer(model, OPTIMIZERS[name](model.parameters()), nn.CrossEntropyLoss())
    train(trainer, epochs=1)
    trainer.save(tmp_path)
    trainer.wait()
    train(trainer, epochs=1)
    resumed = Trainer(again, OPTIMIZERS[name](again.parameters()), nn.CrossEntropyLoss())
    resumed.load(tmp_path)
    train(resumed, epochs=1)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


def test_a_plan_that_divides_state_refuses_optimizers_that_run_on_whole_parameters() -> None:
    model = make()
    trainer = Trainer(model, OPTIMIZERS["NAdam"](model.parameters()), nn.CrossEntropyLoss(), plan="zero-1", workers=2)
    with pytest.raises(InputError, match="divides the state of a parameter over workers, and NAdam is run on whole"):
        train(trainer)
