"""An engine that is changed on purpose is caught: every mutation changes weights, and the audit says so.

Each mutation is a patch of one method of the engine. `caught` runs the case with and without it, checks that the
weights differ, and returns what the audit says of the mutant: a difference, or its refusal of the log.
"""

import copy
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from pipedejavu.engine import AdamW, Applied, Outcome, Sgd, audit, run_threads, summed_piece
from pipedejavu.engine.applier import Applier
from pipedejavu.engine.global_norm import GlobalNorm
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.wire import ThreadWire
from pipedejavu.facts import InputError
from pipedejavu.plan import Order, preset

FAR = 1e-7
"""Far beyond rounding: differences that mutations make are larger."""


def caught(case, monkeypatch, target, name, change):
    """Returns the audit's largest difference of a mutant; `change` takes the method and returns another."""
    sound = case.outcome
    assert case.audit() <= case.tolerance
    with monkeypatch.context() as patch:
        patch.setattr(target, name, change(getattr(target, name)))
        mutant = run_threads(case.program, case.job, case.batches)
    assert difference(sound, mutant) > FAR, "the mutation changes nothing"
    return max(audit(case.program, case.job, case.batches, mutant).values())


def difference(one: Outcome, other: Outcome) -> float:
    return max(
        float((weight - other.weights[home][n]).abs().max())
        for home, weights in one.weights.items()
        for n, weight in weights.items()
    )


def stale(forward):
    """Reads the first weights instead of the second."""

    def run(self, a, keeps_buffers):
        key = ("w", a.piece, a.replica, a.version, "")
        right = self.values[key]
        if a.piece == 0 and a.version == 1:
            first = self.runners[a.piece, a.replica].initial
            self.values[key] = {n: w.clone().requires_grad_() for n, w in first.items()}
        try:
            return forward(self, a, keeps_buffers)
        finally:
            self.values[key] = right

    return run


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "pipedream-2bw", "parameter-server"])
def test_a_stale_read_that_is_not_logged(make, monkeypatch, name):
    case = make(name, workers=2, microbatches=4, steps=3)
    assert caught(case, monkeypatch, Handlers, "_run_piece", stale) > FAR


def test_a_stale_read_that_is_logged(make, monkeypatch):
    case = make("1f1b", workers=2, microbatches=3, steps=3)

    def stale_and_honest(forward):
        def run(self, a):
            forward(self, a)
            if a.version == 1:
                self.log.events[-1] = self.log.events[-1]._replace(version=0)

        return lambda self, a: run(self, a)

    with monkeypatch.context() as patch:
        patch.setattr(Handlers, "_run_piece", stale(Handlers._run_piece))
        patch.setattr(Handlers, "forward", stale_and_honest(Handlers.forward))
        mutant = run_threads(case.program, case.job, case.batches)
    assert difference(case.outcome, mutant) > FAR
    with pytest.raises(InputError, match="the run read version 0 where the plan promises 1 to 1"):
        audit(case.program, case.job, case.batches, mutant)


@pytest.mark.parametrize(("name", "size"), [("ddp", {}), ("gpipe", {"replicas": 2}), ("chimera", {}), ("coarse", {})])
def test_a_missing_reduce(make, monkeypatch, name, size):
    case = make(name, workers=2, microbatches=4, **size)

    def alone(add_up):
        def run(self, tensor, group):
            total = add_up(self, tensor, group)
            return tensor.clone() if group == "s0" else total

        return run

    assert caught(case, monkeypatch, ThreadWire, "add_up", alone) > FAR


def test_a_coefficient_that_is_applied_wrong_and_logged_right(make, monkeypatch):
    case = make("1f1b", workers=2, microbatches=3)

    def too_large(updated):
        def run(self, home, update, base, summed):
            return updated(self, home, update, base, {n: 1.01 * g for n, g in summed.items()})

        return run

    assert caught(case, monkeypatch, Applier, "_updated", too_large) > FAR


def test_a_coefficient_that_is_applied_and_logged_wrong(make, monkeypatch):
    case = make("1f1b", workers=2, microbatches=3)
    expected = re.escape("the run gave gradients a coefficient other than")
    with pytest.raises(InputError, match=expected):
        caught(case, monkeypatch, Applier, "_coefficient", lambda right: lambda *a: 1.01 * right(*a))


