"""Every preset that the engine runs: synchronous ones against plain training, the others against their equations."""

import copy
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch

from pipedejavu.analysis import build_graph, verify
from pipedejavu.analysis.liveness import Liveness, count_versions
from pipedejavu.engine import AdamW, Read, Sgd, check_runnable, run_threads
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import FaultsError, InputError
from pipedejavu.plan import Feed, Keep, Order, Reduce, Version, preset, presets
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import simulate, unit_costs
from pipedejavu.simulate.simulate import Prediction

ULP = torch.finfo(torch.float64).eps

SYNCHRONOUS = {
    "model-parallel": [(2, 3), (4, 2)],
    "gpipe": [(2, 3), (4, 2)],
    "gpipe-recompute": [(3, 4), (4, 2)],
    "1f1b": [(2, 5), (4, 3)],
    "hippie": [(2, 3)],
    "gems-mast": [(2, 4), (4, 4)],
    "gems-master": [(2, 3), (4, 4)],
    "gems-hy": [(2, 2)],
    "chimera": [(2, 3), (4, 4)],
    "interleaved": [(2, 2), (3, 3)],
    "zb-h1": [(2, 3), (4, 2)],
    "zb-v": [(2, 3), (3, 5)],
    "dualpipe-v": [(2, 4), (3, 6)],
    "l2l": [(None, 3)],
    "ddp": [(2, 2), (4, 1)],
    "zero-1": [(2, 2), (4, 1)],
    "zero-2": [(2, 2), (4, 1)],
    "zero-3": [(2, 2), (4, 1)],
    "zero-r": [(2, 2), (4, 1)],
    "zero-offload": [(None, 3)],
    "hyscale": [(2, 5), (3, 4)],
    "byteps": [(2, 2), (3, 1)],
    "axonn": [(2, 3), (4, 2)],
    "cotrain": [(None, 3)],
    "stronghold": [(None, 3)],
    "coarse": [(2, 5), (3, 2)],
    "fine": [(2, 3), (4, 2)],
}
"""Sizes (workers, microbatches) of each; fewer microbatches than workers where that is legal."""

VERSIONED = {
    "pipedream": [(2, 5), (4, 6)],
    "pipedream-vertical": [(2, 5), (4, 6)],
    "pipedream-2bw": [(2, 2), (4, 3)],
    "spectrain": [(4, 6)],
    "pipemare": [(4, 6)],
    "parameter-server": [(2, 3), (3, 2)],
    "dc-asgd": [(3, 2)],
    "easgd": [(2, 3), (3, 3)],
    "easgd-sync": [(2, 3), (3, 3)],
    "hetpipe": [(2, 9), (3, 12)],
    "late-share": [(2, 5), (3, 2)],
}
CARRY = ("easgd", "easgd-sync", "hetpipe")
"""Workers and servers know more of each other than weights and state, and tell it between two rounds."""
SCORED = {"zeno": [(2, 3), (4, 1)]}
"""Synchronous, but not every gradient counts."""
SUMS_IN_OTHER_ORDER = ("pipedream-2bw", "hetpipe", "late-share")

DIVIDED = ("megatron", "sequence", "vocabulary", "context", "stationary-x", "stationary-y", "stationary-w", "moe")
"""They divide operators, sequences or experts, which the models here do not have: see `test_divided_run`,
`test_sequence_run` and `test_expert_shards`."""
MASKED = "distreal"
"""It leaves out filters, which most of the models here do not have: see `test_masks`."""

ALL = {**SYNCHRONOUS, **VERSIONED, **SCORED, "hogwild": [(3, 3)]}
SIZED = [(name, *size) for name, sizes in ALL.items() for size in sizes]


def decays(name):
    return "norm" not in name and not name.endswith("bias")


MOMENTUM = Sgd(lr=0.1, momentum=0.9, weight_decay=0.01, decays=decays)
ADAMW = AdamW(lr=0.01, eps=0.01, weight_decay=0.1, decays=decays, schedule=lambda update: 1 / (1 + update))


