"""Suspicion-based aggregation: the score's formula, who is dropped, and faulty replicas that change nothing."""

import math
from itertools import permutations

import pytest
import torch
from torch import nn

from pipedejavu.engine import Applied, Byzantine, Scored, Sgd, run_threads
from pipedejavu.engine.applier import Applier
from pipedejavu.engine.byzantine import KINDS
from pipedejavu.engine.job import Job
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.score import ScoreTrial, kept, score
from pipedejavu.facts import InputError
from pipedejavu.plan import preset
from tests.engine.test_presets import ADAMW, MOMENTUM


def trimmed(trim):
    return preset("zeno").plan.reduce.replace(trim=trim)


def test_the_score_is_the_loss_after_a_step_and_a_penalty_for_its_size():
    """By hand: f(w) = ½·Σ(xw − y)² on one weight, w = 2, u = g/4 = 3, γ = 0.1, ρ/γ = 0.5."""
    layer = nn.Linear(1, 1, bias=False)
    job = Job(units=[("u", layer)], loss=lambda out, y: 0.5 * (out - y).square().sum(), optimizer=Sgd(lr=0.1))
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [1.0]])
    trial = ScoreTrial(-1, x, y, 2, rate=0.1, penalty=0.5)
    weights, summed = {"u.weight": torch.tensor([[2.0]])}, {"u.weight": torch.tensor([[12.0]])}
    found = score([PieceRunner([(0, "u", layer)], 0)], job, trial, [weights], 0, summed, count=4)
    stepped = 2 - 0.1 * 3
    loss = 0.5 * ((stepped - 1) ** 2 + (2 * stepped - 1) ** 2) / 2
    assert found == pytest.approx(-loss - 0.5 * 0.1 * 9, rel=1e-12)


def test_the_lowest_scores_are_dropped():
    scores = {0: -3.0, 1: -1.0, 2: -2.0, 3: -9.0}
    for order in permutations(scores):
        found = kept([scores[replica] for replica in order], 2)
        assert {order[place] for place in found} == {1, 2}
        assert list(found) == sorted(found)


def test_of_equal_scores_the_first_replicas_count():
    assert kept([-1.0, -1.0, -1.0], 1) == (0, 1)


def test_what_is_no_number_never_counts():
    assert kept([-math.inf, -1.0, -math.inf], 1) == (1,)
    assert kept([-math.inf, -math.inf], 0) == ()


@pytest.mark.parametrize("model", ["mlp", "convnet", "gpt"])
def test_dropping_no_contribution_is_plain_training(make, model):
    case = make("zeno", model, workers=3, microbatches=2, optimizer=ADAMW, reduce=trimmed(0))
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance


@pytest.mark.parametrize("model", ["mlp", "convnet", "gpt"])
@pytest.mark.parametrize("trim", [1, 2])
def test_what_is_left_is_averaged_and_replays(make, model, trim):
    optimizer = MOMENTUM if model == "mlp" else ADAMW
    case = make("zeno", model, workers=3, microbatches=2, steps=2, rounds=2, optimizer=optimizer, reduce=trimmed(trim))
    assert case.audit() <= case.tolerance
    assert case.moved() > 1e6 * case.tolerance
    server = case.outcome.logs[-1].events
    assert [type(event) for event in server] == [Scored, Scored, Scored, Applied] * 4
    applied = [event for event in server if isinstance(event, Applied)]
    assert all(len(event.microbatches) == 2 * (3 - trim) for event in applied)


@pytest.mark.parametrize("kind", KINDS)
def test_with_faulty_replicas_training_equals_training_on_the_others(make, kind):
    """Two of five are faulty and two are dropped: every update is that of the three honest ones, to rounding."""
    fault = {"byzantine": Byzantine(2, kind, 100.0)}
    case = make(
        "zeno", workers=5, microbatches=1, steps=8, sizes=(16,), optimizer=Sgd(lr=0.1), extra=fault, reduce=trimmed(2)
    )
    applied = [event for event in case.outcome.logs[-1].events if isinstance(event, Applied)]
    assert [event.microbatches for event in applied] == [tuple(range(5 * t, 5 * t + 3)) for t in range(8)]
    assert case.audit() <= case.tolerance
    honest = make("ddp", workers=3, microbatches=1, steps=8, sizes=(16,), optimizer=Sgd(lr=0.1))
    honest.units = case.units
    samples = case.batches
    ours = [i for t in range(8) for i in range(5 * t, 5 * t + 3)]
    honest.batches = type(samples)([samples.x[i] for i in ours], [samples.y[i] for i in ours], [16] * len(ours))
    expected = honest.trained_plainly()
    assert case.furthest(expected) <= case.tolerance


def mean_loss(case, update):
    """Returns the mean loss of an update's first three replicas, which are honest."""
    losses = {number: loss for log in case.outcome.logs for number, loss in log.losses.items()}
    return sum(losses[5 * update + q] for q in range(3)) / 48


