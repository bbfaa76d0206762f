"""Programs and plans made illegal on purpose: what `verify` says about each."""

import re

import pytest

from pipedejavu.analysis import build_graph, verify
from pipedejavu.facts import FaultsError, InputError
from pipedejavu.plan import (
    RULES,
    Cut,
    Feed,
    Keep,
    Order,
    Place,
    Plan,
    Precision,
    Reduce,
    Version,
    check_plan,
    preset,
    presets,
)
from pipedejavu.program import compile as compile_plan
from pipedejavu.program import parse_action
from pipedejavu.simulate import unit_costs

# Programs.


def edited(program, old: str, new: str = "", *, worker: int | None = None):
    """The program with the first `old` of its text (of one worker's line) replaced."""
    lines = program.to_text().splitlines()
    where = range(len(lines)) if worker is None else [worker]
    index = next(i for i in where if f" {old} " in f"{lines[i]} ")
    lines[index] = " ".join(f"{lines[index]} ".replace(f" {old} ", f" {new} ", 1).split())
    return program.with_text("\n".join(lines))


def moved(program, text: str, *, before: str, worker: int):
    """The program with a worker's action `text` moved to stand before `before`."""
    words = program.to_text().splitlines()[worker].split()[1:]
    words.remove(text)
    words.insert(words.index(before), text)
    sequences = [w.actions for w in program.workers]
    sequences[worker] = tuple(map(parse_action, words))
    return program.with_actions(sequences)


def faults(program) -> tuple[str, ...]:
    with pytest.raises(FaultsError) as caught:
        verify(program)
    assert caught.value.subject == f"the program of plan '{program.plan.name}'"
    return caught.value.faults


@pytest.fixture
def pipeline(build):
    """w0: F0 F1 … and w1: F0 B0 F1 B1, each stage on its worker."""
    return build("1f1b", workers=2, microbatches=2)


def test_the_unchanged_program_is_legal(pipeline):
    assert verify(pipeline).num_before == build_graph(pipeline).num_before


def test_swapped_sends_meet_the_wrong_receives(pipeline):
    line = pipeline.to_text().splitlines()[0]
    swapped = line.replace("SEND:x0.0>1", "SEND:x0.9>1").replace("SEND:x0.1>1", "SEND:x0.0>1")
    swapped = swapped.replace("SEND:x0.9>1", "SEND:x0.1>1")
    program = pipeline.with_text(pipeline.to_text().replace(line, swapped))
    assert "worker 0: SEND:x0.1>1 meets worker 1's RECV:x0.0<0" in faults(program)
    assert "worker 0: SEND:x0.1>1 reads x0.1, which nothing before it wrote" in faults(program)


def test_a_missing_receive(pipeline):
    found = faults(edited(pipeline, "RECV:x0.1<0"))
    assert "worker 0: SEND:x0.1>1 has no RECV on worker 1" in found
    assert "worker 1: F1.1@0 reads x0.1, which nothing before it wrote" in found


def test_a_missing_send(pipeline):
    assert "worker 0: RECV:g1.1<1 has no SEND on worker 1" in faults(edited(pipeline, "SEND:g1.1>0"))


def test_a_send_to_the_wrong_worker(build):
    program = edited(build("1f1b", workers=3, microbatches=1), "SEND:x0.0>1", "SEND:x0.0>2")
    found = faults(program)
    assert "worker 0: SEND:x0.0>2 has no RECV on worker 2" in found
    assert "worker 1: RECV:x0.0<0 has no SEND on worker 0" in found


def test_a_second_forward(pipeline):
    assert "piece 0 has 2 forwards of microbatch 1, not 1" in faults(edited(pipeline, "F0.1@0", "F0.1@0 F0.1@0"))


def test_a_missing_backward_and_one_too_many(pipeline):
    found = faults(edited(pipeline, "B0.1@0", "B0.0@0"))
    assert "piece 0 has 2 B, 0 I, 0 W of microbatch 0; one B, or one I and one W" in found
    assert "piece 0 has 0 B, 0 I, 0 W of microbatch 1; one B, or one I and one W" in found


def test_a_half_of_a_backward_that_is_missing(build):
    found = faults(edited(build("zb-h1", workers=2, microbatches=2), "W0.1@0"))
    assert "piece 0 has 0 B, 1 I, 0 W of microbatch 1; one B, or one I and one W" in found


def test_a_microbatch_that_is_not_in_the_plan(pipeline):
    assert "F of piece 0, microbatch 7, is not in the plan" in faults(edited(pipeline, "F0.1@0", "F0.1@0 F0.7@0"))


def test_a_recompute_too_few(build):
    found = faults(edited(build("gpipe-recompute", workers=2, microbatches=2), "R0.1@0"))
    assert "piece 0 recomputes microbatch 1 0 times, not 1" in found


def test_a_missing_reduction(build):
    program = build("1f1b", workers=2, microbatches=2, replicas=2)
    found = faults(edited(program, "REDUCE:d0@0*s0", worker=0))
    assert "worker 0: d0/0@0 is reduced 0 times, not 1" in found
    assert "REDUCE:d0/1@0*s0 has workers [2], its group [0, 2]" in found


def test_a_group_that_does_not_exist(build):
    program = build("1f1b", workers=2, microbatches=2, replicas=2)
    found = faults(edited(program, "REDUCE:d0@0*s0", "REDUCE:d0@0*s9", worker=0))
    assert "worker 0: REDUCE:d0@0*s9 names a group that does not exist" in found


def test_members_of_one_collective_that_differ(build):
    program = build("ddp", workers=2, microbatches=1)
    lines = program.to_text().splitlines()
    lines[1] = lines[1].replace("REDUCE:d3/1@0*s0", "REDUCE:d2/1@0*s0", 1)
    found = faults(program.with_text("\n".join(lines)))
    assert "members of one collective differ: worker 0: REDUCE:d3@0*s0, worker 1: REDUCE:d2/1@0*s0" in found


def test_a_wrong_version(build):
    program = build("1f1b", workers=2, microbatches=2, steps=2)
    found = faults(edited(program, "F0.2@1", "F0.2@0"))
    assert "F0.2@0 reads version 0; version 'sync' promises 1" in found
    assert "B0.2@1 reads version 1, its forward read 0" in found


