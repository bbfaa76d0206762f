"""Losses as users write them: means, labels that do not count, losses that cannot be divided, penalties."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

from pipedejavu.engine import Sgd
from pipedejavu.facts import InputError
from pipedejavu.session import Trainer
from pipedejavu.source import loss_reduction
from pipedejavu.source.loss_reduction import find_reduction, own_loss
from pipedejavu.source.user_batch import UserBatch

CLASSES = 5


class Tagger(nn.Module):
    """No chain: gives each token of a sequence a class, and computes its own loss, as transformers does."""

    def __init__(self, shift: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(CLASSES, 6, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
        self.head, self.shift = nn.Linear(6, CLASSES, dtype=torch.float64), shift

    def forward(self, tokens, labels):
        x = self.token(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        logits = self.head(x)
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Pooled(nn.Module):
    """Takes the mean over a sequence, or lets classes come before places, as losses have them."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        self.is_whole = is_whole

    def forward(self, x):
        return x.mean(1) if self.is_whole else x.transpose(1, 2)


def chain(is_whole: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(CLASSES, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES), Pooled(is_whole)]
    return nn.Sequential(*layers).double()


def classifier() -> nn.Sequential:
    """Gives each sequence a class."""
    return chain(is_whole=True)


def tagger() -> nn.Sequential:
    """Gives each token a class."""
    return chain(is_whole=False)


def tokens(size: int, seed: int, length: int = 7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CLASSES, (size, length), generator=generator)


def masked(labels, ignored: int = -100):
    """Returns labels of which some do not count, in every row another number of them, and of some rows none."""
    found = labels.clone()
    for row in range(len(found)):
        found[row, row % 8 :] = ignored
    return found


def train(make, loss, batches, plain, plan="1f1b") -> None:
    """Compares a Trainer with a plain loop over whole batches."""
    other = make()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    trainer = Trainer(make(), loss, sample=batches[0], plan=plan, workers=2, optimizer=Sgd(lr=0.3))
    for batch in batches:
        optimizer.zero_grad()
        value = plain(other, batch)
        value.backward()
        optimizer.step()
        assert trainer.step(batch) == pytest.approx(value.item(), rel=1e-10)
    for own, expected in zip(trainer.save_to_model().parameters(), other.parameters(), strict=True):
        assert torch.allclose(own, expected, rtol=0, atol=1e-12)


MEANS = {
    "module": nn.CrossEntropyLoss(),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "function": lambda output, targets: functional.cross_entropy(output, targets),
}


@pytest.mark.parametrize(("name", "plan"), [("module", "1f1b"), ("smoothed", "ddp"), ("function", "coarse")])
def test_a_mean_over_samples_equals_a_plain_loop_with_unequal_microbatches(name, plan) -> None:
    batches = [(tokens(n, n), tokens(n, n + 1)[:, 0]) for n in (10, 9, 13)]
    train(classifier, MEANS[name], batches, lambda model, b: MEANS[name](model(b[0]), b[1]), plan)


def test_a_sum_is_divided_by_the_samples_and_the_trainer_says_so(capsys) -> None:
    total = nn.CrossEntropyLoss(reduction="sum")
    batches = [(tokens(n, n), tokens(n, n + 1)[:, 0]) for n in (10, 9)]
    train(classifier, total, batches, lambda model, b: total(model(b[0]), b[1]) / len(b[1]))
    said = capsys.readouterr().err
    assert said.count("the loss is a sum over samples, and a step divides it by their number, which a plain loop") == 1
    train(classifier, MEANS["module"], batches, lambda model, b: MEANS["module"](model(b[0]), b[1]))
    assert "the loss is a sum" not in capsys.readouterr().err


@pytest.mark.parametrize("ignored", [-100, 2])
def test_labels_that_do_not_count_have_no_weight(ignored) -> None:
    mean = nn.CrossEntropyLoss(ignore_index=ignored)
    batches = [(tokens(n, n), masked(tokens(n, n + 1), ignored)) for n in (10, 7, 13)]
    train(tagger, mean, batches, lambda model, b: mean(model(b[0]), b[1]))


def test_prompts_whose_labels_do_not_count_have_no_weight() -> None:
    """In the sample nearly as many labels of each row count, so that a mean over samples is near."""
    batches = []
    for seed, prompts in ((1, (3, 3, 3, 4, 3, 3, 3, 3)), (2, (3, 17, 4, 12, 3, 15, 9, 3))):
        words = tokens(8, seed, length=20)
        labels = words.clone()
        for row, length in enumerate(prompts):
            labels[row, :length] = -100
        batches.append({"tokens": words, "labels": labels})
    train(lambda: Tagger(shift=True), None, batches, lambda model, b: model(**b)["loss"])


def test_labels_that_do_not_count_may_come_after_the_sample() -> None:
    """Nothing in the sample says that some labels will not count; of one microbatch none does."""
    mean = functional.cross_entropy
    later = tokens(8, 4)
    later[:2], later[5, 2:] = -100, -100
    batches = [(tokens(8, 1), tokens(8, 2)), (tokens(8, 3), later)]
    train(tagger, mean, batches, lambda model, b: mean(model(b[0]), b[1]))


