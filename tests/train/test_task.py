"""Microbatches by number."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.train.options import TrainOptions
from pipedejavu.train.task import prepare


def order_of(model: str, sizes: tuple[int, ...]):
    """Returns the microbatches of a model, and the sizes of those that were made."""
    options = TrainOptions(model=model, steps=1, data="random" if model == "mlp" else None)
    order, made = prepare(options, sizes).batches, []
    batch = order.task.data.batch

    def noted(indices):
        made.append(len(indices))
        return batch(indices)

    order.task.data.batch = noted
    return order, made


def test_nobody_makes_samples_to_know_how_many_there_are() -> None:
    order, made = order_of("mlp", (3, 5))
    assert [order.length(n) for n in range(4)] == [order.count(n) for n in range(4)] == [3, 5, 3, 5]
    order.change(2, (4, 4))  # a chain takes any size
    assert [order.count(n) for n in range(2, 6)] == [3, 5, 4, 4]
    assert made == []
    assert len(order.targets(1)) == 5
    assert made == [5]


def test_tokens_that_count_are_counted_in_their_targets() -> None:
    order, made = order_of("bert-tiny", (2, 2))
    assert [order.length(n) for n in range(2)] == [2, 2]
    assert made == []
    assert order.count(1) == int((order.targets(1) != -100).sum())
    assert made == [2]
