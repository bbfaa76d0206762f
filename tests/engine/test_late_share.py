"""Late shares against a plain loop of PyTorch, their replay, synchronous training, and mutants of the engine."""

import copy

import pytest
import torch

from pipedejavu.analysis import verify
from pipedejavu.engine import AdamW, Applied, Byzantine, Read, Sgd, applier, audit, run_threads
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import InputError
from pipedejavu.plan import Feed, Order, Place, Version
from pipedejavu.program import ActionKind
from pipedejavu.simulate import simulate
from tests.engine.case import sum_of_losses, torch_optimizer

FEED = Feed(kind="share", microbatches=5, shares=(0.6, 0.4))
"""Three microbatches of an update for the pipeline, two for the CPU."""
LATE, LATER = Version(kind="late"), Version(kind="late", delay=2)
PREDICTED = Version(kind="late", correction="weight-prediction")
COMPENSATED = Version(kind="late", correction="delay-compensation", compensation=2.0)
SGD, ADAMW = Sgd(lr=0.1, momentum=0.9), AdamW(lr=0.01, eps=0.01)


def late(make, model="mlp", version=LATE, workers=1, steps=4, **more):
    return make("late-share", model, workers=workers, steps=steps, feed=FEED, version=version, **more)


def gradients(case, weights, microbatches):
    """Returns the gradients of the summed loss of some microbatches at given weights, by a copy of the model."""
    modules = copy.deepcopy([module for _, module in case.units])
    parameters = list({id(p): p for m in modules for p in m.parameters()}.values())
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    for i in microbatches:
        sum_of_losses(case.forward(modules, i), case.batches.targets(i)).backward()
    return [p.grad for p in parameters]


def plain_loop(case):
    """Trains as docs/algorithms/hybrid.md says: late samples at older weights, all samples of an update in one mean."""
    version, size, steps = case.plan.version, case.program.update_size, case.plan.steps
    modules = copy.deepcopy([module for _, module in case.units])
    names = [name for name, _ in case.units]
    named = {f"{u}.{n}": p for u, m in zip(names, modules, strict=True) for n, p in m.named_parameters()}
    parameters = list({id(p): p for m in modules for p in m.parameters()}.values())
    stepper, _ = torch_optimizer(case.optimizer, named)
    history = [[p.detach().clone() for p in parameters]]
    for t in range(case.updates):
        batch = range(t * size, (t + 1) * size)
        count = sum(case.batches.count(i) for i in batch)
        old = max(t - version.delay, t // steps * steps)  # a round begins with nothing under way
        read = history[old]
        if version.correction == "weight-prediction" and old:
            pairs = zip(read, history[old - 1], strict=True)
            read = [w + (t - old) * (w - before) for w, before in pairs]
        own, share = gradients(case, history[t], batch[:3]), gradients(case, read, batch[3:])
        if version.correction == "delay-compensation":
            n = sum(case.batches.count(i) for i in batch[3:])
            rows = zip(share, history[t], read, strict=True)
            share = [n * (g / n + version.compensation * (g / n) ** 2 * (now - then)) for g, now, then in rows]
        for parameter, a, b in zip(parameters, own, share, strict=True):
            parameter.grad = (a + b) / count
        if case.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, case.clip_norm)
        stepper.step()
        history.append([p.detach().clone() for p in parameters])
    return {name: p.detach() for name, p in named.items()}