def test_the_sizes_below_cover_every_preset_that_runs():
    runnable = {}
    for name, found in presets().items():
        program = compile_plan(*unit_costs(found.plan, {}), fold=False)
        try:
            check_runnable(program)
        except InputError as error:
            assert "the engine does not run" in str(error)  # noqa: PT017
        else:
            runnable[name] = found.plan.version.kind
    for name in DIVIDED:
        assert runnable.pop(name) == "sync"
    assert runnable.pop(MASKED) == "local"
    assert {n for n, kind in runnable.items() if kind == "sync"} == SYNCHRONOUS.keys() | SCORED.keys()
    assert {n for n, kind in runnable.items() if kind not in ("sync", "torn")} == VERSIONED.keys()
    assert runnable.keys() == ALL.keys()


@pytest.mark.parametrize(("name", "workers", "microbatches"), [row for row in SIZED if row[0] in SYNCHRONOUS])
@pytest.mark.parametrize("model", ["mlp", "convnet", "gpt"])
def test_a_synchronous_preset_equals_plain_training(make, name, workers, microbatches, model):
    optimizer = MOMENTUM if model == "convnet" else ADAMW
    case = make(name, model, workers=workers, microbatches=microbatches, optimizer=optimizer)
    assert case.updates >= 2
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance
    assert case.moved() > 1e6 * case.tolerance


@pytest.mark.parametrize(("name", "workers", "microbatches"), [row for row in SIZED if row[0] in VERSIONED])
@pytest.mark.parametrize("model", ["mlp", "convnet", "gpt"])
def test_a_versioned_preset_equals_its_replay(make, name, workers, microbatches, model):
    optimizer = MOMENTUM if model == "mlp" else ADAMW
    case = make(name, model, workers=workers, microbatches=microbatches, steps=4, optimizer=optimizer)
    assert case.audit() <= (case.tolerance if name in SUMS_IN_OTHER_ORDER or model == "gpt" else 0.0)
    assert case.moved() > 1e6 * case.tolerance
    reads = [event for log in case.outcome.logs for event in log.events if isinstance(event, Read)]
    logged = [event for event in reads if event.microbatch >= 0]
    assert len(logged) == len(case.program.pieces) * len(case.batches.counts)


@pytest.mark.parametrize(("name", "workers", "microbatches"), SIZED)
def test_the_engine_counts_what_the_simulator_counts(make, name, workers, microbatches):
    case = make(name, workers=workers, microbatches=microbatches, steps=3)
    program, logs = case.program, case.outcome.logs
    predicted = simulate(program)
    assert len(logs) == len(predicted.workers)
    trains = [worker for worker in range(len(logs)) if program.held(worker)]
    for index in trains:
        if program.plan.reduce.combiner == "elastic":  # a version may still be on its way to the server
            assert logs[index].peak_versions in (1, 2)
            assert own_versions(predicted, index) == 1
        else:
            assert logs[index].peak_versions == own_versions(predicted, index)
            assert logs[index].peak_versions == predicted.workers[index].weight_versions
        assert logs[index].peak_live == measured(case)._peak_live(index)
        if not program.workers[index].picks_ready:
            assert logs[index].peak_live == predicted.workers[index].peak_live_microbatches


def own_versions(prediction, index):
    """Counts the versions of what a worker holds; copies of others' weights pass through as messages do."""
    program, ops = prediction.program, prediction.graph.of_action[index]
    start, end = [prediction.start[op] for op in ops], [prediction.end[op] for op in ops]
    stays = Liveness(program).stays(index, start, end, prediction.makespan_s)
    return count_versions(stays, program.held(index))