@pytest.mark.parametrize("shift", [True, False])
def test_a_models_own_mean_is_weighted_by_the_labels_that_count(shift) -> None:
    batches = [{"tokens": tokens(n, n), "labels": masked(tokens(n, n + 1))} for n in (12, 12)]
    train(partial(Tagger, shift), None, batches, lambda model, b: model(**b)["loss"])


class Noisy(nn.Module):
    """A model that draws noise whether it trains or not, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.one(x)
        return self.two(x + torch.randn_like(x))


def test_a_model_that_draws_noise_is_no_obstacle() -> None:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(Noisy(), nn.MSELoss(), sample=(x, x), optimizer=Sgd(lr=0.01))
    assert 0.1 < trainer.step((x, x)) < 10


def contrastive(output, targets):
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def masked_mean(output, targets):
    labels, mask = targets
    each = functional.cross_entropy(output, labels, reduction="none")
    return (each * mask).sum() / mask.sum()


REFUSED = {
    "contrastive": (contrastive, None),
    "classes with weights": (nn.CrossEntropyLoss(weight=torch.linspace(1, 3, CLASSES, dtype=torch.float64)), None),
    "another label that does not count": (lambda o, t: functional.cross_entropy(o, t, ignore_index=0), None),
    "a mask that masks nothing yet": (masked_mean, torch.ones(8)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_divided_is_refused(name) -> None:
    loss, more = REFUSED[name]
    labels = torch.arange(8) % CLASSES
    sample = (tokens(8, 0), labels if more is None else (labels, more))
    with pytest.raises(InputError, match="the loss is neither a sum nor a mean over samples or over labels that count"):
        Trainer(classifier(), loss, sample=sample)


def test_a_loss_for_each_sample_is_refused() -> None:
    each = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(InputError, match=r"the loss returns \(5,\); return one number, a sum or a mean over samples"):
        Trainer(classifier(), each, sample=(tokens(8, 0), torch.arange(8) % CLASSES))


class Centres(nn.Module):
    """A loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(CLASSES, CLASSES, dtype=torch.float64))

    def forward(self, output, targets):
        return ((output - self.centres[targets]) ** 2).sum()


def test_parameters_of_a_loss_are_refused() -> None:
    sample, centres = (tokens(8, 0), torch.arange(8) % CLASSES), Centres()
    with pytest.raises(
        InputError, match=r"the loss is a Centres with parameters of its own \('centres'\), which would"
    ):
        Trainer(classifier(), centres, sample=sample)
    with pytest.raises(InputError, match=r"depends on a tensor of shape \(5, 5\) that is not the model's beside"):
        Trainer(classifier(), lambda o, t: centres(o, t), sample=sample)
    centres.requires_grad_(False)
    Trainer(classifier(), centres, sample=sample)


def test_a_penalty_over_the_models_parameters_is_refused() -> None:
    model = classifier()

    def loss(output, targets):
        return functional.cross_entropy(output, targets) + 0.1 * model[3].weight.square().sum()

    with pytest.raises(InputError, match=r"the loss depends on the model's '3.weight' beside the model's output"):
        Trainer(model, loss, sample=(tokens(8, 0), torch.arange(8) % CLASSES))


def test_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    model[2].eval()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    Trainer(model, nn.MSELoss(), sample=(torch.ones(16, 4).cumsum(0), torch.ones(16, 4)), plan="ddp")
    assert [part.training for part in model] == [True, True, False, True]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


class TightTagger(Tagger):
    """Has no memory for the logits of all tokens at once, and notes which activations are saved."""

    def forward(self, tokens, labels):
        x = self.token(tokens)
        self.saved = []
        for block in self.blocks:
            x = x + block(x).tanh()
            self.saved.append(x.requires_grad)
        logits = self.head(x)
        if type(logits) is torch.Tensor:
            raise torch.OutOfMemoryError("no room for the logits")
        logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_the_reduction_is_found_if_the_logits_of_all_samples_do_not_fit():
    tokens = torch.randint(0, CLASSES, (6, 4), generator=torch.Generator().manual_seed(1))
    batch = UserBatch.of({"tokens": tokens, "labels": tokens}, has_own_loss=True)
    reduction, _ = find_reduction(TightTagger(shift=True), own_loss, batch.readings())
    assert reduction.kind == "shifted"


def test_the_probe_saves_activations_of_the_last_parameters_alone(monkeypatch):
    monkeypatch.setattr(loss_reduction, "_MOST_OBSERVED", 36)
    model, tokens = TightTagger(shift=True), torch.randint(0, CLASSES, (6, 4))
    batch = UserBatch.of({"tokens": tokens, "labels": tokens}, has_own_loss=True)
    find_reduction(model, own_loss, batch.readings())
    assert model.saved == [False, False, True]
    assert all(parameter.requires_grad for parameter in model.parameters())