def test_stale_versions_beyond_what_stashing_promises(build):
    program = build("pipedream", workers=2, microbatches=4)
    assert "F1.2@1 reads version 1; version 'stash' promises 2" in faults(edited(program, "F1.2@2", "F1.2@1"))


def test_a_backward_of_another_replica(build):
    program = build("gems-master", workers=2, microbatches=2)
    found = faults(edited(program, "B0.0@0", "B0/1.0@0"))
    assert "B0/1.0@0 belongs to replica 1, its forward to 0" in found


def test_weights_that_the_worker_does_not_hold(build):
    program = build("1f1b", workers=2, microbatches=1)
    found = faults(edited(program, "F0.0@0", "F0/1.0@0"))
    assert "worker 0: F0/1.0@0 reads w0/1@0, which its worker does not hold" in found


def test_a_version_dropped_before_its_reader(build):
    program = build("pipedream", workers=2, microbatches=4)
    found = faults(moved(program, "DROP:w0@1", before="B0.2@1", worker=0))
    assert "worker 0: B0.2@1 reads w0@1, which is gone by then" in found


def test_a_version_that_is_never_dropped(build):
    program = build("pipedream", workers=2, microbatches=4)
    assert faults(edited(program, "DROP:w0@1")) == (
        "worker 0 still holds w0@1 at the end; drop it after its last reader",
    )


def test_fetched_weights_that_are_never_dropped(build):
    program = build("l2l", microbatches=1)
    sequence = [*program.workers[0].actions]
    del sequence[max(n for n, a in enumerate(sequence) if a.kind == "DROP")]
    assert faults(program.with_actions([tuple(sequence)])) == (
        "worker 0 still holds w0@0 at the end; drop it after its last reader",
    )


def test_weights_that_go_to_the_host_though_they_rest_there(build):
    program = build("stronghold", microbatches=1)
    found = faults(edited(program, "DROP:w0@0", "OFFLOAD:w0@0"))
    assert "worker 0: OFFLOAD:w0@0 writes w0@0 on the host a second time" in found


def test_an_update_that_is_not_the_server_s(build):
    program = build("parameter-server", workers=1, microbatches=1)
    found = faults(edited(program, "UPDATE0@1~server", "UPDATE0@1"))
    assert "worker 1: UPDATE0@1 does not belong there; servers update '~server', workers what they hold" in found


def test_updated_weights_that_never_come_back(build):
    program = build("zero-offload", microbatches=1)
    assert faults(edited(program, "FETCH:w0@1")) == ("worker 0 does not hold w0@1 at the end",)


def test_the_last_reply_of_a_server_that_is_never_taken(build):
    program = build("parameter-server", workers=1, microbatches=2)
    program = edited(edited(program, "RECV:w0@2<1"), "SEND:w0@2>0")
    assert faults(program) == (
        "worker 0 still holds w0@1 at the end; drop it after its last reader",
        "worker 0 does not hold w0@2 at the end",
    )


def test_a_centre_that_moves_too_seldom(build):
    program = build("easgd-sync", workers=2, microbatches=2)
    assert "the server moves piece 0 to versions [1], not to each of 1 to 2 once" in faults(
        edited(program, "UPDATE0/2@2~server")
    )


def test_a_missing_update_and_one_too_many(pipeline):
    assert "worker 0: piece 0 of replica 0 gets updates [], not each of 0 to 0 once" in faults(
        edited(pipeline, "UPDATE0@1")
    )
    assert "worker 0: UPDATE0@1 writes w0@1 a second time" in faults(
        edited(pipeline, "UPDATE0@1", "UPDATE0@1 UPDATE0@1")
    )


def test_a_gradient_that_grows_after_it_was_applied(pipeline):
    found = faults(moved(pipeline, "UPDATE0@1", before="B0.1@0", worker=0))
    assert "worker 0: B0.1@0 adds to d0@0 after it was read" in found


def test_a_gradient_that_grows_after_it_was_reduced(build):
    program = build("1f1b", workers=1, microbatches=2, replicas=2)
    found = faults(moved(program, "REDUCE:d0@0*s0", before="B0.1@0", worker=0))
    assert "worker 0: B0.1@0 adds to d0@0 after it was read" in found


def test_samples_that_are_never_brought_in(build):
    program = build("hyscale", workers=1, microbatches=4)
    found = faults(edited(program, "FETCH:b0.1"))
    assert "worker 0: F0.1@0 reads b0.1, which nothing before it wrote" in found


def test_the_order_of_two_groups_does_not_matter(build):
    program = build("gems-master", workers=2, microbatches=2)
    verify(moved(program, "REDUCE:d0@0*s0", before="UPDATE0@1", worker=0))  # each is a lane of its own


def test_a_circle_is_printed(build):
    # The second stage wants microbatch 1 before it runs microbatch 0 backward, which the first stage waits for.
    program = build("model-parallel", workers=2, microbatches=2)
    late = "B1.0@0 SEND:g1.0>0"
    text = program.to_text().replace(f" {late}", "").replace("F1.1@0", f"F1.1@0 {late}")
    (fault,) = faults(program.with_text(text))
    head, circle = fault.split(": ", 1)
    assert head == "actions wait for each other in a circle"
    steps = circle.split(" → ")
    assert steps[0] == steps[-1]
    assert {re.sub(r"worker \d's ", "", s) for s in steps} >= {"B0.0@0", "F0.1@0", "F1.1@0", "B1.0@0"}


def test_only_the_first_faults_are_listed(build):
    program = build("gpipe", workers=2, microbatches=30)
    nothing = program.with_actions([(), ()])
    found = faults(nothing)
    assert len(found) == 21
    assert re.fullmatch(r"… and \d+ more", found[-1])


def test_more_versions_than_the_plan_lets_a_worker_hold(build):
    program = build("pipedream", workers=3, microbatches=6, keep=Keep(versions=2))
    assert "worker 0 holds 3 weight versions of a piece, the plan promises 2" in faults(program)


# Memory.


