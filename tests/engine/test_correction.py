"""Corrections of stale weights against plain loops written from the papers' definitions, and mutants of the engine.

The plain loops differentiate an MLP by hand: its stages are a linear layer and a tanh, the last one a linear layer.
"""

import gc
import math
import weakref
from itertools import pairwise

import pytest
import torch

from pipedejavu.analysis import verify
from pipedejavu.engine import AdamW, Applied, Sgd, applier, audit, correction, run_threads
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.staleness import ReboundWeights
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import FaultsError, InputError
from pipedejavu.plan import Feed, Order, Version, preset
from pipedejavu.program import ActionKind
from pipedejavu.simulate import simulate

RATE, MOMENTUM = 0.1, 0.9
SGD = Sgd(lr=RATE, momentum=MOMENTUM)
FAR = 1e-7
"""Far beyond rounding."""
STASHED = [
    Version(kind="stash", correction="weight-prediction"),
    Version(kind="stash", correction="weight-prediction", decay=0.5),
    Version(kind="stash", correction="discrepancy"),
    Version(kind="stash", correction="discrepancy", decay=0.3, rate_updates=6),
    Version(kind="stash", correction="delay-compensation", compensation=2.0),
    Version(kind="stash", rate_updates=6),
]


def weights_of(case):
    """Returns (weight, bias) of each stage of the MLP."""
    modules = [module[0] if isinstance(module, torch.nn.Sequential) else module for _, module in case.units]
    return [(m.weight.detach().clone(), m.bias.detach().clone()) for m in modules]


def gradients(case, i, forward, backward):
    """Returns the mean gradients of a microbatch by hand; the backward multiplies by other weights than the forward."""
    x, y = case.batches.inputs(i), case.batches.targets(i)
    inputs, last = [x], len(forward) - 1
    for s, (w, b) in enumerate(forward):
        z = inputs[-1] @ w.T + b
        inputs.append(z if s == last else torch.tanh(z))
    passed = (torch.softmax(inputs[-1], -1) - torch.nn.functional.one_hot(y, 3)) / len(y)
    found = []
    for s in range(last, -1, -1):
        if s < last:
            passed = passed * (1 - inputs[s + 1] ** 2)
        found.append((passed.T @ inputs[s], passed.sum(0)))
        passed = passed @ backward[s][0]
    return found[::-1]


def plain_pipeline(case):
    """Trains as the papers say: stage s of p reads for microbatch i the version i − (p − 1 − s), or the first.

    Under 'vertical' and 'double-buffer' all stages read alike. Flushed updates read the newest version, and the first
    after them begin with the version that the last flush left.
    """
    version, p, count = case.plan.version, len(case.units), len(case.batches.counts)
    history = [[w] for w in weights_of(case)]
    momentum = [[tuple(torch.zeros_like(t) for t in w)] for w in weights_of(case)]
    velocity = [tuple(torch.zeros_like(t) for t in w) for w in weights_of(case)]
    decay = {"weight-prediction": 0.0, "discrepancy": 0.135}.get(version.correction)
    decay = version.decay if version.decay is not None else decay
    for i in range(count):
        stale = max(0, i - version.flushed_updates)
        lags = {"vertical": [p - 1] * p, "double-buffer": [1] * p}.get(version.kind, [p - 1 - s for s in range(p)])
        late = [min(stale, lag) for lag in lags]
        read = [history[s][i - late[s]] for s in range(p)]
        forward = backward = read
        if version.correction == "weight-prediction" and not decay:  # SpecTrain: W − s·η·v
            forward = backward = [
                tuple(w - late[s] * RATE * v for w, v in zip(read[s], momentum[s][i - late[s]], strict=True))
                for s in range(p)
            ]
        elif version.correction == "weight-prediction":
            forward = backward = [smoothed(history[s][: i - late[s] + 1], decay ** (1 / max(1, p - 1 - s)), late[s])
                                  for s in range(p)]  # fmt: skip
        elif version.correction == "discrepancy":  # PipeMare T2: u_bkwd = w − Δτ·δ
            backward = [
                tuple(w - late[s] * v for w, v in zip(history[s][i], velocity[s], strict=True)) for s in range(p)
            ]
        for s, gradient in enumerate(gradients(case, i, forward, backward)):
            newest = history[s][i]
            if version.correction == "delay-compensation":
                gradient = tuple(
                    g + version.compensation * g * g * (now - then)
                    for g, now, then in zip(gradient, newest, read[s], strict=True)
                )
            rate = RATE
            if version.rate_updates and p - 1 - s > 1 and i >= version.flushed_updates:  # PipeMare T1
                rate /= (p - 1 - s) ** (1 - min(stale / version.rate_updates, 1))
            buffers = tuple(MOMENTUM * m + g for m, g in zip(momentum[s][i], gradient, strict=True))
            made = tuple(w - rate * m for w, m in zip(newest, buffers, strict=True))
            momentum[s].append(buffers)
            history[s].append(made)
            share = decay ** (1 / (p - 1 - s)) if decay and s < p - 1 else 0.0
            velocity[s] = tuple(
                share * v + (1 - share) * (new - old) for v, new, old in zip(velocity[s], made, newest, strict=True)
            )
    return [history[s][-1] for s in range(p)]