def measured(case):
    """Returns the run as if it had been predicted."""
    graph = build_graph(case.program)
    start, end = [0.0] * len(graph.members), [0.0] * len(graph.members)
    times = {(span.worker, span.action): span for span in case.outcome.spans}
    for index, worker in enumerate(case.program.workers):
        for op, a in zip(graph.of_action[index], worker.actions, strict=True):
            if a.lane == "compute":
                span = times[index, str(a)]
                start[op], end[op] = span.start_s, span.end_s
    return Prediction(graph, start, end)


@pytest.mark.parametrize("workers", [3, 4])
def test_axonn_holds_no_more_than_its_limit(make, workers):
    case = make("axonn", workers=workers, microbatches=7)
    assert all(1 <= log.peak_live <= workers for log in case.outcome.logs)


# Pipelines beside each other, and shares.


@pytest.mark.parametrize("model", ["convnet", "calm-gpt"])
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        ("gpipe", 1), ("gpipe-recompute", 2), ("1f1b", 3), ("interleaved", 2), ("zb-h1", 2), ("zb-v", 3),
        ("dualpipe-v", 4), ("gems-master", 2), ("chimera", 2), ("axonn", 2), ("coarse", 7),
    ],
)  # fmt: skip
def test_pipelines_in_parallel_equal_plain_training(make, name, microbatches, model):
    case = make(name, model, workers=2, replicas=2, microbatches=microbatches, optimizer=ADAMW)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance
    first = {piece: weights for (piece, replica), weights in case.outcome.weights.items() if replica == 0}
    for (piece, _), weights in case.outcome.weights.items():
        assert all(torch.equal(weight, first[piece][n]) for n, weight in weights.items())


@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.5, 0.5), (0.2, 0.8), (0.85, 0.15)])
def test_any_shares_of_a_cpu_and_a_pipeline_equal_plain_training(make, shares):
    feed = preset("coarse").plan.feed.replace(microbatches=5, shares=shares)
    case = make("coarse", "gpt", workers=2, feed=feed, optimizer=ADAMW)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance


@pytest.mark.parametrize(("order", "model"), [("1f1b", "gpt"), ("zb-h1", "mlp")])
def test_pipelines_with_a_cpu_beside_them_equal_plain_training(make, order, model):
    feed = preset("coarse").plan.feed.replace(microbatches=6, shares=(0.5, 1 / 3, 1 / 6))
    recompute = {"recompute": 1.0, "is_eager": True} if order == "1f1b" else {}
    case = make(
        "coarse", model, workers=2, replicas=2, feed=feed, order=Order(kind=order, **recompute), optimizer=ADAMW
    )
    assert case.program.plan.num_workers == 5
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance


def test_a_share_of_nothing_is_the_pipeline_alone(make):
    feed = preset("coarse").plan.feed.replace(microbatches=4, shares=(1.0, 0.0))
    alone = make("1f1b", workers=2, microbatches=4)
    shared = make("coarse", workers=2, feed=feed)
    shared.units = alone.units
    for (piece, replica), weights in alone.outcome.weights.items():
        assert all(torch.equal(w, shared.outcome.weights[piece, replica][n]) for n, w in weights.items())


@pytest.mark.parametrize(("workers", "microbatches", "replicas"), [(4, 2, 1), (3, 1, 2)])
def test_stashes_for_updates_of_several_microbatches_equal_their_replay(make, workers, microbatches, replicas):
    feed = Feed(microbatches=microbatches)
    version, keep = Version(kind="stash"), Keep()
    case = make(
        "pipedream-2bw", workers=workers, replicas=replicas, feed=feed, version=version, keep=keep, steps=8, rounds=2
    )
    assert case.audit() <= case.tolerance
    assert case.moved() > 1e-3


