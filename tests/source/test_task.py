"""Microbatches by number."""

import weakref

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.plan import Plan, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.run.options import TrainOptions
from pipedejavu.simulate import unit_costs
from pipedejavu.source.task import num_kept, prepare

GPIPE = preset("gpipe").at(workers=3, microbatches=4)


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


def test_no_worker_makes_samples_to_count_them() -> None:
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


def test_samples_go_when_the_next_are_made_and_their_count_stays() -> None:
    order, made = order_of("bert-tiny", (2, 2))
    order.keep(1)
    first = weakref.ref(order.targets(0))
    assert order.inputs(0) is not None
    assert made == [2]
    assert first() is not None
    counts = [order.count(n) for n in (0, 1, 0)]
    assert counts[0] == counts[2] > 0
    assert made == [2, 2]
    assert first() is None


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        (preset("ddp").at(workers=2, microbatches=4), [1, 1]),
        (GPIPE, [1, 1, 1]),
        (GPIPE.replace(order=GPIPE.order.replace(recompute=1.0)), [4, 1, 4]),
        (preset("interleaved").at(workers=2, microbatches=4), [1, 1]),
        (preset("gems").at(workers=2, microbatches=4), [1, 1]),
    ],
)
def test_samples_stay_where_they_are_read_twice(plan: Plan, kept: list[int]) -> None:
    program = compile_plan(*unit_costs(plan, {}), fold=False)
    assert [num_kept(program, worker) for worker in range(len(program.workers))] == kept