def test_a_coefficient_that_is_logged_wrong_alone(make):
    case = make("1f1b", workers=2, microbatches=3)
    logs = copy.deepcopy(case.outcome.logs)
    at = next(n for n, event in enumerate(logs[0].events) if isinstance(event, Applied))
    logs[0].events[at] = logs[0].events[at]._replace(coefficient=0.5)
    with pytest.raises(InputError, match="the run gave gradients a coefficient other than"):
        audit(case.program, case.job, case.batches, Outcome(case.outcome.weights, logs, ()))


@pytest.mark.parametrize(("clip", "name"), [("global", "1f1b"), ("delayed", "pipedream-2bw")])
def test_a_norm_that_lacks_a_stage(make, monkeypatch, clip, name):
    """The coefficient is logged as it was applied, and smaller than what is promised at most; still it is wrong."""
    case = make(name, workers=2, microbatches=3, clip=clip, clip_norm=0.01, steps=3)

    def partial(square):
        def run(self, update):
            return square(self, update) * (self.index == 0)

        return run

    with pytest.raises(InputError, match="the run clipped by another norm"):
        caught(case, monkeypatch, GlobalNorm, "_square", partial)


@pytest.mark.parametrize("shares", [(0.8, 0.2), (0.5, 0.5)])
def test_the_mean_of_means_under_uneven_shares(make, monkeypatch, shares):
    """Even with as many microbatches on both sides their samples differ in number."""
    feed = preset("coarse").plan.feed.replace(microbatches=4, shares=shares)
    case = make("coarse", workers=2, feed=feed, sizes=(2, 3, 4, 7))
    counts = Counter()
    whole = Counter()
    for worker in case.program.workers:
        for a in worker.actions:
            if a.kind == "B" and a.piece == 0:
                counts[a.replica, a.microbatch // 4] += case.batches.count(a.microbatch)
                whole[a.microbatch // 4] += case.batches.count(a.microbatch)

    def means(reduce):
        def run(self, a):
            if a.what == "d":
                own = counts[a.replica, a.version]
                factor = whole[a.version] / (2 * own)
                value = self.values["d", a.piece, a.replica, a.version, ""]
                self.values["d", a.piece, a.replica, a.version, ""] = {n: g * factor for n, g in value.items()}
            reduce(self, a)

        return lambda self, a: run(self, a)

    assert caught(case, monkeypatch, Handlers, "reduce", means) > FAR


@pytest.mark.parametrize("name", ["gpipe", "ddp", "pipedream-2bw", "zb-h1"])
def test_a_microbatch_whose_gradient_is_left_out(make, monkeypatch, name):
    case = make(name, workers=2, microbatches=3, steps=2)

    def without(needed):
        def run(self, a):
            saved, gradients = needed(self, a)
            return saved, tuple(g * (a.microbatch != 1) for g in gradients)

        return run

    assert caught(case, monkeypatch, Handlers, "_needed", without) > FAR


def test_a_microbatch_that_is_left_out_and_logged_so(make, monkeypatch):
    case = make("gpipe", workers=2, microbatches=3, steps=2)

    def fewer(members):
        return lambda self, replica, update: members(self, replica, update)[:-1]

    with pytest.raises(InputError, match=re.escape("other microbatches than (0, 1, 2)")):
        caught(case, monkeypatch, Applier, "_microbatches", fewer)


@pytest.mark.parametrize("name", ["1f1b", "parameter-server"])
def test_an_update_that_is_left_out_and_not_logged(make, name):
    case = make(name, workers=2, microbatches=3, steps=3)
    logs = copy.deepcopy(case.outcome.logs)
    for log in logs:
        lasts = [n for n, event in enumerate(log.events) if isinstance(event, Applied)]
        if lasts:
            del log.events[lasts[-1]]
    with pytest.raises(InputError, match=re.escape("not 1 to 3 in order")):
        audit(case.program, case.job, case.batches, Outcome(case.outcome.weights, logs, ()))


@pytest.mark.parametrize("optimizer", [Sgd(lr=0.3, momentum=0.9), AdamW(lr=0.05)])
def test_two_updates_of_a_server_in_another_order_than_logged(make, optimizer):
    """Weights that were made in one order are no other order's."""
    case = make("parameter-server", workers=2, microbatches=4, optimizer=optimizer)
    assert case.audit() == 0.0
    logs = copy.deepcopy(case.outcome.logs)
    events = logs[-1].events
    at = next(n for n in range(len(events) - 1) if events[n].replica != events[n + 1].replica)
    events[at], events[at + 1] = events[at + 1], events[at]
    swapped = Outcome(case.outcome.weights, logs, ())
    assert max(audit(case.program, case.job, case.batches, swapped).values()) > FAR


def test_a_server_that_takes_a_push_twice(make, monkeypatch):
    case = make("parameter-server", workers=2, microbatches=4)

    def twice(update):
        def run(self, a):
            update(self, a)
            if a.version == 2:
                cell = self.values["w", a.piece, self.center, 0, ""]
                for weight in cell.values():
                    weight.data.mul_(1.01)

        return lambda self, a: run(self, a)

    assert caught(case, monkeypatch, Applier, "_on_server", twice) > FAR


@pytest.mark.parametrize("name", ["gpipe-recompute", "hippie"])
def test_a_recompute_with_other_masks(make, monkeypatch, name):
    case = make(name, "gpt", workers=2, microbatches=3)

    def otherwise(forward):
        def run(self, weights, value, microbatch, keeps_buffers=False, **options):
            return forward(self, weights, value, microbatch + 1000 * keeps_buffers, keeps_buffers, **options)

        return run

    assert caught(case, monkeypatch, PieceRunner, "forward", otherwise) > FAR


def test_a_recompute_of_some_units_with_other_masks(make, monkeypatch):
    case = make("gpipe", "gpt", workers=2, microbatches=3, order=Order(kind="gpipe", recompute_units=(1, 2)))

    def otherwise(forward_again):
        return lambda self, weights, saved, microbatch, *rest: forward_again(
            self, weights, saved, microbatch + 1000, *rest
        )

    assert caught(case, monkeypatch, PieceRunner, "forward_again", otherwise) > FAR


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "chimera", "ddp"])
def test_tied_gradients_that_are_not_summed(make, monkeypatch, name):
    case = make(name, "gpt", workers=2, microbatches=4)
    assert any(group.startswith("tie") for group in case.program.groups)
    assert caught(case, monkeypatch, summed_piece, "_reduce_tied", lambda _: lambda *_: None) > FAR