@pytest.mark.parametrize("clip", ["none", "global"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v", "groups"])
def test_pipelines_that_add_up_gradients_piece_by_piece_equal_plain_training(make, name, clip):
    found = preset("1f1b" if name == "groups" else name).plan
    place = (
        found.place.replace(stage_replicas=(2, 1)) if name == "groups" else found.place.replace(workers=2, replicas=2)
    )
    case = make(
        found.name, place=place, feed=found.feed.replace(microbatches=4), order=found.order.replace(is_eager=True),
        units=12, optimizer=ADAMW, clip=clip, clip_norm=0.1 if clip == "global" else None,
    )  # fmt: skip
    assert len(case.program.pieces) == 12
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance


@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_replicated_stages_equal_their_replay(make, name):
    place = preset(name).plan.place.replace(stage_replicas=(2, 1))
    feed = preset(name).plan.feed.replace(microbatches=4)
    case = make(name, "convnet", place=place, feed=feed, steps=3)
    assert case.audit() <= case.tolerance
    if name == "1f1b":
        assert case.furthest(case.trained_plainly()) <= case.tolerance


@pytest.mark.parametrize(
    ("sizes", "microbatches", "is_eager"),
    [
        *[((3, 1), 4, False), ((2, 1, 2), 3, True)],
        *[
            pytest.param(*case, is_eager, marks=pytest.mark.slow)
            for case in (((3, 1), 4), ((1, 3), 5), ((2, 3), 4), ((3,), 4), ((2, 1, 2), 3))
            for is_eager in (False, True)
        ],
    ],
)
def test_replicas_of_a_stage_need_not_divide_the_microbatches(make, sizes, microbatches, is_eager):
    plan = preset("1f1b").plan
    case = make(
        "1f1b", "convnet", place=plan.place.replace(workers=len(sizes), stage_replicas=sizes), clip="global",
        feed=plan.feed.replace(microbatches=microbatches), order=plan.order.replace(is_eager=is_eager),
        clip_norm=0.1, optimizer=MOMENTUM, units=6,
    )  # fmt: skip
    verify(case.program)
    counts = [sum(a.kind == "B" for a in worker.actions) for worker in case.program.workers]
    assert len({*counts}) > 1
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance
    assert case.moved() > 1e6 * case.tolerance


@pytest.mark.parametrize("name", ["1f1b", "pipedream"])
def test_replicated_stages_refuse_tied_weights(make, name):
    place = preset(name).plan.place.replace(stage_replicas=(2, 1))
    feed = preset(name).plan.feed.replace(microbatches=4)
    case = make(name, "calm-gpt", place=place, feed=feed, steps=3)
    with pytest.raises(FaultsError, match=r"have no common replica to tie weights in; use place\.replicas, or untie"):
        case.program  # noqa: B018


# Clipping.


@pytest.mark.parametrize("clip_norm", [0.02, 1e6])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("1f1b", {"workers": 3, "microbatches": 4}),
        ("1f1b", {"workers": 2, "microbatches": 2, "replicas": 2}),
        ("chimera", {"workers": 2, "microbatches": 4}),
        ("interleaved", {"workers": 2, "microbatches": 4}),
        ("ddp", {"workers": 3, "microbatches": 1}),
        ("coarse", {"workers": 2, "microbatches": 5}),
    ],
)
def test_the_norm_is_taken_once_over_everything(make, name, sizes, clip_norm):
    """Tied weights and replicas count once, as in torch's clipping of the whole model."""
    case = make(name, "gpt", clip="global", clip_norm=clip_norm, optimizer=MOMENTUM, **sizes)
    expected = case.trained_plainly()
    assert case.furthest(expected) <= case.tolerance
    assert case.audit() <= case.tolerance
    case.clip_norm = None
    unclipped = case.trained_plainly()
    distance = max(float((expected[n] - w).abs().max()) for n, w in unclipped.items())
    assert distance > 1e-3 if clip_norm < 1 else distance == 0.0