def test_memory_that_does_not_suffice_names_the_device_and_both_sizes(model, computer, resize):
    # Stage 0 of 2: 4 units of 100 + 100 + 600 bytes, and two microbatches of 200 saved bytes and 10 of output.
    plan = resize("1f1b", 2, 4)
    verify(compile_plan(plan, model(8), computer(2, memory_bytes=3800)))
    with pytest.raises(FaultsError) as caught:
        verify(compile_plan(plan, model(8), computer(2, memory_bytes=3000)))
    assert "device 'gpu0' would need 3.5 KiB and has 2.9 KiB" in str(caught.value)
    assert "use more workers, smaller microbatches, recompute, or keep state on the host" in str(caught.value)


def test_reserved_memory_is_not_ours(model, computer, resize):
    machine = computer(1, memory_bytes=2**20)
    device = machine.devices[0].replace(reserved_bytes=2**20 - 100)
    machine = machine.replace(devices=(device, machine.devices[1]))
    with pytest.raises(FaultsError, match=r"device 'gpu0' would need 6\.\d KiB and has 100 B"):
        verify(compile_plan(resize("1f1b", 1, 1), model(8), machine))


def test_state_on_the_host_counts_in_the_host_s_memory(model, computer, resize):
    machine = computer(1)
    machine = machine.replace(devices=(machine.devices[0], machine.devices[1].replace(memory_bytes=1000)))
    with pytest.raises(FaultsError, match=r"device 'cpu' would need .* and has 1000 B"):
        verify(compile_plan(resize("l2l", 1, 2), model(8), machine))


def test_workers_on_one_device_share_its_memory(model, computer, resize):
    plan = resize("1f1b", 2, 1)
    together = plan.replace(place=plan.place.replace(devices=("gpu0", "gpu0")))
    apart = compile_plan(plan, model(8), computer(2, memory_bytes=4000))
    verify(apart)
    with pytest.raises(FaultsError, match="device 'gpu0' would need"):
        verify(compile_plan(together, model(8), computer(2, memory_bytes=4000)))


# Plans that break a rule: the plan, and what it is told.


def moe(**changes) -> Plan:
    return preset("moe").plan.replace(**changes)


def megatron(*layouts: str) -> Plan:
    return preset("megatron").plan.replace(cut=Cut(kind="layout", layouts=layouts))


