"""The study of late shares: its plain loop in the order of arrivals, and how its times and verdicts come about."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.plan import Version
from pipedejavu.reproduce.described_pair import MACHINE, Large
from pipedejavu.reproduce.late_share_study import (
    Synchronisation,
    SynchronisationRun,
    needed,
    train,
    train_in_order_of_arrival,
)
from pipedejavu.reproduce.training_study import Evaluated, StudyRun, TrainingStudy
from pipedejavu.zoo import open_data
from pipedejavu.zoo.mlp import MlpSize

WIDTHS = (64, 16, 10)
SMALL = Large("mlp", 4096, (784, 1024, 1024, 10))


def study(optimizer):
    test = open_data("digits", MlpSize(widths=WIDTHS).form(), split="test")
    devices = tuple(device.name for device in MACHINE.devices)
    return TrainingStudy(model="mlp", data="digits", samples=12, optimizer=optimizer, options={"widths": WIDTHS},
                         test=test, machine=MACHINE, devices=devices)  # fmt: skip


@pytest.mark.parametrize(
    "optimizer", [Sgd(lr=0.1, momentum=0.9), AdamW(lr=0.01, weight_decay=0.0)], ids=["sgd", "adamw"]
)
def test_one_worker_in_the_order_of_arrival_is_synchronous_training(optimizer):
    each = study(optimizer)
    exact = train(each, SMALL, Synchronisation("coarse", Version()), 16, 0, optimizer.lr)
    alone = train_in_order_of_arrival(StudyRun(each, 0), [2.0], 16, 0.04)
    assert [e.loss for e in alone] == pytest.approx([e.loss for e in exact], rel=1e-4)
    assert [e.simulated_s for e in alone] == [4.0 * n for n in range(1, 9)]
    late = train(each, SMALL, Synchronisation("late-share", Version(kind="late")), 16, 0, optimizer.lr)
    assert late[-1].loss != pytest.approx(exact[-1].loss, rel=1e-4)


def test_gradients_are_applied_as_they_arrive_to_weights_that_have_moved():
    each = study(Sgd(lr=0.1, momentum=0.9))
    fast, both = ([*train_in_order_of_arrival(StudyRun(each, 0), p, 16, 0.0)] for p in ([1.0], [1.0, 4.0]))
    # By 12 seconds the fast worker has made 12 updates and the slow one 3; the 16th arrives with the 13th second.
    assert (fast[-1].simulated_s, both[-1].simulated_s) == (16.0, 13.0)
    assert fast[-1].loss != pytest.approx(both[-1].loss, rel=1e-4)


def test_late_shares_shorten_updates_only_where_times_vary():
    late, exact = Version(kind="late"), Version()
    assert SMALL.update_s(late, 8) <= SMALL.update_s(exact, 8)
    assert SMALL.varying_s(late, 16) < 0.97 * SMALL.varying_s(exact, 16)
    assert SMALL.varying_s(exact, 16) > SMALL.update_s(exact, 16)


def test_the_updates_that_synchronous_training_needs_are_found_between_evaluations():
    losses = (2.0, 1.0, 0.5, 0.4)
    run = SynchronisationRun(
        Synchronisation("coarse"), 0.1, [[Evaluated(10 * n, 0.0, 0.0, loss, 0.0) for n, loss in enumerate(losses, 1)]]
    )
    assert needed(run, 0.75) == pytest.approx(0.625)
    assert (needed(run, 3.0), needed(run, 0.4), needed(run, 0.1)) == (0.25, 1.0, 1.0)
