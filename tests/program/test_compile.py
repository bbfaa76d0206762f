"""What `compile` makes of every preset, against the definition of the algorithm that the preset is named after."""

import json
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from pipedejavu.analysis import verify
from pipedejavu.analysis.size import Sizes
from pipedejavu.facts import FaultsError, InputError, Tie
from pipedejavu.plan import Keep, Order, Place, Plan, preset, presets
from pipedejavu.program import Action, ActionKind, Table
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import simulate, unit_costs

PIPELINES = (
    "model-parallel", "gpipe", "gpipe-recompute", "1f1b", "pipedream", "pipedream-vertical", "pipedream-2bw", "hippie",
    "gems-mast", "gems-master", "gems-hy", "chimera", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "hetpipe", "axonn",
    "fine",
)  # fmt: skip


def is_legal(name: str, p: int, m: int) -> bool:
    """What the definitions allow."""
    if name.startswith(("gems", "chimera")):
        return p % 2 == 0 and m >= 2 and (name != "gems-mast" or m % 2 == 0)
    return {
        "pipedream-2bw": m >= p - 1,
        "interleaved": m % p == 0,
        "zeno": p >= 2,
        **dict.fromkeys(("zero-1", "zero-2", "zero-3", "zero-r"), p >= 2),
        "zb-v": m >= 2 * p - 1,
        "dualpipe-v": m >= 2 * p,
    }.get(name, True)


def actions(program, kind, *whats):
    """All actions of a kind (and what), worker by worker."""
    return [[a for a in w.actions if a.kind == kind and (not whats or a.what in whats)] for w in program.workers]


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_legal_at_every_size_that_its_definition_allows(name, resize):
    sizes = [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 3, 5, 8)] + [(8, 4), (8, 7), (8, 16)]
    if presets()[name].grows == "none":
        sizes = [(1, m) for m in range(1, 10)]
    for p, m in sizes:
        for fold in (True, False):
            if is_legal(name, p, m):
                program = compile_plan(*unit_costs(resize(name, p, m), {}), fold=fold)
                verify(program)
                idle = program.plan.place.servers if program.copies > 1 else 0  # helpers that only sum
                assert len(program.workers) * program.copies == program.plan.num_workers - idle
            else:
                with pytest.raises(InputError):
                    compile_plan(*unit_costs(resize(name, p, m), {}), fold=fold)


def test_one_microbatch_cannot_go_both_ways(build):
    with pytest.raises(InputError, match="both ways, and an update has 1; use 2 microbatches or more"):
        build("gems-master", microbatches=1)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("name", [n for n, p in presets().items() if p.per_update is None])
def test_every_synchronous_preset_is_legal_over_several_updates(name, steps, resize):
    verify(compile_plan(*unit_costs(resize(name, 2, 4, steps=steps), {}), fold=False))


# Models that are not a chain.

SKIPS = [(n, n + 1) for n in range(7)] + [(n, n + 2) for n in range(6)]
# Units 0 to 3 encode, 4 to 7 decode, and each decoder reads what the encoder made.
ENCODER_DECODER = [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)] + [(3, n) for n in range(4, 8)]