BROKEN: list[tuple[Plan, str, str]] = [
    (
        preset("pipedream").plan.replace(keep=Keep(versions=1)),
        "version 'stash' reads weights that an update in place has already overwritten",
        "set keep.versions to 2 or more, or leave it out",
    ),
    (
        preset("pipedream").plan.replace(reduce=Reduce(wire="all-reduce", clip="global")),
        "order '1f1b-async' never has the gradients of all stages at once, so there is no norm to clip by",
        "set reduce.clip to 'delayed' (the norm of the update before) or 'none', or use order '1f1b'",
    ),
    (
        preset("zeno").plan.replace(reduce=Reduce(wire="all-reduce", combiner="score-trim")),
        "combiner 'score-trim' must see each gradient, but wire 'all-reduce' hands over their sum",
        "set reduce.wire to 'server'",
    ),
    (
        preset("zeno").at(workers=3, trim=3),
        "combiner 'score-trim' drops 3 contributions of 3, so none is left to average",
        "set reduce.trim to less than 3, or use more replicas",
    ),
    (
        preset("zeno").plan.replace(place=Place(replicas=4, servers=2)),
        "combiner 'score-trim' scores the gradients of a stage with the whole model, which must be on one server",
        "use cut 'whole' or 'chain' and one server, and leave order.is_eager out",
    ),
    (
        preset("zeno").plan.replace(keep=Keep()),
        "combiner 'score-trim' compares the contributions of one update, which the server then makes for all",
        "set reduce.gate to 'barrier', keep.kind to 'server' and version.kind to 'sync'",
    ),
    (
        preset("zeno").plan.replace(reduce=Reduce(wire="server", combiner="score-trim", trim=1, clip="global")),
        "combiner 'score-trim' drops gradients only after the norm over all workers is known",
        "set reduce.clip to 'none'",
    ),
    (
        preset("1f1b").plan.replace(keep=Keep(kind="zero-3"), reduce=Reduce(wire="reduce-scatter")),
        "keep 'zero-3' in a pipeline gathers all weights again for every microbatch",
        "set keep.persists so that they stay for the batch, or use 'zero-1'",
    ),
    (
        preset("pipedream").plan.replace(keep=Keep(kind="zero-2"), reduce=Reduce(wire="reduce-scatter")),
        "keep 'zero-2' updates its shards in place, and version 'stash' reads weights that are older",
        "use version 'sync' with an order that flushes, such as '1f1b', or keep 'replicated'",
    ),
    (
        preset("chimera").plan.replace(place=Place(kind="bidirectional", workers=3)),
        "a bidirectional place pairs workers, and 3 is odd",
        "use an even number of workers",
    ),
    (
        preset("gems-master").at(microbatches=1),
        "a bidirectional place sends microbatches both ways, and an update has 1",
        "use 2 microbatches or more",
    ),
    (
        preset("parameter-server").plan.replace(reduce=Reduce(wire="server", gate="barrier")),
        "a server that waits for all gradients and sums them does what an all-reduce does, without its speed",
        "set reduce.wire to 'all-reduce', or reduce.gate to 'lock'",
    ),
    (
        preset("1f1b").plan.replace(name="tied", place=Place(stage_replicas=(2, 1))),
        "stages with different numbers of replicas have no common replica to tie weights in",
        "use place.replicas, or untie the weights",
    ),
    (
        preset("zb-h1").plan.replace(is_compiled=True),
        "order 'zb-h1' splits the backward, which compiled stages cannot do",
        "switch is_compiled off, or use order '1f1b'",
    ),
    (
        preset("hogwild").plan.replace(order=Order(recompute=1.0)),
        "recompute must read the weights that the forward read, and version 'torn' records none",
        "switch order.recompute off, or use version 'local'",
    ),
    (
        preset("gpipe").plan.replace(order=Order(kind="gpipe", recompute=1.0, recompute_units=(0,))),
        "order.recompute is a share of each stage's units, and order.recompute_units names some of them",
        "leave one of the two out",
    ),
    *(
        (
            preset("gpipe").plan.replace(order=order),
            "order.checkpoints divides what stages recompute, at rising numbers of units after the first of 8",
            "set order.recompute or order.recompute_units too, and count units from 0, in the profile's order",
        )
        for order in (
            Order(kind="gpipe", checkpoints=(1,)),
            Order(kind="gpipe", recompute=1.0, checkpoints=(2, 1)),
            Order(kind="gpipe", recompute=1.0, checkpoints=(0, 2)),
            Order(kind="gpipe", recompute=1.0, checkpoints=(12,)),
        )
    ),
    (
        preset("gpipe").plan.replace(order=Order(kind="gpipe", recompute_units=(7, 99))),
        "order.recompute_units names units that the profile does not have",
        "count units from 0, in the profile's order",
    ),
    (
        preset("pipedream").plan.replace(reduce=Reduce(wire="all-reduce", has_buffer_broadcast=True)),
        "replicas that do not wait for each other have no common moment to broadcast running statistics",
        "switch reduce.has_buffer_broadcast off, or use version 'sync'",
    ),
    (
        preset("hyscale").plan.replace(reduce=Reduce(wire="all-reduce", combiner="average")),
        "an average over replicas is wrong when they train unequal shares",
        "set reduce.combiner to 'sum': sums of sample gradients, divided once by the whole batch",
    ),
    (
        preset("zb-v").plan.replace(place=Place(workers=4)),
        "order 'zb-v' is made for another place than 'linear'",
        "set place.kind to the one that the preset of that name has",
    ),
    (
        preset("1f1b").plan.replace(place=Place(kind="bidirectional", workers=4)),
        "a bidirectional place has two replicas on each worker, which order '1f1b' does not run",
        "use order 'gems' or 'chimera', or place 'linear'",
    ),
    (
        preset("zb-h1").plan.replace(place=Place(kind="loop", workers=4, chunks=2)),
        "order 'zb-h1' runs one chunk on each worker",
        "use place 'linear'",
    ),
    (
        preset("1f1b").plan.replace(place=Place(kind="loop", workers=4, chunks=2)),
        "order '1f1b' runs one chunk on each worker",
        "use place 'linear', or order 'interleaved'",
    ),
    (
        preset("gpipe").plan.replace(cut=Cut()),
        "cut 'whole' has one stage, and the place has 4 workers in a line",
        "set cut.kind to 'chain', or place.workers to 1 with more replicas or shards",
    ),
    (
        preset("megatron").plan.replace(cut=Cut(kind="layout")),
        "a layout cut divides each operator, but cut.layouts is empty",
        "name the layouts, such as ['col', 'row']",
    ),
    (
        preset("l2l").plan.replace(place=Place(workers=2)),
        "order 'layer-major' takes all microbatches through one layer at a time, on one worker",
        "set place.workers to 1",
    ),
    (
        preset("interleaved").at(workers=4, microbatches=6),
        "order 'interleaved' takes microbatches in groups of the 4 workers, which do not divide 6",
        "use a multiple of 4 microbatches",
    ),
    (
        preset("zb-v").at(workers=4, microbatches=6),
        "order 'zb-v' fills its V with 2·4 − 1 microbatches, and there are 6",
        "use more microbatches",
    ),
    (
        preset("dualpipe-v").at(workers=4, microbatches=7),
        "order 'dualpipe-v' fills its V with 2·4 microbatches, and there are 7",
        "use more microbatches",
    ),
    (
        preset("pipedream-2bw").at(workers=4, microbatches=2),
        "version 'double-buffer' needs an update of 4 − 1 microbatches or more, so that two versions are enough, and"
        " it has 2",
        "use more microbatches, or version 'stash'",
    ),
    (
        preset("1f1b").plan.replace(version=Version(kind="stash")),
        "version 'stash' is for pipelines that are never flushed, and order '1f1b' flushes",
        "use order '1f1b-async', or version 'sync'",
    ),
    (
        preset("pipedream").plan.replace(version=Version()),
        "order '1f1b-async' starts microbatches before earlier ones have updated the weights",
        "use version 'stash', 'vertical' or 'double-buffer', or order '1f1b'",
    ),
    (
        preset("pipedream-vertical").plan.replace(feed=Feed(microbatches=2)),
        "version 'vertical' follows single microbatches, and an update has 2",
        "use one microbatch per update, or version 'double-buffer'",
    ),
    (
        preset("pipedream").plan.replace(keep=Keep(kind="split")),
        "keep 'split' holds one version of the weights, and version 'stash' reads several",
        "use version 'sync', or keep 'replicated'",
    ),
    (
        preset("zero-1").plan.replace(reduce=Reduce(wire="reduce-scatter", combiner="average")),
        "keep 'zero-1' makes one update of the gradients of all replicas; combiner 'average' with feed 'microbatch'"
        " does not",
        "set reduce.combiner to 'sum' and feed.kind to 'microbatch', or use keep 'replicated'",
    ),
    (
        preset("megatron").plan.replace(
            place=Place(replicas=2, shards=2), keep=Keep(kind="zero-2"), reduce=Reduce(wire="reduce-scatter")
        ),
        "keep 'zero-2' divides the state of whole operators, and each of 2 shards of a layout cut holds a part",
        "use keep 'replicated', or set place.shards to 1",
    ),
    (
        preset("zero-2").plan.replace(precision=Precision(moments="int8")),
        "keep 'zero-2' divides moments at other places than between the blocks of values that int8 scales together",
        "set precision.moments to 'bf16' or 'fp32', or use keep 'replicated'",
    ),
    (
        preset("zero-3").at(workers=1),
        "keep 'zero-3' divides state over replicas, and the plan has one",
        "use more replicas, or keep 'replicated'",
    ),
    (
        preset("1f1b")
        .at(workers=2, replicas=2)
        .replace(name="tied", keep=Keep(kind="zero-1", zeros=(0, 1)), reduce=Reduce(wire="reduce-scatter")),
        "stages that share tied weights must divide them alike, and place 'linear' with keep.zeros '0-1' does not",
        "give all stages of a linear place the same ZeRO stage, or untie the weights",
    ),
    (
        preset("zero-2").plan.replace(reduce=Reduce(wire="all-reduce")),
        "keep 'zero-2' divides state over replicas, which wire 'all-reduce' does not",
        "set reduce.wire to 'reduce-scatter'",
    ),
    (
        preset("parameter-server").plan.replace(place=Place(replicas=4)),
        "wire 'server' needs a server, and the place has none",
        "set place.servers to 1 or more",
    ),
    (
        preset("byteps").plan.replace(reduce=Reduce(wire="summation-service", combiner="average")),
        "the servers of wire 'summation-service' sum gradients, and combiner 'average' needs more than sums",
        "set reduce.combiner to 'sum', or reduce.wire to 'all-reduce'",
    ),
    (
        preset("ddp").plan.replace(reduce=Reduce()),
        "4 replicas would never exchange their gradients",
        "set reduce.wire, to 'all-reduce' for instance",
    ),
    (
        preset("hogwild").plan.replace(keep=Keep()),
        "wire 'shared-memory' has one copy of the weights for all workers, and keep is 'replicated'",
        "set keep.kind to 'shared'",
    ),
    (
        preset("l2l").plan.replace(keep=Keep(kind="host", places=("visit",))),
        "keep.places divides state piece by piece, and keep 'host' treats all pieces alike",
        "set keep.kind to 'split', or leave keep.places out",
    ),
    (
        preset("1f1b").plan.replace(keep=Keep(window="auto")),
        "keep.window 'auto' is chosen for weights in host memory, and keep 'replicated' has none there",
        "set keep.kind to 'host', or keep.window to 1",
    ),
    (
        preset("l2l").plan.replace(keep=Keep(kind="host", device_pieces="auto")),
        "keep.device_pieces 'auto' divides the state of a stage between device and host, and keep 'host' does not, or"
        " has keep.places",
        "set keep.kind to 'split' and leave keep.places out, or set keep.device_pieces to 0",
    ),
    (
        preset("1f1b").plan.replace(keep=Keep(kind="zero-1", zeros=(0, 2, 0, 1)), reduce=Reduce(wire="reduce-scatter")),
        "keep 'zero-1' is not the highest ZeRO stage in keep.zeros",
        "set keep.kind to the highest of them, or leave keep.zeros out",
    ),
    (
        preset("1f1b").plan.replace(keep=Keep(kind="zero-1", zeros=(0, 1)), reduce=Reduce(wire="reduce-scatter")),
        "keep.zeros has 2 entries, one for each stage, and the plan has 4",
        "give as many as there are stages, or leave keep.zeros out",
    ),
    (
        preset("megatron").plan.replace(place=Place(shards=4, stage_shards=(2,))),
        "4 shards of a layout cut and the tensor-parallel groups of place.stage_shards both divide operators",
        "use one of the two",
    ),
    (
        preset("1f1b").plan.replace(place=Place(workers=4, stage_shards=(2, 1))),
        "place.stage_shards has 2 entries, and a pipeline of the place has 4 stages or workers",
        "give one for each, or leave place.stage_shards out",
    ),
    (
        preset("gpipe").plan.replace(place=Place(workers=2, stage_replicas=(2, 1))),
        "order 'gpipe' has no form with replicated stages",
        "use order '1f1b' or '1f1b-async', or place.replicas",
    ),
    (
        preset("1f1b").plan.replace(place=Place(workers=2, stage_replicas=(9, 1))),
        "the replicas of a stage take an update's 8 microbatches in turn, and not all get one, or as many",
        "use as many microbatches or more; if the pipeline never drains, a multiple of each of place.stage_replicas",
    ),
    (
        preset("pipedream").at(microbatches=8).replace(place=Place(workers=2, stage_replicas=(3, 1))),
        "the replicas of a stage take an update's 1 microbatches in turn, and not all get one, or as many",
        "use as many microbatches or more; if the pipeline never drains, a multiple of each of place.stage_replicas",
    ),
    (
        preset("1f1b").plan.replace(place=Place(workers=2, stage_replicas=(2, 1), replicas=2)),
        "replicated stages and replicated pipelines are not combined",
        "use place.stage_replicas or place.replicas",
    ),
    (
        preset("interleaved").plan.replace(place=Place(kind="loop", workers=4, chunks=2, cpu_replicas=1)),
        "a CPU replica shares updates with a linear, flushed pipeline",
        "use place 'linear' with order '1f1b' or 'gpipe', or no CPU replica",
    ),
    (
        preset("1f1b").plan.replace(order=Order(kind="written")),
        "order 'written' has rows, and no other order has",
        "give order.rows with order 'written', or leave both out",
    ),
    (
        preset("coarse").plan.replace(order=Order(kind="written", rows=("F0 B0",))),
        "an order that is written out needs a linear place and feed 'microbatch'",
        "use place 'linear' and feed 'microbatch', or another order",
    ),
    (
        preset("1f1b")
        .at(workers=2, microbatches=2)
        .replace(order=Order(kind="written", rows=("F0 F1 B0 B1", "F0 B0 B1 F1"))),
        "order.rows must give each of the 2 workers F and later B of each of the 2 microbatches once",
        "write a row for each worker, such as 'F0 F1 B0 B1' for two microbatches",
    ),
    (
        preset("distreal").plan.replace(place=Place(replicas=3)),
        "feed 'mask' needs a budget for each of the 3 replicas",
        "set feed.budgets, and each row of feed.later_budgets, to that many numbers between 0 and 1",
    ),
    (
        preset("distreal").plan.replace(feed=Feed(kind="mask", budgets=(1.0, 0.5, 0.5, 0.0))),
        "feed 'mask' gives a replica a budget of 0, with which it computes nothing",
        "set its budget above 0, or leave the replica out",
    ),
    (
        Plan(feed=Feed(drops=((0.5,),))),
        "feed 'microbatch' leaves no filters out, so feed.drops and feed.later_budgets have no meaning",
        "set feed.kind to 'mask', or leave them out",
    ),
    (
        preset("distreal").plan.replace(feed=Feed(kind="mask", budgets=(1.0,) * 4, drops=((0.5,), (0.5, 0.5)))),
        "the vectors of feed.drops differ in length, and each has a share for every group of filters",
        "give all of them one length",
    ),
    (
        preset("distreal").plan.replace(version=Version(kind="sync")),
        "feed 'mask' has each replica train its own weights of the whole model and average them",
        "use cut 'whole', version 'local', combiner 'average' and keep 'replicated'",
    ),
    (
        preset("distreal").plan.replace(precision=Precision(moments="int8")),
        "int8 moments are rounded in blocks, and feed 'mask' updates single filters",
        "leave precision.moments out",
    ),
    (
        Plan(precision=Precision(compute="bf16")),
        "weights of compute 'bf16' cannot have masters 'none': 16 bits are too few for most updates, bf16 can be the"
        " half of a master, and wider weights are their own masters",
        "set precision.masters to 'split'",
    ),
    (
        Plan(precision=Precision(accumulate="bf16")),
        "gradients are bf16 only if weights are, and masters 'none' have float32 weights",
        "leave precision.accumulate out, or use compute 'bf16' with masters 'split'",
    ),
    (
        Plan(precision=Precision(compute="fp64", moments="int8")),
        "moments of int8 would round away what compute 'fp64' keeps",
        "leave precision.moments out, or use compute 'fp32'",
    ),
    (
        preset("hogwild").plan.replace(precision=Precision(compute="bf16", masters="split")),
        "keep 'shared' with gate 'none' and combiner 'sum' adds to the weights of other workers, which do not hold the"
        " other half of split masters",
        "set precision.masters to 'fp32'",
    ),
    (
        Plan(order=Order(head_chunks=4)),
        "the plan runs the model's head in 4 chunks, and the profile knows none: the last unit ends in no linear"
        " layer whose result goes only into a cross-entropy, or it was not measured",
        "leave order.head_chunks out, or measure the model again (--renew)",
    ),
    (
        Plan(precision=Precision(compute="fp16", masters="fp32")),
        "gradients of fp16 may overflow, and all workers skip such an update by the norm that they share",
        "set reduce.clip to 'global', or use compute 'bf16'",
    ),
    (
        moe(cut=Cut(kind="layout", layouts=("expert", "col"))),
        "layout 'expert' divides experts over workers with different samples, and 'expert col' divides other operators"
        " too",
        "leave the other layouts out",
    ),
    (
        moe(feed=Feed(kind="same")),
        "layout 'expert' exchanges rows among workers that each train microbatches of their own for the same update",
        "use feed 'microbatch', version 'sync' and wire 'all-reduce'",
    ),
    (
        moe(keep=Keep(kind="host")),
        "layout 'expert' keeps each unit as a piece of its own, whose state is on the device",
        "use keep 'replicated', and set order.is_eager",
    ),
    (
        moe(is_compiled=True),
        "layout 'expert' exchanges rows inside units, which compiled units cannot do",
        "switch is_compiled off",
    ),
    (
        moe(name="dense"),
        "layout 'expert' divides experts, and no unit of this model has any that are stacked in one parameter",
        "use another plan, such as preset:ddp, or measure the model again (--renew)",
    ),
    (
        moe(place=Place(shards=12)),
        "layout 'expert' divides 8 experts, the fewest of a unit, over 12 workers",
        "set place.shards to 8 or less",
    ),
    (
        moe(place=Place(shards=3)),
        "layout 'expert' gives each of 3 workers as many experts, and a unit has 8",
        "set place.shards to a number that divides the experts of every unit",
    ),
    (
        moe(place=Place(shards=2)),
        "the workers of layout 'expert' send 6 rows of their microbatches to 8 experts, of which some get none",
        "use larger microbatches",
    ),
    (
        preset("1f1b").plan.replace(version=Version(correction="weight-prediction")),
        "correction 'weight-prediction' starts from the newest weights of a stage, which forwards read under version"
        " 'stash' of order '1f1b-async' only, and the version is 'sync + weight-prediction'",
        "use version 'stash', as preset:pipedream does, or correction 'delay-compensation' or 'none'",
    ),
    (
        preset("ddp").plan.replace(version=Version(correction="delay-compensation")),
        "correction 'delay-compensation' needs weights older than the newest, one version for the 8 microbatches of an"
        " update, and a worker that knows both; version 'sync + delay-compensation' with wire 'all-reduce' and gate"
        " 'barrier' does not",
        "use preset:pipedream, preset:pipedream-2bw or preset:parameter-server with it, or correction 'none'",
    ),
    (
        preset("hetpipe").plan.replace(version=Version(kind="stash", correction="discrepancy")),
        "gate 'bound' adds the waves of other replicas to the weights, which correction 'discrepancy' would take for a"
        " worker's own updates",
        "set version.correction to 'none', or use gate 'barrier'",
    ),
    (
        preset("spectrain").plan.replace(
            place=Place(workers=2, stage_replicas=(2, 1)), feed=Feed(kind="round-robin", microbatches=2)
        ),
        "the replicas of a stage read different versions for one update, so its delay is no single number",
        "use place.replicas in place of place.stage_replicas, or correction 'none' and rate_updates 0",
    ),
    (
        preset("pipemare").plan.replace(order=Order(kind="1f1b-async", recompute=1.0)),
        "recomputing reads the weights of the forward, and correction 'discrepancy' keeps none of them",
        "switch order.recompute off, or use correction 'none'",
    ),
    (
        preset("pipemare").plan.replace(is_compiled=True),
        "correction 'discrepancy' puts other weights into what the forward saved, and compiled units and saved tensors"
        " that move to the host keep theirs",
        "switch is_compiled off and keep activations on the device, or use correction 'weight-prediction'",
    ),
    (
        preset("spectrain").plan.replace(precision=Precision(compute="bf16", masters="split")),
        "correction 'weight-prediction' computes with differences of weights, and split masters have theirs in two"
        " halves",
        "set precision.masters to 'fp32'",
    ),
    (
        preset("1f1b").plan.replace(version=Version(rate_updates=3)),
        "version.rate_updates divides the learning rate by the known delay of a stage, and order '1f1b' has none",
        "leave version.rate_updates out, or use order '1f1b-async'",
    ),
    (
        preset("pipedream").plan.replace(name="tied", version=Version(kind="stash", rate_updates=3)),
        "stages that share weights have different delays, and their copies would get different updates",
        "untie the weights, or use correction 'weight-prediction' or 'discrepancy' without version.rate_updates",
    ),
    (
        preset("late-share").plan.replace(version=Version(kind="late", correction="discrepancy")),
        "correction 'discrepancy' gives a backward newer weights than its forward, and under version 'late' both read"
        " the same",
        "use correction 'weight-prediction', 'delay-compensation' or 'none'",
    ),
    (
        preset("late-share").plan.replace(name="tied", version=Version(kind="late", correction="delay-compensation")),
        "correction 'delay-compensation' squares the gradient of a weight, and units that share it have only parts of"
        " that",
        "untie the weights, or use correction 'weight-prediction' or 'none'",
    ),
    (
        preset("late-share").plan.replace(version=Version(kind="late", delay=2, correction="delay-compensation")),
        "correction 'delay-compensation' needs the newest weights, which a CPU replica with a delay of 2 makes only"
        " after later shares, so all others would wait for those",
        "set version.delay to 1, or use correction 'weight-prediction' or 'none'",
    ),
    (
        preset("1f1b").plan.replace(version=Version(kind="late")),
        "version 'late' gives older weights to CPU replicas, and the plan has none",
        "set place.cpu_replicas to 1 or more, as preset:late-share does, or version.kind to 'sync'",
    ),
    (
        preset("late-share").plan.replace(reduce=Reduce(wire="reduce-scatter")),
        "version 'late' adds the shares of all replicas to one sum, in a fixed order; wire 'reduce-scatter', gate"
        " 'barrier' and combiner 'sum' do not",
        "set reduce.wire to 'all-reduce', reduce.gate to 'barrier' and reduce.combiner to 'sum'",
    ),
    (
        preset("late-share").plan.replace(keep=Keep(kind="split")),
        "under version 'late' every replica makes all updates itself, which keep 'split' or place.stage_replicas would"
        " divide",
        "set keep.kind to 'replicated' and leave place.stage_replicas out, or use version 'sync'",
    ),
    (
        preset("late-share").plan.replace(
            precision=Precision(compute="fp16", masters="fp32"), reduce=Reduce(wire="all-reduce", clip="global")
        ),
        "under version 'late' a share begins before the previous update is made, so replicas have no common loss scale"
        " for fp16 and no common moment to broadcast running statistics",
        "set precision.compute to 'bf16' or 'fp32' and switch reduce.has_buffer_broadcast off, or use version 'sync'",
    ),
    (
        preset("stationary-x").plan.replace(name="dense"),
        "layout 'stationary-x' divides the filters and channels of convolutions, and model 'model' has no convolution",
        "use preset:megatron, or a model with convolutions",
    ),
    (
        preset("megatron").plan.replace(name="dense"),
        "layout 'head, row, col' divides pairs of layers, of which one sums over the other's outputs, and model 'model'"
        " has 1 matrix products and 0 convolutions",
        "use preset:ddp, or a model with more layers",
    ),
    (
        preset("context").plan.replace(name="dense"),
        "layout 'context' divides the sequence of attentions, and model 'model' has none",
        "use another plan, such as preset:ddp, or a model with attention",
    ),
    (
        Plan(cut=Cut(capacity=1.25)),
        "cut.capacity limits the rows of experts, and cut 'whole(1.25)' divides none",
        "leave cut.capacity out, or use layout 'expert'",
    ),
    (
        megatron("sequence"),
        "cut 'sequence' divides the sequence or vocabulary beside heads, columns and rows, and has none of these",
        "add 'head', 'row', 'col' and 'row' to cut.layouts, or use layout 'context'",
    ),
    (
        megatron("context", "col"),
        "layout 'context' divides all activations along the sequence, and cut 'context col' divides them otherwise too",
        "leave the other layouts out, or use 'sequence' in place of 'context'",
    ),
    (
        preset("1f1b").plan.replace(cut=Cut(kind="chain", layouts=("sequence",))),
        "cut 'chain sequence' divides activations over the workers of tensor-parallel groups, and the place has none",
        "set place.stage_shards, or leave cut.layouts out",
    ),
    (
        preset("1f1b").plan.replace(cut=Cut(kind="chain", layouts=("col",))),
        "cut 'chain col' names layouts of operators, which a chain finds in its tensor-parallel groups without names",
        "leave all but 'sequence', 'vocabulary' and 'context' out of cut.layouts, or set cut.kind to 'layout'",
    ),
    (
        megatron("col", "row", "vocabulary", "stationary-x"),
        "cut 'col row vocabulary stationary-x' divides both channels of pictures and tokens",
        "leave one of the two out of cut.layouts",
    ),
    (
        megatron("head", "row", "col", "row", "vocabulary").replace(order=Order(head_chunks=4)),
        "layout 'vocabulary' computes a cross-entropy of parts of the logits, and 4 chunks of the head need all",
        "leave order.head_chunks out, or use layout 'sequence' without 'vocabulary'",
    ),
]


