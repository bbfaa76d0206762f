"""`Trainer.fit`: epochs, callbacks, evaluations and its history, beside the plain loop."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from pipedejavu.facts import InputError
from pipedejavu.session import Callback, Trainer


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = TensorDataset(torch.randn(44, 6).double(), torch.randint(0, 3, (44,)))
    return model, data


def loader_of(data, **options) -> DataLoader:
    return DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(5), **options)


def make_optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=10)


def test_fit_equals_a_plain_loop_with_a_schedule_and_evaluations() -> None:
    model, data = make()
    plain = copy.deepcopy(model)
    optimizer, scheduler = make_optimizer(model)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), scheduler=scheduler)
    history = trainer.fit(loader_of(data), DataLoader(data, batch_size=20), epochs=3)

    optimizer, scheduler = make_optimizer(plain)
    losses, metrics, loader = [], [], loader_of(data)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(plain(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        with torch.no_grad():
            output = plain(data.tensors[0])
        metrics.append(nn.functional.cross_entropy(output, data.tensors[1]).item())
    assert history.losses == pytest.approx(losses, abs=1e-12)
    assert [found["loss"] for found in history.metrics] == pytest.approx(metrics, abs=1e-12)
    for name, tensor in model.state_dict().items():
        assert (tensor - plain.state_dict()[name]).abs().max() < 1e-12
    assert [(record.epoch, record.steps) for record in history.epochs] == [(0, 3), (1, 3), (2, 3)]
    weighted = (16 * losses[0] + 16 * losses[1] + 12 * losses[2]) / 44
    assert history.epochs[0].loss == pytest.approx(weighted, abs=1e-12)
    assert history.seconds == sum(record.seconds for record in history.epochs) > 0


class Notes(Callback):
    """Keeps what it is called with; stops training after a number of steps."""

    def __init__(self, last: int):
        self.last, self.calls = last, []

    def on_train_begin(self, *_):
        self.calls.append("begin")

    def on_epoch_begin(self, _, epoch):
        self.calls.append(f"epoch {epoch}")

    def on_step_end(self, trainer, *_):
        self.calls.append(f"step {trainer.updates}")
        trainer.should_stop = trainer.updates == self.last

    def on_evaluate(self, _, metrics):
        self.calls.append(f"evaluate {metrics['samples']}")

    def on_epoch_end(self, _, record):
        self.calls.append(f"end {record.epoch} {record.steps}")

    def on_train_end(self, _, history):
        self.calls.append(f"all {len(history.losses)}")


def test_a_callback_stops_training_after_its_step() -> None:
    model, data = make()
    notes, trainer = Notes(last=4), Trainer(model, loss=nn.CrossEntropyLoss())
    history = trainer.fit(loader_of(data), DataLoader(data, batch_size=44), epochs=5, callbacks=[notes])
    assert notes.calls == [
        "begin", "epoch 0", "step 1", "step 2", "step 3", "evaluate 44", "end 0 3",
        "epoch 1", "step 4", "evaluate 44", "end 1 1", "all 4",
    ]  # fmt: skip
    assert len(history.epochs) == 2
    assert len(trainer.fit(loader_of(data)).losses) == 3  # a later call begins anew


def test_samplers_are_given_the_epoch() -> None:
    class Sampler(RandomSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    model, data = make()
    Trainer(model, loss=nn.CrossEntropyLoss()).fit(DataLoader(data, batch_size=22, sampler=Sampler(data)), epochs=2)
    assert Sampler.epochs == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"loader": [], "callbacks": [print]},
            "^a callback is a builtin_function_or_method; give instances of subclasses of pipedejavu.Callback$",
        ),
        ({"loader": []}, "^the loader of epoch 0 has no batch; give a DataLoader or a list of batches$"),
        (
            {"loader": iter([])},
            "^loader is a list_iterator, which can be read only once; give a DataLoader or a list of batches$",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused(arguments, sentence) -> None:
    model, _ = make()
    with pytest.raises(InputError, match=sentence):
        Trainer(model, loss=nn.CrossEntropyLoss()).fit(**arguments)