@pytest.mark.parametrize("edges", [SKIPS, ENCODER_DECODER], ids=["skips", "encoder-decoder"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_model_with_skip_edges_compiles_on_every_pipeline(name, edges, model, computer, resize):
    plan = resize(name, 4, 8)
    machine = computer(plan.num_workers - plan.place.servers)
    for fold in (True, False):
        verify(compile_plan(plan, model(8, edges=edges), machine, fold=fold))


def test_an_output_goes_once_to_each_worker_that_reads_it(model, computer, resize):
    program = compile_plan(resize("1f1b", 4, 3), model(4, edges=[(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]), computer(4))
    sent = Counter((w, a.what, a.piece, a.peer) for w, sends in enumerate(actions(program, "SEND")) for a in sends)
    assert sent == {
        (0, "x", 0, 1): 3, (0, "x", 0, 2): 3, (0, "x", 0, 3): 3, (1, "x", 1, 3): 3, (2, "x", 2, 3): 3,
        (1, "g", 1, 0): 3, (2, "g", 2, 0): 3, (3, "g", 3, 0): 3, (3, "g", 3, 1): 3, (3, "g", 3, 2): 3,
    }  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "chimera", "pipedream-2bw", "axonn", "model-parallel"]
)
def test_tied_units_reduce_over_their_workers_once_an_update(name, replicas, model, computer, resize):
    if name == "model-parallel" and replicas > 1:
        pytest.skip("it has no wire for replicas")
    plan = resize(name, 4, 8, replicas=replicas, steps=2)
    program = compile_plan(plan, model(8, tie=(0, 7)), computer(plan.num_workers), fold=False)
    verify(program)
    homes = {}  # replica -> the workers of the first and the last piece
    for index in range(len(program.workers)):
        for piece, replica in program.held(index):
            if piece in (0, len(program.pieces) - 1):
                homes.setdefault(replica, set()).add(index)
    assert {n: set(g.workers) for n, g in program.groups.items() if n.startswith("tie")} == {
        f"tie0.{replica}": workers for replica, workers in homes.items()
    }
    for replica, workers in homes.items():
        for index in workers:
            line = [str(a) for a in program.workers[index].actions if a.kind in ("REDUCE", "UPDATE")]
            ties = [text for text in line if text.endswith(f"*tie0.{replica}")]
            assert [text.partition("@")[2][0] for text in ties] == ["0", "1"]
            end = 0 if (0, replica) in program.held(index) else len(program.pieces) - 1
            tag = f"{end}/{replica}" if replica else f"{end}"
            assert line.index(ties[0]) < line.index(next(t for t in line if t.startswith(f"UPDATE{tag}@1")))


def test_tied_units_on_one_piece_need_no_reduction(model, computer, resize):
    program = compile_plan(resize("1f1b", 2, 4), model(4, tie=(0, 1)), computer(2))
    verify(program)
    assert not program.groups


# Unequal devices.


@pytest.mark.parametrize("kinds", [["fast", "slow"], ["slow", "fast", "fast"], ["fast", "slow", "mid"], ["mid"] * 4])
def test_the_cut_makes_the_slowest_stage_as_fast_as_any_cut_can(kinds, model, computer, resize):
    speed = {"fast": 1.0, "mid": 1.7, "slow": 3.0}
    profile = model(9, kinds=speed | {"cpu": 9.0})
    program = compile_plan(resize("1f1b", len(kinds), 4), profile, computer(kinds))
    verify(program)

    def slowest(bounds):
        ends = pairwise((0, *bounds, 9))
        return max((end - start) * speed[kind] for (start, end), kind in zip(ends, kinds, strict=True))

    bounds = program.plan.cut.bounds
    assert slowest(bounds) == min(slowest(b) for b in combinations(range(1, 9), len(kinds) - 1))
    assert program.plan.decisions[0].choice == f"stages begin at units {', '.join(map(str, bounds))}"
    assert program.plan.decisions[0].reason == "the slowest stage's forward and backward time is least"


@pytest.mark.parametrize("name", presets())
def test_every_preset_runs_on_unequal_devices_without_folding(name, model, computer, resize):
    plan = resize(name, 4, 8)
    trainers = plan.num_workers - plan.place.servers - plan.place.cpu_replicas
    kinds = ["fast"] + ["slow"] * (trainers - 1)
    profile = model(12, kinds={"fast": 1.0, "slow": 2.0, "cpu": 5.0})
    program = compile_plan(plan, profile, computer(kinds))
    verify(program)
    if len(set(kinds)) > 1 and plan.pipeline_size < trainers:
        assert program.copies == 1


# Versions.


def read_versions(program):
    """The version that each (stage, microbatch) reads, checked to be the same forward and backward."""
    found = {}
    for worker in program.workers:
        for a in worker.actions:
            if a.kind in ("F", "B"):
                assert found.setdefault((program.pieces[a.piece].stage, a.microbatch), a.version) == a.version
    return found


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 6), (4, 8), (4, 2)])
def test_pipedream_reads_the_version_p_minus_1_minus_s_updates_back(build, p, m):
    program = build("pipedream", workers=p, microbatches=m)
    assert read_versions(program) == {(s, i): max(0, i - (p - 1 - s)) for s in range(p) for i in range(m)}


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 6), (4, 8), (4, 2)])
def test_vertical_sync_reads_stage_0_s_version_on_every_stage(build, p, m):
    program = build("pipedream-vertical", workers=p, microbatches=m)
    assert read_versions(program) == {(s, i): max(0, i - (p - 1)) for s in range(p) for i in range(m)}