def test_a_flush_free_pipeline_clips_by_the_norm_before(make):
    case = make("pipedream-2bw", workers=2, microbatches=2, steps=4, clip="delayed", clip_norm=0.02)
    assert case.audit() <= case.tolerance
    applied = [event for event in case.outcome.logs[0].events if not isinstance(event, Read)]
    counts = [sum(case.batches.count(i) for i in event.microbatches) for event in applied]
    ratios = [event.coefficient * count for event, count in zip(applied, counts, strict=True)]
    assert ratios[0] == 1.0
    assert all(ratio < 0.5 for ratio in ratios[1:])


def test_a_flush_free_pipeline_refuses_a_norm_that_it_never_has(make):
    with pytest.raises(FaultsError, match="never has the gradients of all stages at once"):
        make("pipedream-2bw", workers=2, microbatches=2, clip="global").program  # noqa: B018


def test_updates_of_single_workers_refuse_a_norm_over_all(make):
    case = make("parameter-server", workers=2, microbatches=2, clip="global", clip_norm=0.1)
    with pytest.raises(InputError, match=r"with feed 'own' each makes updates of its own; set reduce.clip to 'none'"):
        case.outcome  # noqa: B018


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
def test_a_split_backward_of_tied_weights_passes_its_audit(make, name):
    case = make(name, "gpt", workers=2, microbatches=4)
    assert case.program.tied_pieces
    assert case.audit() <= case.tolerance


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize(
    "places",
    [("visit",) * 3, ("visit", "host", "lean"), ("lean",) * 3, ("device", "window", "window"), ("window",) * 3],
)
def test_streamed_state_and_fetched_weights_change_nothing(make, places, clip_norm):
    case = make("zero-offload", "convnet", microbatches=3, clip_norm=clip_norm, optimizer=ADAMW, rounds=2)
    reduce = case.plan.reduce if clip_norm else Reduce()
    case = replace(case, plan=case.plan.replace(keep=Keep(kind="split", places=places), reduce=reduce))
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance
    assert case.moved() > 1e6 * case.tolerance


@pytest.mark.parametrize("units", [(0,), (1, 2)])
def test_units_that_are_named_recompute_and_change_nothing(make, units):
    case = make("1f1b", "convnet", workers=2, microbatches=3, optimizer=MOMENTUM)
    order = case.plan.order.replace(recompute_units=units, is_eager=True)
    case = replace(case, plan=case.plan.replace(order=order, bucket_bytes=1))
    again = {a.piece for worker in case.program.workers for a in worker.actions if a.kind == "R"}
    assert again == {n for n, units in enumerate(case.program.recomputed) if units}
    assert 0 < len(again) < len(case.program.pieces)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance
    assert case.moved() > 1e6 * case.tolerance


@pytest.mark.parametrize("name", ["l2l", "zero-offload", "cotrain", "stronghold"])
def test_gradients_of_tied_weights_are_summed_before_they_leave_for_the_host(make, name):
    case = make(name, "gpt", microbatches=3)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance


@pytest.mark.parametrize("clip_norm", [0.02, 1e6])
def test_the_norm_covers_what_is_on_the_host(make, clip_norm):
    case = make("zero-offload", "convnet", microbatches=3, clip_norm=clip_norm, optimizer=MOMENTUM)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance


# What the engine must not touch, and what it repeats.


@pytest.mark.parametrize("name", ["gpipe", "gpipe-recompute", "1f1b", "interleaved"])
def test_running_statistics_move_once_for_each_microbatch(make, name):
    case = make(name, "convnet", workers=2, microbatches=4)
    case.trained_plainly()
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    seen = 0
    for own in threads.handlers:
        for runner in own.runners.values():
            for number, _, module in runner.units:
                expected = dict(case.plain_modules[number].named_buffers())
                for name, buffer in module.named_buffers():
                    assert torch.allclose(buffer, expected[name], rtol=0, atol=1e-14)
                    seen += name.endswith("num_batches_tracked") and int(buffer) == 8
    assert seen == len(case.units) - 1
    assert all(int(b) == 0 for _, m in case.units for n, b in m.named_buffers() if n.endswith("tracked"))