def smoothed(versions, decay, late):
    """Returns the last version plus `late` times the smoothed difference of all versions."""
    velocity = [torch.zeros_like(t) for t in versions[0]]
    for old, new in pairwise(versions):
        velocity = [decay * v + (1 - decay) * (b - a) for v, a, b in zip(velocity, old, new, strict=True)]
    return tuple(w + late * v for w, v in zip(versions[-1], velocity, strict=True))


def furthest(case, weights, expected):
    """Returns the largest difference between trained weights and those of the plain loop."""
    named = {n: t for tensors in weights.values() for n, t in tensors.items()}
    layers = {unit: "0." if isinstance(module, torch.nn.Sequential) else "" for unit, module in case.units}
    pairs = [
        (named[f"{unit}.{layer}{part}"], tensor)
        for (unit, layer), tensors in zip(layers.items(), expected, strict=True)
        for part, tensor in zip(("weight", "bias"), tensors, strict=True)
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("version", STASHED, ids=str)
def test_a_corrected_pipeline_equals_the_plain_loop_and_its_replay(make, version):
    case = make("pipedream", workers=4, microbatches=10, units=4, version=version, optimizer=SGD)
    verify(case.program)
    expected = plain_pipeline(case)
    assert furthest(case, case.outcome.weights, expected) <= 1e-12
    assert case.audit() <= case.tolerance
    plain = make("pipedream", workers=4, microbatches=10, units=4, optimizer=SGD)
    plain.units = case.units
    assert furthest(plain, plain.outcome.weights, expected) > 1e-6  # the correction does something


@pytest.mark.parametrize("version", [*STASHED, Version(kind="stash"), Version(kind="vertical")], ids=str)
def test_a_warm_up_with_a_flush_equals_the_plain_loop_across_the_switch(make, version):
    flushed = version.replace(flushed_updates=4)
    name = "pipedream-vertical" if version.kind == "vertical" else "pipedream"
    case = make(name, workers=4, microbatches=12, units=4, version=flushed, optimizer=SGD)
    verify(case.program)
    assert furthest(case, case.outcome.weights, plain_pipeline(case)) <= 1e-12
    assert case.audit() <= case.tolerance
    never = make(name, workers=4, microbatches=12, units=4, version=version, optimizer=SGD)
    never.units = case.units
    assert furthest(case, never.outcome.weights, plain_pipeline(case)) > 1e-6  # the flushes do something
    exact = make(name, workers=4, microbatches=12, units=4, version=version.replace(flushed_updates=50), optimizer=SGD)
    exact.units = case.units
    assert exact.furthest(exact.trained_plainly()) <= 1e-12  # without a stale update nothing is corrected


def test_two_buffered_versions_after_a_warm_up_equal_the_plain_loop(make):
    version = Version(kind="double-buffer", flushed_updates=3)
    case = make("pipedream-2bw", workers=2, microbatches=1, steps=8, units=2, version=version, optimizer=SGD)
    assert furthest(case, case.outcome.weights, plain_pipeline(case)) <= 1e-12
    several = make("pipedream-2bw", workers=3, microbatches=4, steps=6, version=version)
    assert several.audit() <= several.tolerance


@pytest.mark.parametrize("version", [STASHED[5], Version(kind="stash")], ids=str)
def test_a_warm_up_equals_a_synchronous_run_that_goes_on_without_a_flush(make, version):
    case = make("pipedream", workers=3, microbatches=10, units=3, optimizer=SGD,
                version=version.replace(flushed_updates=4))  # fmt: skip
    exact = make("model-parallel", workers=3, microbatches=1, steps=4, units=3, optimizer=SGD)
    rest = make("pipedream", workers=3, microbatches=6, units=3, optimizer=SGD, first_update=4,
                version=version.replace(flushed_updates=4))  # fmt: skip
    exact.units = rest.units = case.units
    first = Threads(exact.program, exact.job, case.batches)
    first.run()
    second = Threads(rest.program, rest.job, case.batches)
    put_all(second, 4, take_all(first).get)
    second.run()
    for key, weights in second.outcome().weights.items():
        assert all(torch.equal(weight, case.outcome.weights[key][n]) for n, weight in weights.items())
    with pytest.raises(InputError, match="first 4 updates of a run: 4 of the 6 from update 0 on, where its program fl"):
        Threads(rest.program, rest.job, case.batches).run()


def test_delay_compensation_on_a_server_equals_the_plain_loop(make):
    version = Version(kind="local", correction="delay-compensation", compensation=2.0)
    optimizer = SGD
    case = make("parameter-server", workers=3, microbatches=4, units=3, version=version, optimizer=optimizer)
    applied = [event for log in case.outcome.logs for event in log.events if isinstance(event, Applied)]
    newest = weights_of(case)
    pulled = dict.fromkeys(range(3), newest)
    buffers = [tuple(torch.zeros_like(t) for t in w) for w in newest]
    for event in applied:
        (i,), made = event.microbatches, []
        read = pulled[event.replica]
        for s, gradient in enumerate(gradients(case, i, read, read)):
            pairs = zip(gradient, newest[s], read[s], strict=True)
            g = [g + 2.0 * g * g * (now - then) for g, now, then in pairs]
            buffers[s] = tuple(MOMENTUM * m + part for m, part in zip(buffers[s], g, strict=True))
            made.append(tuple(w - RATE * m for w, m in zip(newest[s], buffers[s], strict=True)))
        newest = pulled[event.replica] = made
    assert len(applied) == 12
    server = {key: tensors for key, tensors in case.outcome.weights.items() if key[1] == 3}
    assert furthest(case, server, newest) <= 1e-12
    assert case.audit() <= case.tolerance


@pytest.mark.parametrize("model", ["convnet", "gpt"])
@pytest.mark.parametrize("version", STASHED[:3], ids=str)
def test_corrections_of_other_models_over_several_rounds_equal_their_replay(make, model, version):
    optimizer = AdamW(lr=0.01, eps=0.01)
    case = make("pipedream", model, workers=3, microbatches=6, rounds=2, version=version, optimizer=optimizer)
    assert case.audit() <= case.tolerance
    assert case.moved() > 1e3 * case.tolerance


@pytest.mark.parametrize("name", ["pipedream-2bw", "pipedream-vertical"])
def test_delay_compensation_of_other_versions_equals_its_replay(make, name):
    version = Version(kind=preset(name).plan.version.kind, correction="delay-compensation", compensation=2.0)
    case = make(name, "convnet", workers=3, microbatches=4, steps=4, rounds=2, version=version)
    assert case.audit() <= case.tolerance
    assert case.moved() > 1e6 * case.tolerance


def test_replicated_pipelines_predict_weights_alike(make):
    version = Version(kind="stash", correction="weight-prediction")
    case = make(
        "pipedream", workers=3, replicas=2, microbatches=6, version=version, feed=Feed(kind="microbatch"), steps=6
    )
    assert case.audit() <= case.tolerance


# Checkpoints.


@pytest.mark.parametrize(
    ("name", "version"),
    [("pipedream", STASHED[0]), ("pipedream", STASHED[2]),
     ("parameter-server", Version(kind="local", correction="delay-compensation", compensation=2.0))],
    ids=str,
)  # fmt: skip
def test_a_run_goes_on_with_its_velocities_and_pulled_weights(make, name, version):
    workers = 3 if name == "pipedream" else 1  # the order of pushes of several workers depends on timing
    case = make(name, workers=workers, microbatches=6, rounds=2, version=version, optimizer=SGD)
    first = Threads(case.program, case.job, case.batches)
    first.run()
    state = take_all(first)
    assert any("state/velocity/" in key for key in state) == (version.correction != "delay-compensation")
    second = Threads(case.program, case.job, case.batches)
    put_all(second, first.updates, state.get)
    second.run()
    for key, weights in second.outcome().weights.items():
        assert all(torch.equal(weight, case.outcome.weights[key][n]) for n, weight in weights.items())
    without = {key: tensor for key, tensor in state.items() if "velocity" not in key}
    third = Threads(case.program, case.job, case.batches)
    put_all(third, first.updates, without.get)  # a checkpoint of another plan has none


def test_a_plan_without_correction_goes_on_from_a_checkpoint_with_velocities(make):
    case = make("pipedream", workers=3, microbatches=6, version=STASHED[0])
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    plain = make("pipedream", workers=3, microbatches=6)
    plain.units = case.units
    other = Threads(plain.program, plain.job, plain.batches)
    put_all(other, threads.updates, take_all(threads).get)
    assert not any("velocity" in key for key in take_all(other))


# Memory and time.


def test_without_a_stash_old_weights_are_freed_although_backwards_are_due():
    weights = {"w": torch.randn(4, 3, requires_grad=True)}
    x = torch.randn(2, 3)
    with (rebound := ReboundWeights(weights)):
        y = torch.tanh(torch.tanh(x) @ rebound.linked(weights)["w"].T).sum()
    gone = weakref.ref(weights.pop("w"))
    gc.collect()
    assert gone() is None
    rebound.bound = {"w": torch.ones(4, 3)}
    y.backward()
    assert rebound.leaves["w"].grad.shape == (4, 3)


def test_weights_that_share_a_storage_are_told_apart():
    flat = torch.randn(24)
    weights = {"a": flat[:12].view(4, 3).requires_grad_(), "b": flat[12:].view(3, 4).requires_grad_()}
    x = torch.randn(2, 3)
    with (rebound := ReboundWeights(weights)):
        linked = rebound.linked(weights)
        y = ((x @ linked["a"].T).tanh() @ linked["b"].T).tanh().sum()
    rebound.bound = {name: weight.detach().clone() for name, weight in weights.items()}
    y.backward()
    expected = torch.autograd.grad(((x @ weights["a"].T).tanh() @ weights["b"].T).tanh().sum(), [*weights.values()])
    assert all(torch.equal(rebound.leaves[n].grad, g) for n, g in zip(weights, expected, strict=True))


def test_the_forecast_counts_what_a_correction_keeps_and_takes(make):
    def predicted(**version):
        case = make("pipedream", workers=4, microbatches=8, units=4, version=Version(kind="stash", **version))
        return simulate(case.program)

    plain, kinds = predicted(), ("weight-prediction", "discrepancy", "delay-compensation")
    guess, none, compensated = (predicted(correction=kind) for kind in kinds)
    size = 8 * (5 * 5 + 5)
    assert [w.weight_versions for w in plain.workers] == [4, 3, 2, 1]
    assert [w.weight_versions for w in none.workers] == [1, 1, 1, 1]
    # Three stashed versions go, and the velocity comes; predicted weights are one more version each.
    assert plain.workers[0].peak_bytes - none.workers[0].peak_bytes == 2 * size
    assert guess.workers[0].peak_bytes - plain.workers[0].peak_bytes == 2 * size
    assert [w.peak_bytes for w in compensated.workers][3] == plain.workers[3].peak_bytes
    server = {kind: simulate(make("parameter-server", workers=3, microbatches=2, units=3,
                                  version=Version(kind="local", correction=kind)).program)
              for kind in ("none", "delay-compensation")}  # fmt: skip
    more = [server["delay-compensation"].workers[3].peak_bytes - server["none"].workers[3].peak_bytes]
    assert more == [3 * 8 * (2 * 30 + 18)]


# Mutants.


def mutate(make, version, name="pipedream", **more):
    optimizer = SGD
    return make(name, workers=3, microbatches=8, units=3, version=version, optimizer=optimizer, **more)


@pytest.mark.parametrize(
    ("version", "target", "name", "change"),
    [
        (STASHED[0], applier, "extrapolate", lambda sound: lambda w, s, late: sound(w, s, late + 1)),
        (STASHED[0], applier, "add_to_velocity", lambda sound: lambda s, old, new, d: sound(s, new, old, d)),
        (STASHED[2], applier, "extrapolate", lambda sound: lambda w, s, late: sound(w, s, -late)),
        (STASHED[2], applier, "add_to_velocity", lambda sound: lambda s, old, new, d: sound(s, old, new, d / 2)),
        (STASHED[4], applier, "compensate", lambda _: lambda summed, *_others: summed),
        (STASHED[4], correction.Correction, "version_read", lambda _: lambda _self, _key, update: update),
        (STASHED[5], correction, "rate_factor", lambda sound: lambda plan, late, n: sound(plan, late, n + 1)),
    ],
)  # fmt: skip
def test_a_wrong_correction_is_caught(make, monkeypatch, version, target, name, change):
    case = mutate(make, version)
    expected = plain_pipeline(case)
    assert case.audit() <= case.tolerance
    with monkeypatch.context() as patch:
        patch.setattr(target, name, change(getattr(target, name)))
        mutant = run_threads(case.program, case.job, case.batches)
    assert furthest(case, mutant.weights, expected) > FAR
    assert max(audit(case.program, case.job, case.batches, mutant).values()) > FAR


def test_a_backward_that_reads_another_version_is_refused(make):
    program = mutate(make, STASHED[2]).program
    actions = [*program.workers[0].actions]
    position = next(k for k, a in enumerate(actions) if a.kind == ActionKind.BACKWARD and a.version == 3)
    actions[position] = actions[position]._replace(version=2)
    wrong = program.with_actions([tuple(actions), *(worker.actions for worker in program.workers[1:])])
    with pytest.raises(FaultsError, match="reads version 2, and the newest is 3"):
        verify(wrong)


# Rules.

DISCREPANCY = Version(kind="stash", correction="discrepancy")


@pytest.mark.parametrize(
    ("name", "version", "more", "text"),
    [
        ("1f1b", Version(correction="weight-prediction"), {}, "starts from the newest weights of a stage"),
        ("pipedream-2bw", DISCREPANCY.replace(kind="double-buffer"), {}, "use version 'stash', as preset:pipedream"),
        ("ddp", Version(correction="delay-compensation"), {}, "needs weights older than the newest, one version for"),
        ("hetpipe", STASHED[0], {}, "gate 'bound' adds the waves of other"),
        (
            "pipedream",
            DISCREPANCY,
            {"order": Order(kind="1f1b-async", recompute=1.0)},
            "recomputing reads the weights of",
        ),
        ("pipedream", DISCREPANCY, {"is_compiled": True}, "puts other weights into what the forward saved"),
        ("1f1b", Version(rate_updates=3), {}, "divides the learning rate by the known delay of a stage"),
        ("1f1b", Version(flushed_updates=3), {}, "leave version.flushed_updates out, or use order '1f1b-async'"),
        ("hetpipe", Version(kind="stash", flushed_updates=3), {}, "counts waves of updates in a pipeline"),
    ],
)
def test_combinations_that_cannot_work_are_refused(make, name, version, more, text):
    with pytest.raises(FaultsError, match=text):
        make(name, workers=3, microbatches=4, version=version, **more).program  # noqa: B018


def test_replicated_stages_and_tied_weights_are_refused(make):
    place = preset("pipedream").plan.place.replace(stage_replicas=(2, 1))
    feed = preset("pipedream").plan.feed.replace(microbatches=4)
    with pytest.raises(FaultsError, match="its delay is no single number"):
        make("pipedream", place=place, feed=feed, version=STASHED[0]).program  # noqa: B018
    with pytest.raises(FaultsError, match="stages that share weights have different delays"):
        make("pipedream", "gpt", workers=3, microbatches=4, version=STASHED[4]).program  # noqa: B018


def test_rates_by_delay_need_an_optimizer_with_a_rate(make):
    case = make("pipedream", workers=3, microbatches=4, version=Version(kind="stash", rate_updates=4))
    case.optimizer = object()
    with pytest.raises(InputError, match="scales the learning rate of each stage, and the optimizer is object"):
        correction.Correction(case.program, case.job)


def test_learning_rates_rise_to_their_value():
    plan = preset("pipedream").plan.replace(version=Version(kind="stash", rate_updates=4))
    factors = [correction.rate_factor(plan, 4, update) for update in range(6)]
    assert factors == pytest.approx([1 / 4, 4**-0.75, 1 / 2, 4**-0.25, 1.0, 1.0])
    assert correction.rate_factor(plan, 1, 0) == 1.0
    assert math.isclose(correction.velocity_decay(plan.replace(version=STASHED[2]), 2), 0.135**0.5)