@pytest.mark.parametrize(("p", "m", "steps"), [(4, 3, 4), (4, 8, 3), (2, 1, 6), (1, 2, 3)])
def test_2bw_reads_the_version_of_the_batch_before_last_on_every_stage(build, p, m, steps):
    program = build("pipedream-2bw", workers=p, microbatches=m, steps=steps)
    verify(program)
    assert read_versions(program) == {
        (s, i): max(0, i // m - 1) for s in range(p) for i in range(m * steps)
    }  # W(t+1) = W(t) − lr·∇f(W(t−1))


def test_2bw_needs_p_minus_1_microbatches(build):
    verify(build("pipedream-2bw", workers=4, microbatches=3))
    with pytest.raises(InputError, match="version 'double-buffer' needs an update of 4 − 1 microbatches or more"):
        build("pipedream-2bw", workers=4, microbatches=2)


def test_each_update_of_pipedream_is_applied_to_the_newest_weights(build):
    program = build("pipedream", workers=4, microbatches=8)
    for index, worker in enumerate(program.workers):
        done = [(a.kind, a.microbatch, a.version) for a in worker.actions if a.kind in ("B", "UPDATE")]
        backwards, updates = done[::2], done[1::2]
        assert [i for _, i, _ in backwards] == [*range(8)]
        assert updates == [("UPDATE", -1, t + 1) for t in range(8)]
        for t, update in enumerate(a for a in worker.actions if a.kind == "UPDATE"):
            assert ("w", index, 0, t, "") in Table(program)(update, index)[0]


def test_a_replicated_stage_takes_microbatches_in_turn_forward_and_backward(build):
    place = Place(workers=2, stage_replicas=(2, 1))
    plan = preset("pipedream").at(microbatches=8)
    plan = plan.replace(place=place, feed=plan.feed.replace(microbatches=2), steps=4)
    program = compile_plan(*unit_costs(plan, {}), fold=False)
    verify(program)
    assert program.groups["s0"].workers == (0, 1)
    for index in (0, 1):
        for kind in "FB":
            assert [a.microbatch for a in program.workers[index].actions if a.kind == kind] == [*range(index, 8, 2)]
    assert [a.microbatch for a in program.workers[2].actions if a.kind == "F"] == [*range(8)]


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved", "chimera", "ddp", "zero-3", "l2l", "fine"]
)
def test_synchronous_presets_read_update_t_s_weights_for_all_of_batch_t(name, resize):
    program = compile_plan(*unit_costs(resize(name, 4, 8, steps=3), {}), fold=False)
    for worker in program.workers:
        for a in worker.actions:
            if a.kind in ("F", "B", "I", "W", "R"):
                assert a.version == a.microbatch // program.update_size


# One algorithm each.


@pytest.mark.parametrize("m", [1, 3, 8])
def test_l2l_fetches_weights_twice_and_offloads_gradients_once_whatever_m_is(build, m):
    program = build("l2l", microbatches=m, steps=2)
    layers = len(program.pieces)
    fetched = Counter((a.piece, a.version) for a in actions(program, "FETCH", "w")[0])
    # The last layer's backward follows its forward at once, so it stays for both.
    assert fetched == {(n, t): 1 if n == layers - 1 else 2 for n in range(layers) for t in range(2)}
    assert Counter((a.piece, a.version) for a in actions(program, "OFFLOAD", "d")[0]) == {
        (n, t): 1 for n in range(layers) for t in range(2)
    }
    assert {a.via for a in actions(program, "UPDATE")[0]} == {"~host"}


def test_l2l_updates_a_layer_before_it_is_fetched_again(build):
    program = build("l2l", microbatches=2, steps=2)
    line = [str(a) for a in program.workers[0].actions]
    for layer in range(4):
        assert line.index(f"UPDATE{layer}@1~host") < line.index(f"FETCH:w{layer}@1")


@pytest.mark.parametrize("m", [1, 2, 5])
def test_zero_3_gathers_for_each_pass_and_scatters_each_gradient_once(build, m):
    program = build("zero-3", workers=4, microbatches=m)
    layers = len(program.pieces)
    for gathers, reductions, drops in zip(
        actions(program, "GATHER", "w"), actions(program, "REDUCE", "d"), actions(program, "DROP", "w"), strict=True
    ):
        # F 0…L−1 and B L−1…0 of each microbatch; where a layer comes twice in a row its weights stay.
        assert len(gathers) == m * (2 * layers - 2) + 1
        assert len(drops) == len(gathers)
        assert sorted(a.piece for a in reductions) == [*range(layers)]


def test_zero_3_that_persists_gathers_once_a_batch(build):
    keep = preset("zero-3").plan.keep.replace(persists=True)
    program = build("zero-3", workers=4, microbatches=5, keep=keep)
    verify(program)
    for gathers in actions(program, "GATHER", "w"):
        assert sorted(a.piece for a in gathers) == [*range(len(program.pieces))]


@pytest.mark.parametrize("name", ["zero-1", "zero-2"])
def test_zero_1_and_2_gather_the_new_weights_once_an_update(build, name):
    program = build(name, workers=4, microbatches=3, steps=2)
    wanted = [(n, t) for n in range(len(program.pieces)) for t in (1, 2)]
    for gathers, updates in zip(actions(program, "GATHER", "w"), actions(program, "UPDATE"), strict=True):
        assert sorted((a.piece, a.version) for a in gathers) == wanted
        assert sorted((a.piece, a.version) for a in updates) == wanted
        assert {a.via for a in updates} == {"~shard"}


def test_cotrain_updates_the_first_k_layers_on_the_device(build):
    layers = 4
    for k in range(layers + 1):
        program = build("cotrain", microbatches=2, steps=2, keep=Keep(kind="split", device_pieces=k))
        verify(program)
        on_host = {a.piece for a in actions(program, "UPDATE")[0] if a.via == "~host"}
        assert on_host == {*range(k, layers)}
        assert {a.piece for a in actions(program, "OFFLOAD")[0]} == on_host
        assert {a.piece for a in actions(program, "FETCH")[0]} == on_host


def test_cotrain_with_nothing_on_the_device_is_zero_offload_without_clipping(build):
    cotrain = build("cotrain", microbatches=3, steps=2, keep=Keep(kind="split", device_pieces=0))
    offload = build("zero-offload", microbatches=3, steps=2, reduce=preset("cotrain").plan.reduce)
    assert cotrain.to_text() == offload.to_text()


