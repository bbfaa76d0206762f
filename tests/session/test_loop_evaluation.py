"""Evaluation on the weights of a running program, compared with a plain evaluation of the trained model."""

import copy
import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipedejavu.facts import InputError
from pipedejavu.session import Trainer

NEAR = 1e-12
"""Means of a few float64 losses of size one."""


class Classifier(nn.Module):
    """A model that is no chain, with dropout and running statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.dropout, self.head = nn.Dropout(0.4), nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.head(x + self.dropout(self.second(x)).tanh())


def chain():
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def batches(*sizes: int):
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 6, generator=random).double(), torch.randint(0, 3, (n,), generator=random)) for n in sizes]


def make(kind, plan: str = "1f1b", **options):
    torch.manual_seed(0)
    model = kind().double()
    return model, Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.CrossEntropyLoss(), plan=plan, **options
    )


def evaluated_plainly(model: nn.Module, loader) -> dict[str, float]:
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
        output = model(inputs)
    loss = nn.functional.cross_entropy(output, targets).item()
    return {"loss": loss, "accuracy": (output.argmax(1) == targets).double().mean().item(), "samples": len(targets)}


@pytest.mark.parametrize("plan", ["1f1b", "ddp", "chimera", "parameter-server", "easgd"])
@pytest.mark.parametrize("kind", [chain, Classifier])
def test_metrics_are_those_of_the_trained_model(kind, plan) -> None:
    _, trainer = make(kind, plan)
    for batch in batches(16, 16, 16):
        trainer.step(batch)
    loader = batches(9, 9, 4)
    metrics = trainer.evaluate(loader)
    expected = evaluated_plainly(trainer.save_to_model(), loader)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert abs(metrics[name] - value) < NEAR


@pytest.mark.parametrize("kind", [chain, Classifier])
def test_training_goes_on_with_the_same_bits_after_an_evaluation(kind) -> None:
    def train(is_evaluated: bool) -> dict:
        model, trainer = make(kind)
        data = TensorDataset(*batches(48)[0])
        for x, y in DataLoader(data, batch_size=16, shuffle=True):
            trainer.step((x, y))
            if is_evaluated:
                trainer.evaluate(DataLoader(data, batch_size=20, shuffle=True))
        assert model.training
        return model.state_dict() | {"random": torch.get_rng_state()}

    with_it, without = train(is_evaluated=True), train(is_evaluated=False)
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def test_a_model_is_evaluated_before_its_first_step_and_after_a_load(tmp_path) -> None:
    loader = batches(12, 5)
    model, trainer = make(Classifier)
    metrics = trainer.evaluate(loader)
    assert abs(metrics["loss"] - evaluated_plainly(model, loader)["loss"]) < NEAR
    trainer.step(batches(16)[0])
    trained = trainer.evaluate(loader)
    trainer.save(tmp_path)
    trainer.wait()
    _, other = make(Classifier)
    assert other.load(tmp_path) == 1
    assert other.evaluate(loader) == pytest.approx(trained, abs=NEAR)


class Words(nn.Module):
    """A language model that computes its own loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.middle(self.embed(input_ids)).tanh())
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def test_token_losses_are_weighted_by_labels_that_count_and_have_a_perplexity() -> None:
    torch.manual_seed(0)
    model = Words().double()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = []
    for size, length, ignored in ((8, 6, 2), (8, 6, 4), (3, 5, 0)):
        tokens = torch.randint(0, 11, (size, length))
        labels = tokens.clone()
        labels[: size // 2, :ignored] = -100
        loader.append({"input_ids": tokens, "labels": labels})
    trainer.step(loader[0])
    metrics = trainer.evaluate(loader)
    trained, total, right, count = trainer.save_to_model(), 0.0, 0, 0
    for batch in loader:
        with torch.no_grad():
            output = trained(**batch)
        labels = batch["labels"][:, 1:]
        total += output["loss"].item() * int((labels != -100).sum())
        right += int((output["logits"][:, :-1].argmax(-1) == labels).sum())
        count += int((labels != -100).sum())
    assert abs(metrics["loss"] - total / count) < NEAR
    assert metrics["perplexity"] == math.exp(metrics["loss"])
    assert abs(metrics["accuracy"] - right / count) < NEAR
    assert metrics["samples"] == 19


def test_metrics_of_the_user_are_means_or_sums_with_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    random = torch.Generator().manual_seed(0)
    loader = [tuple(torch.randn(n, width, generator=random).double() for width in (6, 1)) for n in (8, 8, 3)]
    trainer.step(loader[0])

    def positive(output, targets):
        chosen = targets > 0
        return output[chosen].abs().sum(), chosen.sum()

    metrics = trainer.evaluate(
        loader, {"mae": lambda output, targets: (output - targets).abs().mean(), "positive": positive}
    )
    inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
    with torch.no_grad():
        output = trainer.save_to_model()(inputs)
    assert metrics.keys() == {"loss", "mae", "positive", "samples"}  # no classes, so no accuracy
    assert abs(metrics["loss"] - nn.functional.mse_loss(output, targets).item()) < NEAR
    assert abs(metrics["mae"] - (output - targets).abs().mean().item()) < NEAR
    assert abs(metrics["positive"] - output[targets > 0].abs().mean().item()) < NEAR


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"loss": len}, r"^a metric is called 'loss', which evaluate\(\) computes itself; give it another name$"),
        (
            {"right": 0.5},
            r"^the metric 'right' is a float; give a function of \(output, targets\) that returns a mean over the"
            r" samples, or \(sum, count\)$",
        ),
        (
            {"all": lambda output, _: output},
            r"^the metric 'all' returns a tensor of shape \(16, 3\); return a mean over the samples of the batch, or"
            r" \(sum, count\)$",
        ),
    ],
)
def test_metrics_of_another_form_are_refused(metrics, sentence) -> None:
    _, trainer = make(chain)
    trainer.step(batches(16)[0])
    with pytest.raises(InputError, match=sentence):
        trainer.evaluate(batches(16), metrics)


def test_a_loader_without_batches_is_refused() -> None:
    _, trainer = make(chain)
    with pytest.raises(InputError, match=r"^the loader of evaluate\(\) has no batch; give a DataLoader or a list of"):
        trainer.evaluate([])