def told(plan: Plan, profile) -> tuple[str, ...]:
    with pytest.raises(FaultsError) as caught:
        check_plan(plan, profile)
    assert caught.value.subject == f"plan '{plan.name}'"
    return caught.value.faults


def profile_for(plan: Plan, model):
    profile = model(8, tie=(0, 7)) if plan.name == "tied" else model(8)
    if plan.name == "dense":
        none = {"expert_share": 0.0, "num_experts": 0, "num_convolutions": 0, "num_products": 0, "num_attentions": 0}
        first, *others = (unit.replace(**none) for unit in profile.units)
        profile = profile.replace(units=(first.replace(num_products=1), *others))
    return profile


@pytest.mark.parametrize(("plan", "reason", "remedy"), BROKEN, ids=[reason[:60] for _, reason, _ in BROKEN])
def test_a_broken_rule_says_why_and_what_to_change(plan, reason, remedy, model):
    assert f"{reason}; {remedy}" in told(plan, profile_for(plan, model))


@pytest.mark.parametrize("rule", RULES, ids=[rule.reason[:60] for rule in RULES])
def test_every_rule_is_broken_by_one_of_the_plans_above(rule, model):
    assert any(rule.breaks(plan, profile_for(plan, model)) for plan, _, _ in BROKEN)