def test_zero_offload_updates_once_the_norm_of_all_gradients_is_known(build):
    line = [str(a) for a in build("zero-offload", microbatches=2).workers[0].actions]
    norm = line.index("REDUCE:n0@0*all")
    assert norm > max(n for n, text in enumerate(line) if text.startswith(("B", "OFFLOAD")))
    assert norm < min(n for n, text in enumerate(line) if text.startswith("UPDATE"))


@pytest.mark.parametrize("name", ["fine", "cotrain", "zero-offload", "axonn", "l2l", "stronghold"])
def test_only_gradients_go_from_the_device_to_the_host(name, resize):
    program = compile_plan(*unit_costs(resize(name, 4, 8), {}), fold=False)
    boundaries = {"x"} if name == "l2l" else set()
    assert {a.what for line in actions(program, "OFFLOAD") for a in line} == {"d"} | boundaries
    assert {a.what for line in actions(program, "FETCH") for a in line} == {"w"} | boundaries


def test_fine_updates_a_layer_while_earlier_layers_still_run_backward(build):
    program = build("fine", workers=4, microbatches=8)
    for index, worker in enumerate(program.workers):
        line = [(a.kind, a.piece) for a in worker.actions]
        last = max(p for p, _ in program.held(index))
        first = min(p for p, _ in program.held(index))
        assert line.index(("UPDATE", last)) < len(line) - 1 - line[::-1].index(("B", first))


@pytest.mark.parametrize("m", [1, 4])
def test_ddp_reduces_buckets_in_reverse_order_during_the_last_backward(build, m):
    program = build("ddp", workers=4, microbatches=m)
    for worker in program.workers:
        line = [(a.kind, a.piece) for a in worker.actions if a.kind in ("B", "REDUCE")]
        # `no_sync`: only the last microbatch reduces; each bucket once, as it becomes final.
        assert [p for kind, p in line if kind == "REDUCE"] == [3, 2, 1, 0]
        assert line.index(("REDUCE", 3)) < len(line) - 1 - line[::-1].index(("B", 0))
        assert line[-8:] == [(kind, p) for p in (3, 2, 1, 0) for kind in ("B", "REDUCE")]


def test_ddp_puts_gradients_into_buckets_of_the_given_size(model, computer, resize):
    plan = resize("ddp", 2, 1).replace(bucket_bytes=250)
    program = compile_plan(plan, model(8), computer(2))
    assert [[*p.units] for p in program.pieces] == [[0, 1], [2, 3, 4], [5, 6, 7]]  # filled from the back


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize(("n", "replicas", "m"), [(4, 2, 24), (2, 3, 16), (1, 2, 5)])
def test_hetpipe_s_staleness_stays_within_both_bounds_at_every_injection(build, n, replicas, m, bound):
    reduce = preset("hetpipe").plan.reduce.replace(bound=bound)
    program = build("hetpipe", workers=n, replicas=replicas, microbatches=m, reduce=reduce)
    verify(program)
    table, local = Table(program), n - 1
    for vw in range(replicas):
        for index in range(vw * n, vw * n + n):
            forwards = [a for a in program.workers[index].actions if a.kind == "F"]
            assert len(forwards) == m
            newest = -1  # of the waves that the weights hold
            for number, a in enumerate(forwards, 1):  # minibatches count from 1 in the paper
                pulled = [value[3] for value in table(a, index)[0] if value[0] == "c"]
                newest = max([newest, *pulled])
                assert number - 1 - a.version <= local
                missing = number - 1 - n * (newest + 1)  # of another virtual worker that is as far
                assert missing <= (bound + 1) * (local + 1) + local - 1
            assert newest == max(m // n - 2 - bound, -1)


def test_hetpipe_waits_for_every_member_s_wave_before_it_moves_on(build):
    program = build("hetpipe", workers=2, replicas=2, microbatches=8)
    server = len(program.workers) - 1
    table = Table(program)
    pushes = [table(a, server)[0] for a in program.workers[server].actions if a.kind == "UPDATE"]
    assert Counter(v[1:4] for reads in pushes for v in reads) == {
        (piece, replica, wave): 1 for piece in range(2) for replica in range(2) for wave in range(4)
    }
    pulls = [a for w in program.workers[:server] for a in w.actions if a.kind == "RECV" and a.what == "c"]
    assert pulls
    assert {a.peer for a in pulls} == {server}


def test_coarse_adds_the_cpu_s_gradients_to_each_stage_s(build):
    program = build("coarse", workers=4, microbatches=8)
    assert {name: g.workers for name, g in program.groups.items()} == {f"s{s}": (s, 4) for s in range(4)}
    shares = program.plan.feed.shares
    counts = [len({a.microbatch for a in w.actions if a.kind == "F"}) for w in program.workers]
    assert counts == [round(8 * shares[0])] * 4 + [round(8 * shares[1])]
    assert counts[0] + counts[4] == 8
    assert [a.piece for a in actions(program, "REDUCE")[4]] == [3, 2, 1, 0]


def test_coarse_with_nothing_for_the_cpu_is_1f1b(build):
    feed = preset("coarse").plan.feed.replace(shares=(1.0, 0.0), microbatches=8)
    coarse, plain = build("coarse", workers=4, feed=feed), build("1f1b", workers=4, microbatches=8)
    verify(coarse)
    assert coarse.workers[:4] == plain.workers
    assert coarse.workers[4].actions == ()


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.75), (0.9, 0.1), (0.0, 1.0)])
def test_coarse_gives_every_microbatch_to_one_side(build, shares):
    feed = preset("coarse").plan.feed.replace(shares=shares, microbatches=8)
    program = build("coarse", workers=2, feed=feed)
    verify(program)
    taken = [{a.microbatch for a in w.actions if a.kind == "F"} for w in program.workers]
    assert sorted([*taken[0], *taken[2]]) == [*range(8)]
    assert abs(len(taken[2]) - 8 * shares[1]) <= 0.5