@pytest.mark.parametrize("kind", ["sign-flip", "random"])
def test_where_the_mean_diverges_the_loss_stays_near_that_without_faults(make, kind):
    sound = make("ddp", workers=5, microbatches=1, steps=30, sizes=(16,), optimizer=Sgd(lr=0.1))
    spoilt = {"byzantine": Byzantine(2, kind, 100.0), "on_nan": "skip"}
    settings = {"workers": 5, "microbatches": 1, "steps": 30, "sizes": (16,), "optimizer": Sgd(lr=0.1), "extra": spoilt}
    mean, zeno = make("ddp", **settings), make("zeno", **settings, reduce=trimmed(2))
    mean.units = zeno.units = sound.units
    at_first = mean_loss(sound, 0)
    assert not mean_loss(mean, 29) < 2 * at_first
    # The labels are random: there is little to learn, and two of five gradients fewer change little of it.
    assert abs(mean_loss(zeno, 29) - mean_loss(sound, 29)) < 0.1 * at_first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ddp", "parameter-server", "zeno"])
def test_faults_are_replayed_too(make, name, kind):
    case = make(name, workers=3, steps=2, rounds=2, extra={"byzantine": Byzantine(1, kind)})
    sound = make(name, workers=3, steps=2, rounds=2)
    sound.units = case.units
    assert case.audit() <= 100 * case.tolerance  # gradients are ten times as large, their squares a hundred
    if name == "ddp":
        assert case.furthest(sound.trained_plainly()) > 1e6 * case.tolerance


def mutated(case, monkeypatch, name, change):
    with monkeypatch.context() as patch:
        patch.setattr(Applier, name, change(getattr(Applier, name)))
        case.outcome = run_threads(case.program, case.job, case.batches)
    return case


def test_a_score_that_is_wrong_is_caught(make, monkeypatch):
    def doubled(evaluate):
        def run(self, a):
            evaluate(self, a)
            event = self.log.events.pop()
            self.log.events.append(event._replace(score=2 * event.score))

        return run

    case = mutated(make("zeno", workers=3, microbatches=1), monkeypatch, "evaluate", doubled)
    with pytest.raises(InputError, match="the run gave a contribution another score than"):
        case.audit()


def test_to_trust_others_than_the_scores_say_is_caught(make, monkeypatch):
    def reversed_scores(average):
        def run(self, piece, update):
            for key in [key for key in self.values if key[0] == "e"]:
                self.values[key] = -self.values[key]
            average(self, piece, update)

        return run

    case = mutated(make("zeno", workers=3, microbatches=1), monkeypatch, "_average_trusted", reversed_scores)
    with pytest.raises(InputError, match=r"the scores \[.*\] trust replicas \(.*\), but the run: Applied"):
        case.audit()


def test_an_update_without_a_trusted_contribution_is_skipped(make):
    case = make("zeno", workers=2, microbatches=1, steps=1, extra={"byzantine": Byzantine(2, "scale", math.inf)})
    applied = [event for event in case.outcome.logs[-1].events if isinstance(event, Applied)]
    assert [(event.microbatches, event.coefficient) for event in applied] == [((), 0.0)]
    initial = {f"{unit}.{n}": p for unit, module in case.units for n, p in module.named_parameters()}
    assert all(torch.equal(w, initial[n]) for found in case.outcome.weights.values() for n, w in found.items())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sign-flip", "faulty replicas are COUNT:KIND or COUNT:KIND:FACTOR, such as 2:sign-flip, not 'sign-flip'"),
        (
            "2:scale:much",
            "faulty replicas are COUNT:KIND or COUNT:KIND:FACTOR, such as 2:sign-flip, not '2:scale:much'",
        ),
        ("0:scale", "'0:scale' makes 0 replicas faulty; give 1 or more"),
        ("2:sign-flop", "replicas are not faulty by 'sign-flop'; did you mean 'sign-flip'?"),
    ],
)
def test_faults_that_there_are_not_are_refused(text, sentence):
    with pytest.raises(InputError) as told:
        Byzantine.parse(text)
    assert sentence in str(told.value)


def test_faults_are_read():
    assert Byzantine.parse("2:sign-flip") == Byzantine(2, "sign-flip", 10.0)
    assert Byzantine.parse("1:random:0.5") == Byzantine(1, "random", 0.5)


@pytest.mark.parametrize(
    ("name", "count", "sentence"),
    [
        ("easgd", 1, "the replicas of plan 'easgd' hand no gradients over, so none can be faulty; use preset:ddp"),
        ("model-parallel", 1, "the replicas of plan 'model-parallel' hand no gradients over"),
        ("ddp", 3, "3 replicas are to be faulty and plan 'ddp' has 2; name fewer"),
    ],
)
def test_plans_whose_replicas_cannot_be_faulty_are_refused(make, name, count, sentence):
    case = make(name, workers=2, extra={"byzantine": Byzantine(count, "scale")})
    with pytest.raises(InputError) as told:
        run_threads(case.program, case.job, case.batches)
    assert sentence in str(told.value)