def name_of(value: object) -> str:
    """Returns a name for a case that is the same in every process."""
    return "-".join(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(
    ("model", "version", "more"),
    [
        ("mlp", LATE, {"optimizer": SGD}),
        ("mlp", LATER, {"optimizer": SGD, "rounds": 2}),
        ("mlp", PREDICTED, {"optimizer": SGD, "workers": 3, "rounds": 2}),
        ("mlp", COMPENSATED, {"optimizer": SGD, "workers": 2}),
        ("convnet", COMPENSATED, {"optimizer": ADAMW, "rounds": 2}),
        ("convnet", LATE, {"optimizer": ADAMW, "clip": "global", "clip_norm": 0.05}),
        ("mlp", COMPENSATED, {"optimizer": SGD, "clip": "global", "clip_norm": 0.05}),
        ("gpt", LATE, {"optimizer": ADAMW, "workers": 2}),
        ("gpt", PREDICTED, {"optimizer": ADAMW, "workers": 2, "rounds": 2}),
    ],
    ids=name_of,
)
def test_a_late_share_equals_the_plain_loop_and_its_replay(make, model, version, more):
    case = late(make, model, version, **more)
    verify(case.program)
    expected = plain_loop(case)
    assert case.furthest(expected) <= 1e-12
    assert case.audit() <= case.tolerance
    synchronous = case.trained_plainly()
    assert max(float((w - synchronous[n]).abs().max()) for n, w in expected.items()) > 1e-6  # the delay matters


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("hyscale", {"workers": 2, "version": COMPENSATED}),
        ("late-share", {"workers": 2, "order": Order(kind="gpipe", recompute=1.0)}),
        ("late-share", {"place": Place(replicas=2, cpu_replicas=2), "version": COMPENSATED,
                        "feed": Feed(kind="share", microbatches=5, shares=(0.2, 0.4, 0.2, 0.2))}),
        ("late-share", {"workers": 1, "feed": FEED, "clip": "delayed", "clip_norm": 0.05}),
    ],
    ids=name_of,
)  # fmt: skip
def test_late_shares_of_other_plans_equal_their_replay(make, name, more):
    case = make(name, steps=4, rounds=2, **{"version": LATE} | more)
    verify(case.program)
    assert any(case.program.delays)
    assert case.audit() <= case.tolerance


def test_faults_are_not_injected_into_shares_that_are_compensated(make):
    case = late(make, version=COMPENSATED, extra={"byzantine": Byzantine.parse("1:sign-flip")})
    with pytest.raises(InputError, match="compensates late shares, and the replay of a fault does not"):
        case.outcome.weights  # noqa: B018
    assert late(make, extra={"byzantine": Byzantine.parse("1:sign-flip")}).audit() < 1e-12


def test_replicas_end_with_equal_bits(make):
    for version in (LATE, PREDICTED, COMPENSATED):
        weights = late(make, version=version, workers=1).outcome.weights
        for (piece, replica), tensors in weights.items():
            if replica == 1:
                assert all(torch.equal(w, weights[piece, 0][name]) for name, w in tensors.items())


@pytest.mark.parametrize("correction", ["none", "weight-prediction", "delay-compensation"])
def test_without_delay_it_is_the_synchronous_plan_bit_for_bit(make, correction):
    none = late(make, version=Version(kind="late", delay=0, correction=correction), workers=2)
    sync = late(make, version=Version(), workers=2)
    sync.units = none.units
    assert none.program.to_text() == sync.program.to_text()
    for key, tensors in none.outcome.weights.items():
        assert all(torch.equal(w, sync.outcome.weights[key][name]) for name, w in tensors.items())