def test_the_parameter_server_replies_to_every_push(build):
    program = build("parameter-server", workers=3, microbatches=4)
    verify(program)
    for index, worker in enumerate(program.workers[:3]):
        line = [(a.kind, a.what, a.version) for a in worker.actions if a.kind in ("SEND", "RECV")]
        assert line == [step for t in range(4) for step in (("SEND", "d", t), ("RECV", "w", t + 1))], index
        assert not [a for a in worker.actions if a.kind == "UPDATE"]
    updates = Counter((a.replica, a.version) for a in program.workers[3].actions if a.kind == "UPDATE")
    assert updates == {(q, t): 1 for q in range(3) for t in (1, 2, 3, 4)}
    assert program.workers[3].picks_ready  # whoever comes first gets the lock


def test_round_robin_easgd_uses_old_values_on_both_sides(build):
    program = build("easgd", workers=3, microbatches=4)
    verify(program)
    table, center = Table(program), 3
    for t in range(4):
        for j in range(3):
            turn = 3 * t + j
            worker = next(a for a in program.workers[j].actions if a.kind == "UPDATE" and a.version == t + 1)
            reads = table(worker, j)[0]
            assert ("w", 0, j, t, "") in reads
            assert ("w", 0, center, turn, "") in reads
            server = [a for a in program.workers[3].actions if a.kind == "UPDATE"][turn]
            assert set(table(server, 3)[0]) == {("w", 0, center, turn, ""), ("w", 0, j, t, "")}
            assert server.version == turn + 1


def test_synchronous_easgd_moves_the_centre_by_all_workers_at_once(build):
    program = build("easgd-sync", workers=3, microbatches=4)
    verify(program)
    table = Table(program)
    updates = [a for a in program.workers[3].actions if a.kind == "UPDATE"]
    assert [set(table(a, 3)[0]) for a in updates] == [
        {("w", 0, 3, t, ""), *(("w", 0, j, t, "") for j in range(3))} for t in range(4)
    ]
    for j in range(3):
        for t, a in enumerate(a for a in program.workers[j].actions if a.kind == "UPDATE"):
            assert {("w", 0, j, t, ""), ("w", 0, 3, t, "")} <= set(table(a, j)[0])


@pytest.mark.parametrize("name", ["gems-mast", "gems-master", "chimera"])
def test_two_directions_reduce_over_mirrored_pairs(build, name):
    program = build(name, workers=4, microbatches=8)
    assert {n: set(g.workers) for n, g in program.groups.items()} == {f"s{s}": {s, 3 - s} for s in range(4)}
    for index in range(4):
        stages = {(program.pieces[p].stage, q) for p, q in program.held(index)}
        assert stages == {(index, 0), (3 - index, 1)}


def test_gems_hy_reduces_over_all_pairs_of_all_groups(build):
    program = build("gems-hy", workers=4, microbatches=8)
    assert {n: set(g.workers) for n, g in program.groups.items()} == {
        f"s{s}": {s, 3 - s, 4 + s, 7 - s} for s in range(4)
    }


def test_zeno_scores_every_gradient_before_it_updates(build):
    program = build("zeno", workers=3, microbatches=2, steps=2)
    line = [(a.kind, a.replica, a.version) for a in program.workers[3].actions if a.kind in ("EVAL", "UPDATE")]
    assert line == [
        ("EVAL", 0, 0), ("EVAL", 1, 0), ("EVAL", 2, 0), ("UPDATE", 0, 1),
        ("EVAL", 0, 1), ("EVAL", 1, 1), ("EVAL", 2, 1), ("UPDATE", 0, 2),
    ]  # fmt: skip
    assert not [a for line in actions(program, "REDUCE") for a in line]  # nothing may sum before


