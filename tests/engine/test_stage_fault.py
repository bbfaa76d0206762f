"""Faulty stages: what they pass on, how the audit replays it, and scores of stages among replicas."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from pipedejavu.analysis import verify
from pipedejavu.engine import Byzantine, Scored, Sgd, audit, run_threads, summed_piece
from pipedejavu.engine.job import Applied
from pipedejavu.facts import InputError
from pipedejavu.plan import Keep, Reduce, preset
from pipedejavu.simulate import simulate

FAR = 1e-7
SGD = Sgd(lr=0.1)


def faulty(make, name, text, **sizes):
    return make(name, steps=3, optimizer=SGD, extra={"byzantine": Byzantine.parse(text)}, **sizes)


def scored(make, text, model="mlp", trim=1):
    place = preset("1f1b").plan.place.replace(workers=3, replicas=3, servers=1)
    reduce = Reduce(wire="server", gate="barrier", combiner="score-trim", trim=trim)
    extra = {"byzantine": Byzantine.parse(text)} if text else {}
    return make("1f1b", model, workers=3, replicas=3, microbatches=2, steps=3, place=place, reduce=reduce,
                keep=Keep(kind="server"), optimizer=SGD, extra=extra)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "sizes"),
    [
        ("1f1b", "1:sign-flip:2@1:activations", {"workers": 3, "microbatches": 4}),
        ("gpipe", "1:random:1@1:errors", {"workers": 3, "microbatches": 4}),
        ("zb-h1", "1:scale:2@0:activations", {"workers": 3, "microbatches": 4}),
        ("pipedream", "1:scale:2@2:errors", {"workers": 4, "microbatches": 6}),
        ("pipemare", "1:random:1@1:activations", {"workers": 3, "microbatches": 6}),
        ("1f1b", "1:random:3@1:activations", {"workers": 3, "microbatches": 2, "replicas": 2}),
        ("1f1b", "1:sign-flip:3@1", {"workers": 3, "microbatches": 2, "replicas": 2}),
    ],
)
def test_a_fault_of_a_stage_is_replayed(make, name, text, sizes):
    case = faulty(make, name, text, **sizes)
    assert case.audit() <= case.tolerance
    sound = make(name, steps=3, optimizer=SGD, **sizes)
    sound.units = case.units
    apart = [
        float((weight - sound.outcome.weights[key][n]).abs().max())
        for key, weights in case.outcome.weights.items()
        for n, weight in weights.items()
    ]
    assert max(apart) > 1e-4


def test_flipped_activations_equal_a_plain_loop_with_the_sign_in_it(make):
    case = faulty(make, "1f1b", "1:sign-flip:2@0:activations", workers=2, microbatches=3, units=2)
    (_, first), (_, last) = case.units
    w, v = ([p.detach().clone().requires_grad_() for p in module.parameters()] for module in (first, last))
    for update in range(3):
        total, count = torch.zeros(()), 0
        for i in range(3 * update, 3 * update + 3):
            sent = torch.tanh(case.batches.inputs(i) @ w[0].T + w[1])
            # The receiver computes with −2 times what was sent, and its error comes back as it is.
            received = (-2 * sent).detach() + sent - sent.detach()
            loss = cross_entropy(received @ v[0].T + v[1], case.batches.targets(i), reduction="sum")
            total, count = total + loss, count + len(case.batches.targets(i))
        for tensor, gradient in zip([*w, *v], torch.autograd.grad(total / count, [*w, *v]), strict=True):
            tensor.data -= 0.1 * gradient
    found = {n: t for weights in case.outcome.weights.values() for n, t in weights.items()}
    pairs = zip(("u0.0.weight", "u0.0.bias", "u1.weight", "u1.bias"), [*w, *v], strict=True)
    assert max(float((found[name] - tensor.detach()).abs().max()) for name, tensor in pairs) <= 1e-12


def test_an_engine_that_leaves_a_fault_out_is_caught(make, monkeypatch):
    case = faulty(make, "1f1b", "1:sign-flip:2@1:errors", workers=3, microbatches=4)
    with monkeypatch.context() as patch:
        patch.setattr(summed_piece, "spoilt_values", lambda *arguments: tuple(arguments[4]))
        mutant = run_threads(case.program, case.job, case.batches)
    assert max(audit(case.program, case.job, case.batches, mutant).values()) > FAR


# Scores of stages.


@pytest.mark.parametrize("model", ["mlp", "convnet", "gpt"])
@pytest.mark.parametrize("text", [None, "1:sign-flip:5@1", "1:random:5@1:activations", "1:random:5@2:errors"])
def test_scores_of_stages_equal_their_replay(make, model, text):
    case = scored(make, text, model)
    verify(case.program)
    assert simulate(case.program).makespan_s > 0
    assert case.audit() <= 16 * case.tolerance
    events = [event for event in case.outcome.logs[-1].events if isinstance(event, Scored)]
    assert len(events) == 3 * 3 * 3  # updates, stages, replicas


def test_only_the_faulty_stage_of_a_replica_is_dropped_for_its_wrong_weight_gradients(make):
    case = scored(make, "1:sign-flip:50@1")
    applied = [event for event in case.outcome.logs[-1].events if isinstance(event, Applied)]
    kept = {(event.piece, event.version): event.microbatches for event in applied}
    last = {version: case.program.fed_by(2, version - 1)[0] for version in (1, 2, 3)}
    assert all(number not in kept[1, version] for version, number in last.items())
    assert any(number in kept[piece, version] for piece in (0, 2) for version, number in last.items())


def test_a_score_moves_one_stage_alone(make):
    case = scored(make, None, trim=0)
    first = [event for event in case.outcome.logs[-1].events if isinstance(event, Scored) and event.version == 1]
    job, batches = case.job, case.batches
    for event in first[:4]:
        modules = [module for _, module in case.units]
        summed = [torch.zeros_like(p) for p in modules[event.piece].parameters()]
        fed = case.program.fed_by(event.replica, 0)
        for i in fed:
            loss = job.loss(torch.nn.Sequential(*modules)(batches.inputs(i)), batches.targets(i))
            parts = torch.autograd.grad(loss, [*modules[event.piece].parameters()])
            summed = [a + b for a, b in zip(summed, parts, strict=True)]
        count = sum(batches.count(i) for i in fed)
        before = [p.detach().clone() for p in modules[event.piece].parameters()]
        with torch.no_grad():
            for p, s in zip(modules[event.piece].parameters(), summed, strict=True):
                p -= 0.1 * s / count
            loss = job.loss(torch.nn.Sequential(*modules)(batches.inputs(-1)), batches.targets(-1))
            for p, b in zip(modules[event.piece].parameters(), before, strict=True):
                p.copy_(b)
        square = sum(float((s / count).square().sum()) for s in summed)
        expected = -float(loss) / batches.count(-1) - 0.005 * 0.1 * square
        assert event.score == pytest.approx(expected, abs=1e-12)


# What is refused.


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("1f1b", "1:scale@7:errors", "stage 7 is to be faulty and plan '1f1b' has 3 from 0 on; name one of them"),
        ("1f1b", "1:scale@2:activations", "stage 2 of plan '1f1b' passes no activations on; name another stage"),
        ("1f1b", "1:scale@0:errors", "stage 0 of plan '1f1b' passes no errors on; name another stage"),
        ("interleaved", "1:scale@1:errors", "are those that workers of a linear pipeline pass on, stage by stage"),
        ("1f1b", "2:scale@1:errors", "2 replicas are to be faulty and plan '1f1b' has 1; name fewer"),
    ],
)
def test_stages_that_cannot_be_faulty_are_refused(make, name, text, message):
    with pytest.raises(InputError, match=message):
        faulty(make, name, text, workers=3, microbatches=6).outcome  # noqa: B018


@pytest.mark.parametrize(
    ("text", "message"),
    [("1:scale@x", "a faulty stage is @STAGE or @STAGE:SENT, such as @1:activations, not '@x'"),
     ("1:scale@1:error", "a stage sends no 'error'; did you mean 'errors'")],
)  # fmt: skip
def test_texts_that_name_no_stage_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        Byzantine.parse(text)
