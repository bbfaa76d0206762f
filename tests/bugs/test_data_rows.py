"""Batches as users have them: targets and inputs of several tensors, and inputs that all samples share."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import Sgd
from pipedejavu.facts import InputError
from pipedejavu.session import Trainer


class Net(nn.Module):
    """Takes samples, and a table that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))

    def forward(self, x, table=None):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x if table is None else x @ table


class Nested(Net):
    """Takes inputs that are a tuple, a list and a dict of tensors."""

    def forward(self, pair, more):
        x, (y, _) = pair[0], pair[1]
        return super().forward(x + y * more["z"])


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()


def made(size: int, *shape: int, seed: int = 0):
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_plain(model, loss, batches, plain, plan="1f1b"):
    """Trains in a Trainer and in a plain loop, whose `plain` returns the mean loss of a batch."""
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    trainer = Trainer(model, loss, sample=batches[0], plan=plan, workers=2, optimizer=Sgd(lr=0.1))
    for batch in batches:
        optimizer.zero_grad()
        mean = plain(other, batch)
        mean.backward()
        optimizer.step()
        assert trainer.step(batch) == pytest.approx(mean.item(), rel=1e-10)
    for own, expected in zip(trainer.save_to_model().parameters(), other.parameters(), strict=True):
        assert torch.allclose(own, expected, rtol=0, atol=1e-12)


def both(output, targets):
    return ((output - targets[0]) ** 2).sum() + (output.sum(1) - targets[1]).abs().sum()


def test_targets_may_be_a_tuple() -> None:
    batches = [(made(n, 8), (made(n, 8, seed=1), made(n, seed=2))) for n in (9, 14)]
    check_plain(chain(), both, batches, lambda model, b: both(model(b[0]), b[1]) / len(b[0]))


@pytest.mark.parametrize("plan", ["1f1b", "ddp"])
def test_targets_may_be_a_dict_and_batches_lists(plan) -> None:
    batches = [[made(n, 8), {"one": made(n, 8, seed=1), "two": made(n, seed=2)}] for n in (9, 14)]

    def loss(output, targets):
        return both(output, (targets["one"], targets["two"]))

    check_plain(chain(), loss, batches, lambda model, b: loss(model(b[0]), b[1]) / len(b[0]), plan)


def test_targets_of_several_sizes_are_refused() -> None:
    targets = (made(8, 8), made(3))
    with pytest.raises(
        InputError, match="the targets of a batch have 8 and 3 rows; give tensors with one row for each"
    ):
        Trainer(Net(), both, sample=(made(8, 8), targets))


def square(output, targets):
    return ((output - targets) ** 2).sum()


def test_an_input_that_all_share_may_have_as_many_rows_as_there_are_samples() -> None:
    """The table has 8 rows; so have the first batch by chance, and not the others."""
    table = made(8, 8, seed=5)
    batches = []
    for n in (8, 12, 8):
        batches.append(({"x": made(n, 8, seed=n), "table": table}, made(n, 8, seed=1)))

    def plain(model, batch):
        return square(model(**batch[0]), batch[1]) / len(batch[1])

    check_plain(Net(), square, batches, plain)
    check_plain(Net(), square, batches[1:], plain)  # a later batch has as many samples as the table has rows


def test_an_input_that_lacks_rows_is_refused_by_name() -> None:
    trainer = Trainer(Net(), square, sample=({"x": made(9, 8)}, made(9, 8)), optimizer=Sgd(lr=0.1))
    with pytest.raises(InputError, match=r"input \['x'\] has 8 rows in a batch of 9 samples, and had one for each"):
        trainer.step(({"x": made(8, 8)}, made(9, 8)))


def test_inputs_may_be_nested() -> None:
    def batch(n: int):
        pair = (made(n, 8), [made(n, 8, seed=1), made(n, 2, seed=2)])
        return (pair, {"z": made(n, 1, seed=3)}), made(n, 8, seed=4)

    check_plain(Nested(), square, [batch(8), batch(8)], lambda model, b: square(model(*b[0]), b[1]) / len(b[1]))


def test_a_mapping_that_does_not_say_how_many_samples_it_has_is_refused() -> None:
    with pytest.raises(InputError, match=r"without 'labels', .* 'table' has 8 rows, 'x' has 9 rows; give \(inputs, t"):
        Trainer(Net(), None, sample={"table": made(8, 8), "x": made(9, 8)})