@pytest.mark.parametrize("name", ["1f1b", "fine", "ddp", "axonn"])
def test_a_repeated_program_continues_from_its_state(make, name):
    case = make(name, "gpt", workers=2, microbatches=2, steps=2, rounds=3, optimizer=ADAMW)
    assert case.updates == 6
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.audit() <= case.tolerance


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical", "pipedream-2bw", "parameter-server", *CARRY])
def test_a_versioned_program_that_is_repeated_equals_its_replay(make, name):
    case = make(name, workers=2, microbatches=3, steps=2, rounds=3, optimizer=ADAMW)
    assert case.audit() <= case.tolerance
    reads = [e for e in case.outcome.logs[0].events if isinstance(e, Read) and e.microbatch >= 0]
    assert len(reads) % 3 == 0


# Equations.


def by_equation(case, version, size=1):
    """Trains with W_s[t+1] = W_s[t] − lr·∇_s f(W_0[v_0(t)], W_1[v_1(t)], …), all versions kept."""
    modules = [copy.deepcopy(module) for _, module in case.units]
    stage_of = {unit: piece.stage for piece in case.program.pieces for unit in piece.units}
    history = [[[p.detach().clone() for p in module.parameters()] for module in modules]]
    for update in range(case.updates):
        for unit, module in enumerate(modules):
            module.zero_grad()
            for p, w in zip(module.parameters(), history[version(stage_of[unit], update)][unit], strict=True):
                p.data = w.clone()
        members = range(update * size, (update + 1) * size)
        for i in members:
            case.job.loss(case.forward(modules, i), case.batches.targets(i)).backward()
        count = sum(case.batches.count(i) for i in members)
        history.append(
            [
                [w - case.optimizer.lr * p.grad / count for p, w in zip(module.parameters(), newest, strict=True)]
                for module, newest in zip(modules, history[-1], strict=True)
            ]
        )
    names = [[f"{unit}.{n}" for n, _ in module.named_parameters()] for unit, module in case.units]
    return {n: w for ns, ws in zip(names, history[-1], strict=True) for n, w in zip(ns, ws, strict=True)}


def test_2bw_is_gradient_descent_with_a_delay_of_one(make):
    case = make("pipedream-2bw", workers=4, microbatches=3, steps=5, optimizer=Sgd(lr=0.2))
    expected = by_equation(case, lambda _, update: max(0, update - 1), size=3)
    assert case.furthest(expected) <= case.tolerance
    without = by_equation(case, lambda _, update: update, size=3)
    assert case.furthest(without) > 1e-3


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_pipedream_reads_each_stage_as_late_as_its_distance_from_the_end(make, workers):
    case = make("pipedream", workers=workers, microbatches=9, optimizer=Sgd(lr=0.2))
    expected = by_equation(case, lambda stage, update: max(0, update - (workers - 1 - stage)))
    assert case.furthest(expected) <= case.tolerance


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_vertical_sync_reads_all_stages_as_late_as_the_first(make, workers):
    case = make("pipedream-vertical", workers=workers, microbatches=9, optimizer=Sgd(lr=0.2))
    expected = by_equation(case, lambda _, update: max(0, update - (workers - 1)))
    assert case.furthest(expected) <= case.tolerance


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical", "parameter-server", "hogwild"])
@pytest.mark.parametrize("optimizer", [Sgd(lr=0.1), MOMENTUM, ADAMW])
def test_one_worker_is_plain_training(make, name, optimizer):
    case = make(name, workers=1, microbatches=6, optimizer=optimizer)
    assert case.updates == 6
    assert case.furthest(case.trained_plainly()) <= case.tolerance


def test_hetpipe_with_one_virtual_worker_of_one_stage_is_plain_training(make):
    case = make("hetpipe", workers=1, replicas=1, microbatches=7, optimizer=MOMENTUM)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert any(isinstance(e, Read) and e.wave >= 0 for e in case.outcome.logs[0].events)