def test_ties_that_the_profile_does_not_know(make):
    """Without a tie in the profile the program has no reduce for it: pieces would train copies apart."""
    case = make("1f1b", "calm-gpt", workers=2, microbatches=3)
    whole = case.program
    sequences = [tuple(a for a in w.actions if not a.via.startswith("*tie")) for w in whole.workers]
    case.program = replace(whole.with_actions(sequences), profile=whole.profile.model_copy(update={"ties": ()}))
    assert case.audit() > FAR


@pytest.mark.parametrize("name", ["easgd", "easgd-sync"])
def test_a_centre_that_moves_before_the_workers(make, monkeypatch, name):
    """Gauss–Seidel: with new values of the worker on the right side, the sum of all weights is not conserved."""
    case = make(name, workers=2, microbatches=3)

    def later(pull):
        def run(self, home, update, base, deltas):
            found = dict(deltas)
            moved = {n: (w.detach() + found[n]).requires_grad_() for n, w in base.items()}
            return pull(self, home, update, moved, iter(found.items()))

        return run

    assert caught(case, monkeypatch, Applier, "_pulled", later) > FAR


def test_a_wave_that_counts_a_worker_s_own_push_again(make, monkeypatch):
    case = make("hetpipe", workers=2, microbatches=10)

    def again(pull):
        def run(self, home, version, wave):
            self.pushed[home][wave] = {n: torch.zeros_like(t) for n, t in self.pushed[home][wave].items()}
            pull(self, home, version, wave)

        return run

    assert caught(case, monkeypatch, Applier, "pull", again) > FAR


def test_an_optimizer_whose_state_starts_anew(make, monkeypatch):
    case = make("1f1b", workers=2, microbatches=3, steps=3, optimizer=Sgd(lr=0.1, momentum=0.9))

    def forgetful(updated):
        def run(self, home, update, base, summed):
            self.state.clear()
            return updated(self, home, update, base, summed)

        return run

    assert caught(case, monkeypatch, Applier, "_updated", forgetful) > FAR


def test_hogwild_has_nothing_to_replay(make):
    case = make("hogwild", workers=2, microbatches=2)
    with pytest.raises(InputError, match="version 'torn' of plan 'hogwild' records no versions"):
        case.audit()


def test_a_log_that_nothing_can_follow(make):
    case = make("1f1b", workers=2, microbatches=2)
    logs = copy.deepcopy(case.outcome.logs)
    del logs[1].events[0]
    with pytest.raises(InputError, match="the log cannot be replayed"):
        audit(case.program, case.job, case.batches, Outcome(case.outcome.weights, logs, ()))