def test_hogwild_needs_no_transfer_and_names_no_version(build):
    program = build("hogwild", workers=3, microbatches=4)
    kinds = {a.kind for w in program.workers for a in w.actions}
    assert kinds == {"F", "B", "UPDATE"}
    assert {a.version for w in program.workers for a in w.actions if a.kind in "FB"} == {-1}


@pytest.mark.parametrize("m", [3, 4, 9])
def test_distreal_averages_weights_every_fourth_update(build, m):
    program = build("distreal", workers=4, microbatches=m)
    verify(program)
    for line in actions(program, "REDUCE"):
        assert [(a.what, a.version) for a in line] == [("w", t) for t in range(4, m + 1, 4)]


def test_byteps_sums_with_the_help_of_servers_that_only_sum(build):
    program = build("byteps", workers=4, microbatches=2)
    assert program.groups["s0"].workers == (0, 1, 2, 3)
    assert program.groups["s0"].helpers == (4,)
    reduced = [str(a) for a in program.workers[0].actions if a.kind == "REDUCE"]
    assert len(reduced) == len(program.pieces) * program.plan.steps
    assert [str(a) for a in program.workers[4].actions] == [text.replace("REDUCE", "SUM") for text in reduced]
    verify(program)


def test_a_server_that_does_not_sum_what_its_group_reduces_is_a_fault(build):
    program = build("byteps", workers=2, microbatches=1)
    (*workers, server) = program.workers
    for actions, text in (
        (server.actions[1:], "its group [0, 1, 2]"),
        (tuple(a._replace(kind=ActionKind.REDUCE) for a in server.actions), "members of one collective differ"),
    ):
        with pytest.raises(FaultsError) as refused:
            verify(program.with_workers((*workers, replace(server, actions=actions))))
        assert text in str(refused.value)


def test_hyscale_brings_data_in_two_batches_ahead(build):
    program = build("hyscale", workers=2, microbatches=9)
    for index, worker in enumerate(program.workers):
        line = [(a.kind, a.microbatch) for a in worker.actions if a.kind in ("F", "FETCH")]
        assert sorted(i for kind, i in line if kind == "FETCH") == sorted(i for kind, i in line if kind == "F"), index
        fetched = run = 0
        for kind, _ in line:
            fetched, run = fetched + (kind == "FETCH"), run + (kind == "F")
            assert run <= fetched <= run + 3  # the one that trains next, and two ahead of it


def test_stronghold_holds_no_more_pieces_than_window_and_prefetch(build):
    for window, prefetch in ((1, 0), (1, 1), (2, 1), (3, 2)):
        plan = preset("stronghold").plan
        keep, order = plan.keep.replace(window=window), plan.order.replace(prefetch=prefetch)
        program = build("stronghold", microbatches=3, steps=2, keep=keep, order=order)
        verify(program)
        there, most = set(), 0
        for a in program.workers[0].actions:
            if a.kind == "FETCH":
                there.add(a.piece)
            elif a.kind == "DROP":
                there.discard(a.piece)
            most = max(most, len(there))
        assert most == min(window + prefetch, 4)


def test_axonn_injects_one_microbatch_for_each_that_has_finished(build):
    program = build("axonn", workers=4, microbatches=8)
    assert [w.picks_ready for w in program.workers] == [True, True, True, False]
    assert [w.live_limit for w in program.workers] == [4, 0, 0, 0]
    last = [(a.kind, a.microbatch) for a in program.workers[3].actions if a.kind in "FB"]
    assert last == [(kind, k) for k in range(8) for kind in "FB"]


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("megatron", set(), set()),  # its sums are inside of forwards and backwards
        ("moe", {"GATHER", "REDUCE"}, {"GATHER", "REDUCE"}),
    ],
)
def test_divided_operators_talk_where_their_layout_says(build, name, forward, backward):
    program = build(name, workers=4, microbatches=1)
    assert program.groups["t0.0"].workers == (0, 1, 2, 3)
    for worker in program.workers:
        kinds = {what: {a.kind for a in worker.actions if a.what == what} for what in "xg"}
        assert kinds == {"x": forward, "g": backward}


@pytest.mark.parametrize("m", [1, 4])
def test_gpipe_recomputes_every_stage_of_every_microbatch_once(build, m):
    program = build("gpipe-recompute", workers=3, microbatches=m)
    for worker in program.workers:
        line = [(a.kind, a.microbatch) for a in worker.actions if a.kind in "RB"]
        assert line == [(kind, k) for k in reversed(range(m)) for kind in "RB"]


def test_units_that_are_named_recompute_and_others_keep_what_they_saved(model, computer):
    order = Order(kind="1f1b", recompute_units=(0, 2, 3), is_eager=True)
    plan = preset("1f1b").at(workers=2, microbatches=3).replace(order=order, bucket_bytes=1)
    program = compile_plan(plan, model(4), computer(2))
    verify(program)
    assert program.recomputed == ((0,), (), (2,), (3,))
    again = [{a.piece for a in worker.actions if a.kind == "R"} for worker in program.workers]
    assert again == [{0}, {2, 3}]
    kept = Table(program)(Action("F", 1, 0, 0, 0), 0)[1]
    assert [value[0] for value in kept] == ["x", "s"]
    assert [value[0] for value in Table(program)(Action("F", 0, 0, 0, 0), 0)[1]] == ["x"]