@pytest.mark.parametrize(("workers", "bound"), [(2, 0), (2, 1), (3, 1)])
def test_hetpipe_keeps_its_bounds_at_every_injection(make, workers, bound):
    reduce = preset("hetpipe").plan.reduce.replace(bound=bound)
    case = make("hetpipe", workers=workers, microbatches=6 * workers, reduce=reduce)
    assert case.audit() <= case.tolerance
    waves = defaultdict(lambda: -1)
    for event in (event for log in case.outcome.logs for event in log.events if isinstance(event, Read)):
        if event.microbatch < 0:  # the end of the round
            continue
        minibatch = event.microbatch // case.program.update_size
        behind = case.program.pieces[-1].stage - case.program.pieces[event.piece].stage
        home = (event.piece, event.replica)
        waves[home] = max(waves[home], event.wave)
        assert minibatch - event.version <= behind <= workers - 1
        others = minibatch + 1 - workers * (waves[home] + 1)  # updates of another that the weights may lack
        assert others <= (bound + 2) * workers + workers - 1
    assert max(waves.values()) >= 1


def test_a_parameter_server_takes_several_microbatches_of_a_worker(make):
    feed = preset("parameter-server").plan.feed.replace(microbatches=3)
    case = make("parameter-server", workers=2, feed=feed, steps=3)
    assert case.audit() <= case.tolerance
    single = make("parameter-server", workers=1, feed=feed, steps=3)
    assert single.furthest(single.trained_plainly()) <= single.tolerance


# Hogwild.


class Picked:
    """Microbatch i picks row i; the gradient of a row is the same whatever the weights are."""

    def __init__(self, count):
        self.weight = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))

    def inputs(self, microbatch):
        return torch.tensor([microbatch])

    def targets(self, microbatch):
        return self.weight[microbatch : microbatch + 1]

    def length(self, microbatch):  # noqa: ARG002
        return 1

    count = length


def test_gradients_of_disjoint_support_add_up_exactly(make):
    case = make("hogwild", workers=4, microbatches=25, units=3, optimizer=Sgd(lr=0.5))
    rows = torch.nn.Embedding(100, 3)
    case.units = [("u0", rows), ("u1", torch.nn.Identity()), ("u2", torch.nn.Identity())]
    case.batches = Picked(100)
    case.extra = {}
    case.job = case.job.__class__(units=case.units, loss=lambda o, t: (o * t).sum(), optimizer=case.optimizer)
    found = case.outcome.weights[0, 0]["u0.weight"]
    assert torch.equal(found, rows.weight.detach() - 0.5 * case.batches.weight)
    assert all(w["u0.weight"].data_ptr() == found.data_ptr() for w in case.outcome.weights.values())


def test_hogwild_converges_on_an_easy_problem(make):
    case = make("hogwild", workers=3, microbatches=60, optimizer=Sgd(lr=0.3))
    random = torch.Generator().manual_seed(2)
    sizes = [8] * len(case.batches.counts)
    x = [torch.randn(n, 5, generator=random) for n in sizes]
    case.batches = type(case.batches)(x, [(rows[:, 0] > 0).long() for rows in x], sizes)
    logs = case.outcome.logs
    losses = dict(sorted({i: loss for log in logs for i, loss in log.losses.items()}.items()))
    values = [*losses.values()]
    assert sum(values[-20:]) < 0.5 * sum(values[:20])


# EASGD.


def push_once(output, target):
    """A gradient in the first update alone: `target` is a factor that is 0 afterwards."""
    return (output * target).sum()