@pytest.mark.parametrize("name", presets())
def test_no_preset_breaks_a_rule(name, model):
    check_plan(presets()[name].plan, model(8))


def test_all_broken_rules_are_reported_at_once(model):
    plan = preset("zb-v").at(workers=4, microbatches=2).replace(is_compiled=True)
    assert len(told(plan, model(8))) == 2


@pytest.mark.parametrize("plan", [plan for plan, _, _ in BROKEN], ids=[plan.name for plan, _, _ in BROKEN])
def test_a_plan_that_breaks_a_rule_is_never_compiled(plan, model, computer):
    with pytest.raises(InputError):
        compile_plan(plan, profile_for(plan, model), computer(16))


# The ten illegal combinations that the definitions end with, in their order.


def test_illegal_1_several_versions_of_weights_that_are_updated_in_place(model):
    for name in ("pipedream", "pipedream-vertical", "pipedream-2bw"):
        plan = preset(name).plan.replace(keep=Keep(versions=1))
        assert any("an update in place has already overwritten" in fault for fault in told(plan, model(8)))


def test_illegal_2_an_endless_pipeline_that_clips_by_the_global_norm(model, build):
    clip = Reduce(wire="all-reduce", clip="global")
    for name in ("pipedream", "pipedream-vertical", "pipedream-2bw"):
        assert any("no norm to clip by" in fault for fault in told(preset(name).plan.replace(reduce=clip), model(8)))
    verify(build("pipedream", microbatches=6, reduce=clip.replace(clip="delayed")))