@pytest.mark.parametrize(("share", "first", "second"), [(0.2, 1, 1), (0.4, 2, 2), (0.5, 3, 2), (1.0, 5, 4)])
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_share_is_of_the_first_units_of_each_stage(model, computer, share, first, second, is_eager):
    order = Order(kind="1f1b", recompute=share, is_eager=is_eager)
    plan = preset("1f1b").at(workers=2, microbatches=2)
    plan = plan.replace(cut=plan.cut.replace(bounds=(5,)), order=order, bucket_bytes=1)
    program = compile_plan(plan, model(9), computer(2))
    verify(program)
    assert len(program.pieces) == (9 if is_eager else 2)
    again = (*range(first), *range(5, 5 + second))
    assert [u for units in program.recomputed for u in units] == [*again]
    named = compile_plan(
        plan.replace(order=Order(kind="1f1b", recompute_units=again, is_eager=is_eager)), model(9), computer(2)
    )
    assert named.to_text() == program.to_text()
    assert simulate(named).makespan_s == simulate(program).makespan_s
    assert [w.peak_bytes for w in simulate(named).workers] == [w.peak_bytes for w in simulate(program).workers]


@pytest.mark.parametrize(("units", "expected"), [((2, 4), "xswg"), ((4,), "swg"), ((2, 3, 4, 5), "xwg")])
def test_what_runs_again_reads_what_it_starts_from(model, computer, units, expected):
    plan = preset("gpipe").at(workers=3, microbatches=2)
    plan = plan.replace(cut=plan.cut.replace(bounds=(2, 6)), order=Order(kind="gpipe", recompute_units=units))
    program = compile_plan(plan, model(7), computer(3))
    verify(program)
    assert "".join(value[0] for value in Table(program)(Action("R", 1, 0, 0, 0), 1)[0]) == expected


@pytest.mark.parametrize(
    ("order", "kept", "in_forward"),
    [
        ({"recompute": 1.0}, 0.0, 200.0 + 17.0),
        ({"recompute_units": (0, 1, 2, 3)}, 0.0, 200.0 + 17.0),
        ({"recompute_units": (1,)}, 150.0 + 10.0, 17.0),
        ({"recompute_units": (1, 2, 3)}, 50.0 + 10.0, 200.0 + 17.0 - 60.0),
        ({"recompute": 0.5}, 100.0, 17.0),
    ],
)
def test_what_is_there_while_a_piece_runs_depends_on_what_will_run_again(model, computer, order, kept, in_forward):
    """Four units that save 50 bytes each, hand 10 on and work with 7: what runs again goes when its row is through."""
    profile = model(4)
    profile = profile.replace(
        units=tuple(u.replace(parameter_parts=(100,), forward_work_bytes=7.0) for u in profile.units)
    )
    plan = preset("gpipe").at(workers=1, microbatches=2).replace(order=Order(kind="gpipe", **order))
    sizes = Sizes(compile_plan(plan, profile, computer(1)))
    assert (sizes.kept, sizes.saved) == ([kept], [200.0])
    assert sizes.workspace(Action("F", 0, 0, 0, 0), is_first=False) == in_forward
    assert sizes.workspace(Action("R", 0, 0, 0, 0), is_first=False) == 17.0


def test_recompute_waits_for_the_gradient_unless_it_is_early(build):
    order = preset("gpipe-recompute").plan.order
    for is_early in (False, True):
        program = build("gpipe-recompute", workers=2, microbatches=2, order=order.replace(recomputes_early=is_early))
        again = next(a for a in program.workers[0].actions if a.kind == "R")
        assert (("g", 1, 0, 1, "") in Table(program)(again, 0)[0]) == (not is_early)


# What a machine has no room for, and what the plan gets wrong.


def test_too_few_devices_are_named(model, computer, resize):
    with pytest.raises(InputError) as caught:
        compile_plan(resize("1f1b", 8, 8), model(8), computer(3))
    assert str(caught.value) == (
        "the plan needs 8 devices to train on, machine 'computer' has 4; use 4 workers or fewer, or a larger machine"
    )


def test_more_stages_than_units_are_refused(model, computer, resize):
    with pytest.raises(InputError) as caught:
        compile_plan(resize("interleaved", 4, 8), model(7), computer(4))
    assert str(caught.value) == (
        "the plan has 8 stages but profile 'model' has 7 units; use at most 7 stages (fewer workers or chunks)"
    )


@pytest.mark.parametrize("bounds", [(2, 2, 3), (3, 2, 5), (2, 4, 8)])
def test_bounds_must_rise_and_give_each_stage_a_unit(bounds, model, computer, resize):
    plan = resize("1f1b", 4, 4)
    with pytest.raises(InputError) as caught:
        compile_plan(plan.replace(cut=plan.cut.replace(bounds=bounds)), model(8), computer(4))
    assert str(caught.value) == f"cut bounds {list(bounds)} must rise strictly between 0 and the 8 units"