def elastic(make, name, steps, workers, elasticity=1.5):
    case = make(name, workers=workers, microbatches=steps, optimizer=Sgd(lr=0.1))
    random = torch.Generator().manual_seed(3)
    count = len(case.batches.counts)
    x = [torch.randn(2, 5, generator=random) for _ in range(count)]
    random.manual_seed(6)
    targets = [torch.randn(2, 3, generator=random) * (i < workers) for i in range(count)]
    torch.manual_seed(4)
    case.units = [("u0", torch.nn.Linear(5, 3)), ("u1", torch.nn.Identity()), ("u2", torch.nn.Identity())]
    case.batches = type(case.batches)(x, targets, [2] * count)
    make_job = partial(case.job.__class__, units=case.units, optimizer=case.optimizer, elasticity=elasticity)
    case.job = make_job(loss=push_once)
    return case


@pytest.mark.parametrize("name", ["easgd", "easgd-sync"])
def test_without_gradients_the_sum_of_all_weights_is_conserved(make, name):
    sums, moved = [], []
    for steps in (1, 2, 6):
        weights = elastic(make, name, steps, 3).outcome.weights
        assert weights.keys() == {(0, 0), (0, 1), (0, 2), (0, 3)}
        sums.append(sum(w["u0.weight"] for w in weights.values()))
        moved.append(weights[0, 3]["u0.weight"])
    assert float((sums[1] - sums[0]).abs().max()) <= 32 * ULP
    assert float((sums[2] - sums[0]).abs().max()) <= 64 * ULP
    assert float((moved[2] - moved[0]).abs().max()) > 1e-2


def test_without_gradients_the_spread_shrinks_by_the_elastic_rate(make):
    alpha, apart = 0.1 * 1.5, []
    for steps in (1, 4):
        weights = elastic(make, "easgd-sync", steps, 3).outcome.weights
        apart.append(weights[0, 0]["u0.weight"] - weights[0, 1]["u0.weight"])
    assert float(apart[0].abs().max()) > 1e-2
    assert float((apart[1] - (1 - alpha) ** 3 * apart[0]).abs().max()) <= 16 * ULP


@pytest.mark.parametrize(("elasticity", "grows"), [(3.9, False), (4.1, True)])
def test_synchronous_easgd_is_stable_up_to_its_limit(make, elasticity, grows):
    """With G = 4 workers, α(G + 1) < 2 is the limit, and α = 0.1·ρ."""
    steps = 60
    weights = elastic(make, "easgd-sync", steps, 4, elasticity).outcome.weights
    mean = sum(weights[0, q]["u0.weight"] for q in range(4)) / 4
    distance = float((mean - weights[0, 4]["u0.weight"]).abs().max())
    start = elastic(make, "easgd-sync", 1, 4, elasticity).outcome.weights
    mean = sum(start[0, q]["u0.weight"] for q in range(4)) / 4
    first = float((mean - start[0, 4]["u0.weight"]).abs().max())
    assert (distance > first) == grows


@pytest.mark.parametrize("name", ["easgd", "easgd-sync"])
def test_without_elasticity_workers_train_on_their_own(make, name):
    case = make(name, workers=2, microbatches=4, optimizer=MOMENTUM, extra={"elasticity": 0.0})
    whole = case.batches
    for q in range(2):
        own = make(name, workers=2, microbatches=4, optimizer=MOMENTUM)
        own.units = case.units
        own.batches = type(whole)(whole.x[q::2], whole.y[q::2], whole.counts[q::2])
        expected = own.trained_plainly(update_size=1)
        for name_, weight in case.outcome.weights[0, q].items():
            assert float((weight - expected[name_]).abs().max()) <= case.tolerance
    initial = {f"{u}.{n}": p for u, m in case.units for n, p in m.named_parameters()}
    assert all(torch.equal(w, initial[n]) for n, w in case.outcome.weights[0, 2].items())


def test_a_run_that_is_repeated_gives_the_same_bits(make):
    case = make("1f1b", "gpt", workers=3, microbatches=4)
    again = run_threads(case.program, case.job, case.batches)
    for home, weights in case.outcome.weights.items():
        assert all(torch.equal(weight, again.weights[home][n]) for n, weight in weights.items())