def test_illegal_3_zeno_after_a_wire_that_sums(model):
    for wire in ("all-reduce", "reduce-scatter", "summation-service"):
        plan = preset("zeno").plan.replace(reduce=Reduce(wire=wire, combiner="score-trim"))
        assert any(f"wire '{wire}' hands over their sum" in fault for fault in told(plan, model(8)))


def test_illegal_4_zero_3_in_a_pipeline_unless_weights_persist(model, build):
    scatter, keep = Reduce(wire="reduce-scatter"), Keep(kind="zero-3")
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved"):
        plan = preset(name).plan.replace(reduce=scatter, keep=keep)
        assert any("gathers all weights again" in fault for fault in told(plan, model(8)))
        verify(build(name, workers=2, microbatches=4, replicas=2, reduce=scatter, keep=keep.replace(persists=True)))


def test_illegal_5_zero_2_with_an_update_for_each_microbatch(model):
    plan = preset("pipedream").plan.replace(keep=Keep(kind="zero-2"), reduce=Reduce(wire="reduce-scatter"))
    assert any("updates its shards in place" in fault for fault in told(plan, model(8)))


@pytest.mark.parametrize("name", ["chimera", "gems-mast", "gems-master", "gems-hy"])
def test_illegal_6_two_directions_over_an_odd_number_of_workers(name, model):
    assert any("5 is odd" in fault for fault in told(preset(name).at(workers=5), model(8)))


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe-v"])
def test_illegal_7_a_split_backward_with_compiled_stages(name, model):
    plan = preset(name).plan
    check_plan(plan, model(8, tie=(0, 7)))
    assert any("compiled stages cannot do" in fault for fault in told(plan.replace(is_compiled=True), model(8)))
    check_plan(preset("1f1b").plan.replace(is_compiled=True), model(8, tie=(0, 7)))