def test_bounds_must_make_as_many_stages_as_the_place_has(model, computer, resize):
    plan = resize("1f1b", 4, 4)
    with pytest.raises(InputError) as caught:
        compile_plan(plan.replace(cut=plan.cut.replace(bounds=(4,))), model(8), computer(4))
    assert str(caught.value) == "the plan's place has 4 stages, so cut.bounds needs 3 numbers, not 1"
    with pytest.raises(InputError, match="the plan cuts 8 stages, but its place has room for 4; leave cut"):
        compile_plan(plan.replace(cut=plan.cut.replace(stages=8)), model(8), computer(4))


def test_shares_must_be_one_for_each_replica(build):
    feed = preset("coarse").plan.feed.replace(shares=(0.5, 0.25, 0.25))
    with pytest.raises(InputError, match="the plan has 3 shares for 2 replicas; give one for each"):
        build("coarse", feed=feed)


def test_named_devices_are_taken_in_order_and_counted(model, computer, resize):
    plan = resize("1f1b", 2, 2)
    named = plan.replace(place=plan.place.replace(devices=("gpu2", "gpu0")))
    assert compile_plan(named, model(4), computer(3)).devices == ("gpu2", "gpu0")
    short = plan.replace(place=plan.place.replace(devices=("gpu2",)))
    with pytest.raises(InputError, match="the plan names 1 devices for 2 workers; name one for each"):
        compile_plan(short, model(4), computer(3))


MANY = 10**12


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        (
            "1f1b",
            {"feed": {"microbatches": MANY}},
            r"would have 4,000,000,000,000 forwards and backwards \(1,000",
        ),
        ("pipedream", {"steps": MANY}, "1 microbatches per update, 1,000,000,000,000 updates, 2 pieces"),
        (
            "parameter-server",
            {"place": {"servers": MANY}},
            "has 1,000,000,000,002 workers, servers included; use at",
        ),
        ("ddp", {"place": {"replicas": MANY}}, "has 1,000,000,000,000 workers, servers included; use at most 65,536"),
        ("interleaved", {"place": {"chunks": MANY}}, "has 2,000,000,000,000 stages but profile 'model' has 8 units"),
        (
            "coarse",
            {"feed": {"samples": MANY}},
            r"shares [\d,]+,000,000 samples of an update; share at most 1,000,000",
        ),
    ],
)
def test_what_is_too_large_is_refused_before_it_takes_memory(name, changes, sentence, model, computer, resize):
    form = json.loads(resize(name, 2, 2).to_json())
    for axis, change in changes.items():
        form[axis] = {**form.get(axis, {}), **change} if isinstance(change, dict) else change
    with pytest.raises(InputError, match=sentence):
        compile_plan(Plan.from_json(json.dumps(form)), model(8), computer(2))


def test_a_profile_of_too_many_units_is_refused(model, computer, resize):
    with pytest.raises(InputError, match="has 4,097 units, and at most 4,096 can be placed; profile larger parts"):
        compile_plan(resize("1f1b", 2, 2), model(4097), computer(2))


def test_pieces_of_a_pipeline_that_never_drains_are_clipped_together() -> None:
    plan = preset("pipedream-2bw").at(workers=2, microbatches=8)
    clipped = plan.reduce.replace(clip="delayed")
    again = plan.order.replace(recompute=1.0, checkpoints=(2,))
    plan, profile, machine = unit_costs(plan.replace(reduce=clipped, cut=plan.cut.replace(bounds=(1,))), {})
    unit = profile.units[0]
    profile = profile.replace(units=tuple(unit.replace(name=f"u{n}") for n in range(3)))
    program = compile_plan(plan.replace(order=again), profile, machine, fold=False)
    verify(program)
    for worker in program.workers:
        texts = [str(a) for a in worker.actions]
        norms = [text for text in texts if text.startswith("REDUCE:n")]
        assert len(norms) == len({*norms}) > 1


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_tied_pieces_of_a_pipeline_that_divides_gradients_do_not_wait_for_each_other(zero: int) -> None:
    """Regression: the sum of a tied parameter over stages counted as one that frees a whole gradient."""
    keep = Keep.model_validate({"kind": f"zero-{zero}", "persists": zero == 3})
    plan = preset("1f1b").at(workers=2, replicas=2, microbatches=1)
    plan = plan.replace(keep=keep, order=plan.order.replace(is_eager=True))
    plan = plan.replace(reduce=plan.reduce.replace(wire="reduce-scatter"), cut=plan.cut.replace(bounds=(1,)))
    plan, profile, machine = unit_costs(plan, {})
    unit = profile.units[0]
    units = tuple(unit.replace(name=f"u{n}") for n in range(8))
    tied = profile.replace(units=units, ties=(Tie(units=("u0", "u7"), size_bytes=1),))
    verify(compile_plan(plan, tied, machine, fold=False))