def test_every_gradient_is_applied_once_and_no_read_is_older_than_the_delay(make):
    case = late(make, version=LATER, rounds=2, steps=5)
    events = [event for log in case.outcome.logs for event in log.events]
    fed = [i for e in events if isinstance(e, Applied) and (e.piece, e.replica) == (0, 0) for i in e.microbatches]
    assert fed == [*range(50)]
    late_reads = [e for e in events if isinstance(e, Read) and e.replica == 1 and e.piece == 0]
    assert [e.microbatch // 5 - e.version for e in late_reads[::2]] == [0, 1, 2, 2, 2] * 2
    assert all(e.microbatch // 5 == e.version for e in events if isinstance(e, Read) and e.replica == 0)
    assert max(log.peak_versions for log in case.outcome.logs) == 1  # no stash: only gradients wait


def test_two_runs_are_equal_to_the_bit(make):
    case = late(make, "convnet", COMPENSATED)
    again = run_threads(case.program, case.job, case.batches)
    for key, tensors in case.outcome.weights.items():
        assert all(torch.equal(w, again.weights[key][name]) for name, w in tensors.items())


@pytest.mark.parametrize("version", [LATE, PREDICTED, COMPENSATED], ids=str)
def test_a_run_goes_on_from_a_checkpoint_as_if_never_stopped(make, version):
    case = late(make, version=version, optimizer=SGD, rounds=2)
    first = Threads(case.program, case.job, case.batches)
    first.run()
    second = Threads(case.program, case.job, case.batches)
    put_all(second, first.updates, take_all(first).get)
    second.run()
    for key, tensors in second.outcome().weights.items():
        assert all(torch.equal(w, case.outcome.weights[key][name]) for name, w in tensors.items())


# The program and its forecast.


def late_positions(case):
    """Returns the late worker's forwards and updates, as 'F' or 'U' with the number of the update."""
    size, texts = case.program.update_size, []
    for a in case.program.workers[-1].actions:
        if a.piece == 0 and a.kind == ActionKind.FORWARD and a.microbatch % size == 3:
            texts.append(f"F{a.microbatch // size}")
        if a.piece == 0 and a.kind == ActionKind.UPDATE:
            texts.append(f"U{a.version}")
    return " ".join(texts)


def test_the_late_worker_is_ahead_of_the_updates_by_the_delay(make):
    assert late_positions(late(make)) == "F0 F1 U1 F2 U2 F3 U3 U4"
    assert late_positions(late(make, version=LATER, steps=5)) == "F0 F1 F2 U1 F3 U2 F4 U3 U4 U5"
    assert late_positions(late(make, version=COMPENSATED)) == "F0 F1 U1 F2 U2 F3 U3 U4"


@pytest.mark.parametrize(("version", "versions"), [(LATE, 1), (PREDICTED, 1), (COMPENSATED, 2)], ids=str)
def test_the_forecast_has_no_waits_and_counts_what_is_kept(make, version, versions):
    case = late(make, version=version, steps=6, units=2)
    made = simulate(case.program)
    assert [w.weight_versions for w in made.workers] == [1, versions]
    # Three microbatches of two units take 18; the CPU's two take 12, and are never waited for.
    assert made.makespan_s == pytest.approx(6 * 18)
    sizes = [late(make, version=v, steps=6, units=2).program for v in (LATE, LATER)]
    one, two = (simulate(program).workers[1].peak_bytes for program in sizes)
    assert two - one == sum(unit.gradient_bytes for unit in case.program.profile.units)


def test_a_cpu_that_has_all_samples_is_not_late(make):
    feed = Feed(kind="share", microbatches=3, shares=(0.0, 1.0))
    case = make("late-share", workers=1, steps=3, feed=feed)
    assert case.furthest(case.trained_plainly()) <= case.tolerance


# Mutants.


@pytest.mark.parametrize(
    ("version", "name", "change"),
    [
        (PREDICTED, "extrapolate", lambda sound: lambda w, s, updates: sound(w, s, updates + 1)),
        (PREDICTED, "add_to_velocity", lambda sound: lambda s, old, new, d: sound(s, new, old, d)),
        (COMPENSATED, "compensate", lambda _: lambda summed, *_others: summed),
        (COMPENSATED, "compensate", lambda sound: lambda g, now, then, s, c: sound(g, then, now, s, c)),
        (COMPENSATED, "compensate", lambda sound: lambda g, now, then, s, c: sound(g, now, then, s, c / 2)),
    ],
)
def test_a_wrong_correction_is_caught(make, monkeypatch, version, name, change):
    case = late(make, version=version, optimizer=SGD)
    assert case.audit() <= case.tolerance
    monkeypatch.setattr(applier, name, change(getattr(applier, name)))
    mutant = run_threads(case.program, case.job, case.batches)
    assert max(audit(case.program, case.job, case.batches, mutant).values()) > 1e-7


def test_a_late_forward_that_reads_other_weights_is_refused(make):
    case = late(make)
    events = next(log for log in case.outcome.logs if any(e.replica == 1 for e in log.events)).events
    at = next(n for n, e in enumerate(events) if isinstance(e, Read) and e.microbatch == 13)
    events[at] = events[at]._replace(version=events[at].version + 1)
    with pytest.raises(InputError, match="read version 2 where the plan promises 1 to 1"):
        case.audit()