def test_illegal_8_recompute_with_a_version_that_is_not_the_recorded_one(model, build):
    plan = preset("hogwild").plan.replace(order=Order(recompute=0.5))
    assert any("version 'torn' records none" in fault for fault in told(plan, model(8)))
    program = build("gpipe-recompute", workers=2, microbatches=2, steps=2)
    assert "R0.3@0 reads version 0, its forward read 1" in faults(edited(program, "R0.3@1", "R0.3@0"))


def test_illegal_9_an_asynchronous_reduction_that_broadcasts_running_statistics(model):
    for name in ("pipedream", "parameter-server", "hogwild", "easgd", "hetpipe"):
        plan = preset(name).plan
        plan = plan.replace(reduce=plan.reduce.replace(has_buffer_broadcast=True))
        assert any("no common moment to broadcast" in fault for fault in told(plan, model(8)))


def test_illegal_10_unequal_shares_that_are_averaged(model):
    for name in ("hyscale", "coarse"):
        plan = preset(name).plan.replace(reduce=Reduce(wire="all-reduce", combiner="average"))
        assert any("an average over replicas is wrong" in fault for fault in told(plan, model(8)))


# The graph.


def ancestors(graph):
    """Returns what each operation waits for, directly or not."""
    before: list[set[int]] = [set() for _ in graph.members]
    order, left = [op for op, n in enumerate(graph.num_before) if n == 0], graph.num_before.copy()
    for op in order:
        for after in graph.successors[op]:
            before[after] |= before[op] | {op}
            left[after] -= 1
            if left[after] == 0:
                order.append(after)
    assert len(order) == len(graph.members)
    return before


@pytest.mark.parametrize("name", presets())
def test_weights_are_dropped_only_after_all_their_readers(name, resize):
    program = compile_plan(*unit_costs(resize(name, 2, 4), {}), fold=False)
    graph = build_graph(program)
    before = ancestors(graph)
    for index, worker in enumerate(program.workers):
        readers: dict[tuple[int, int, int], list[int]] = {}
        for position, a in enumerate(worker.actions):
            op = graph.of_action[index][position]
            key = (a.piece, a.replica, a.version)
            if a.kind in ("F", "R", "B", "I"):
                readers.setdefault(key, []).append(op)
            elif a.kind == "DROP":
                assert set(readers.pop(key)) <= before[op], f"{a} of worker {index}"


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zero-r"])
def test_checkpoints_leave_after_the_forward_that_reads_them(name, resize):
    plan = resize(name, 2, 4)
    plan = plan.replace(order=plan.order.replace(recompute=1.0), keep=plan.keep.replace(activations="host"))
    program = compile_plan(*unit_costs(plan, {}), fold=False)
    graph = verify(program)
    before, num_left = ancestors(graph), 0
    for index, worker in enumerate(program.workers):
        forwards: dict[tuple[int, int], int] = {}
        for position, a in enumerate(worker.actions):
            op = graph.of_action[index][position]
            if a.kind == "F":
                forwards |= {(piece, a.microbatch): op for piece in program.inputs[a.piece]}
            elif a.kind == "OFFLOAD" and a.what == "x":
                assert forwards[a.piece, a.microbatch] in before[op], f"{a} of worker {index}"
                num_left += 1
    assert num_left
