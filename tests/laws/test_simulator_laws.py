"""Laws of the simulator: closed forms, bounds, monotony, sharing, and programs that are held once for many."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipedejavu.analysis import build_graph, verify
from pipedejavu.analysis.size import Sizes
from pipedejavu.facts import Cost, Device, Edge, Host, Link, Machine, Overlap, Profile, Unit, UnitTime
from pipedejavu.plan import Plan, preset
from pipedejavu.program import Program, Table
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import Prediction, simulate, unit_costs
from pipedejavu.simulate.action_cost import ActionCosts, shared_wires
from pipedejavu.simulate.clock import HostIssue, run_events, sweep

FREE = 1e30
quarters = st.integers(1, 40).map(lambda n: n / 4)  # exact in binary
laws = settings(derandomize=True, max_examples=60, deadline=None)

PIPELINES = (
    "gpipe", "gpipe-recompute", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "gems-master", "pipedream",
    "pipedream-vertical", "pipedream-2bw", "model-parallel", "hippie",
)  # fmt: skip
OTHERS = ("ddp", "zero-1", "zero-2", "zero-3", "zero-r", "l2l", "stronghold", "cotrain", "zero-offload", "fine",
          "megatron", "stationary-w", "easgd", "easgd-sync", "zeno", "distreal", "byteps", "hyscale")  # fmt: skip


def model(times: list[tuple[float, float]], *, size: int = 100, output: float = 10.0, skips: bool = False) -> Profile:
    """A unit for each (forward, backward) time."""
    units = tuple(
        Unit(
            name=f"u{n}",
            times={
                "gpu": UnitTime(
                    forward=Cost(fixed_s=forward),
                    backward=Cost(fixed_s=backward),
                    weight_backward=Cost(fixed_s=backward / 2),
                    recompute=Cost(fixed_s=forward),
                    update_s=0.25,
                )
            },
            parameter_bytes=size,
            gradient_bytes=size,
            optimizer_bytes=6 * size,
            activation_bytes=50.0,
            boundary_bytes=output,
        )
        for n, (forward, backward) in enumerate(times)
    )
    count = len(times)
    far = [(n, n + 1) for n in range(count - 1)] + [(n, n + 2) for n in range(count - 2)]
    edges = tuple(Edge(source=f"u{s}", target=f"u{t}") for s, t in far) if skips else None
    return Profile(name="model", units=units, edges=edges)


def computer(hosts: list[str], *links: Link, overlap: Overlap | None = None) -> Machine:
    """A GPU on each of the named hosts in turn, and a CPU on each."""
    names = sorted(set(hosts))
    devices = [Device(name=f"gpu{n}", kind="gpu", type="gpu", host=h, memory_bytes=2**40) for n, h in enumerate(hosts)]
    devices += [Device(name=f"cpu-{h}", kind="gpu", type="cpu", host=h, memory_bytes=2**40) for h in names]
    return Machine(
        name="computer",
        hosts=tuple(Host(name=h) for h in names),
        devices=tuple(devices),
        links=links,
        overlap=overlap or Overlap(),
    )


def run(plan: Plan, profile: Profile, machine: Machine, *, fold: bool = False) -> Prediction:
    program = compile_plan(plan, profile, machine, fold=fold)
    return simulate(program, verify(program))


def at(name: str, size: int, microbatches: int, **sizes: int) -> Plan:
    found = preset(name)
    return found.at(workers=None if found.grows == "none" else size, microbatches=microbatches, **sizes)


@cache
def example(name: str, cost: float = 0.0) -> Program:
    """A small program; transfers take about `cost` of a unit's forward, each pair on a wire of its own."""
    microbatches = 8 if name in ("zb-v", "interleaved", "chimera", "pipedream-2bw") else 4
    plan = at(name, 2, microbatches)
    profile = model([(1 + n % 3, 2 + n % 2) for n in range(8)])
    trainers = plan.num_workers - plan.place.servers - plan.place.cpu_replicas
    link = Link(bytes_per_s=10 / cost if cost else FREE, latency_s=cost / 8)
    return compile_plan(plan, profile, computer(["here"] * trainers, link), fold=False)


# Closed forms.


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12), quarters, quarters)
@laws
def test_a_balanced_pipeline_takes_m_plus_p_minus_1_times_forward_and_backward(name, p, m, forward, backward):
    program = compile_plan(*unit_costs(at(name, p, m), {"F": forward, "B": backward}))
    assert simulate(program, verify(program)).makespan_s == (m + p - 1) * (forward + backward)


@given(st.integers(2, 5), st.integers(1, 8), quarters, quarters, quarters)
@laws
def test_gpipe_with_transfers_runs_at_the_rate_of_the_slower_of_stage_and_link(p, m, forward, backward, cost):
    # The k-th activation reaches stage r at r(F + c) + k·max(F, c); the gradients come back in the same way.
    prediction = run(
        at("gpipe", p, m), model([(forward, backward)] * p), computer(["here"] * p, Link(bytes_per_s=10 / cost))
    )
    there = (p - 1) * (forward + cost) + (m - 1) * max(forward, cost) + forward
    back = (p - 1) * (backward + cost) + (m - 1) * max(backward, cost) + backward
    assert prediction.makespan_s == pytest.approx(there + back + 0.25, rel=1e-9)


@given(st.integers(1, 5), st.integers(1, 6), quarters, quarters, quarters, quarters)
@laws
def test_model_parallelism_adds_everything_up(p, m, forward, backward, latency, cost):
    link = Link(bytes_per_s=10 / cost, latency_s=latency)
    prediction = run(at("model-parallel", p, m), model([(forward, backward)] * p), computer(["here"] * p, link))
    one = p * (forward + backward) + 2 * (p - 1) * (latency + cost)
    assert prediction.makespan_s == pytest.approx(m * one + 0.25, rel=1e-9)


@given(st.integers(2, 6), st.integers(1, 5), quarters, quarters, quarters)
@laws
def test_data_parallelism_adds_a_ring_all_reduce(n, m, work, latency, cost):
    plan = at("ddp", n, m)
    plan = plan.replace(order=plan.order.replace(is_eager=False))
    link = Link(bytes_per_s=100 / cost, latency_s=latency)  # `cost` for the whole gradient
    prediction = run(plan, model([(work, 2 * work)]), computer(["here"] * n, link))
    ring = 2 * (n - 1) * (latency + cost / n)
    assert prediction.makespan_s == pytest.approx(m * 3 * work + ring + 0.25, rel=1e-9)


def by_sample(profile):
    """The same times for one sample, as work that a group divides, and not as fixed times, which stay."""
    units = []
    for unit in profile.units:
        parts = ("forward", "backward", "weight_backward", "recompute")
        times = {
            kind: time.replace(**{part: Cost(per_sample_s=getattr(time, part).fixed_s) for part in parts})
            for kind, time in unit.times.items()
        }
        units.append(unit.replace(times=times))
    return profile.replace(units=tuple(units))


def test_megatron_has_two_all_reduces_in_each_direction_of_a_block():
    plan, link = at("megatron", 4, 1), Link(bytes_per_s=1.0, latency_s=0.5)
    prediction = run(plan, by_sample(model([(1.0, 2.0), (1.0, 2.0)])), computer(["here"] * 4, link))
    ring = 2 * (4 - 1) * (0.5 + 10 / 4)
    times = {s.action: s.end_s - s.start_s for s in prediction.timeline().spans()}
    assert times["F0.0@0"] == pytest.approx(1.0 / 4 + 2 * ring)  # one after the attention's rows, one after the MLP's
    assert times["B1.0@0"] == pytest.approx(2.0 / 4 + 2 * ring)


def test_divided_sequences_have_the_collectives_of_a_block():
    link = Link(bytes_per_s=1.0, latency_s=0.5)
    gather, ring = (4 - 1) * (0.5 + 10 / 4), 2 * (4 - 1) * (0.5 + 10 / 4)
    exchange = (4 - 1) * (0.5 + 10 / 4 / 4)
    gradients = 2 * (4 - 1) * (0.5 + 100 / 4)
    wanted = {"sequence": (2 * ring, 2 * ring + 2 * gather), "context": (4 * exchange, 4 * exchange + gradients)}
    for name, (forward, backward) in wanted.items():
        profile = by_sample(model([(1.0, 2.0), (1.0, 2.0)]))
        prediction = run(at(name, 4, 1), profile, computer(["here"] * 4, link))
        times = {s.action: s.end_s - s.start_s for s in prediction.timeline().spans()}
        assert times["F0.0@0"] == pytest.approx(1.0 / 4 + forward)
        assert times["B1.0@0"] == pytest.approx(2.0 / 4 + backward)


@pytest.mark.parametrize(("name", "share"), [("sequence", 4), ("context", 1)])
def test_divided_sequences_divide_activations_and_context_parallelism_nothing_else(name, share):
    program = compile_plan(at(name, 4, 1), model([(1.0, 2.0)] * 3), computer(["here"] * 4, Link(bytes_per_s=1.0)))
    sizes = Sizes(program)
    assert sizes.weights == sizes.gradients == [100 / share] * 3
    assert sizes.optimizer == [600 / share] * 3
    assert sizes.saved == [50.0 / 4] * 3


@given(st.integers(2, 6), st.integers(1, 5))
@laws
def test_byteps_divides_the_load_as_published(n, k):
    plan = at("byteps", n, 1)
    plan = plan.replace(place=plan.place.replace(servers=k), order=plan.order.replace(is_eager=False))
    prediction = run(plan, model([(1.0, 2.0)]), computer(["here"] * n, Link(bytes_per_s=1.0)))
    (reduce,) = {s.end_s - s.start_s for s in prediction.timeline().spans() if s.action.startswith("REDUCE")}
    on_cpus, on_gpus = 2 * (n - 1) / (n * n + k * n - 2 * k), (n - k) / (n * n + k * n - 2 * k)
    assert k * on_cpus + n * on_gpus == pytest.approx(1)
    if k <= n:
        # A GPU machine sends what others sum, and sends out what it has summed itself.
        sent = k * on_cpus + (n - 1) * on_gpus + (n - 1) * on_gpus
        assert reduce == pytest.approx(100 * sent)


# Bounds.


def longest_path(program: Program, durations: dict[tuple[int, int], float]) -> float:
    """The earliest end of a program, relaxed until nothing moves: from values, partners and lanes alone."""
    table = Table(program)
    deps: dict[tuple[int, int], set[tuple[int, int]]] = {}
    partners: dict[object, list[tuple[int, int]]] = {}
    seen: Counter[object] = Counter()
    for w, worker in enumerate(program.workers):
        wrote: dict[object, set[tuple[int, int]]] = {}
        tails: dict[str, tuple[int, int]] = {}
        for n, a in enumerate(worker.actions):
            key = (w, n)
            reads, writes, adds = table(a, w)
            deps[key] = {before for value in reads for before in wrote.get(value, ())}
            for value in writes:
                wrote[value] = {key}
            for value in adds:
                wrote[value] = wrote.get(value, set()) | {key}
            if a.lane in tails:
                deps[key].add(tails[a.lane])
            tails[a.lane] = key
            if a.kind in ("SEND", "RECV"):
                ends = (w, a.peer) if a.kind == "SEND" else (a.peer, w)
                partners.setdefault((ends, a.what, a.piece, a.replica, a.microbatch, a.version), []).append(key)
            elif a.via.startswith("*"):
                name = (a.via, a.kind, a.what, a.piece, a.microbatch, a.version)
                seen[w, name] += 1  # weights that come and go are gathered again and again
                partners.setdefault((name, seen[w, name]), []).append(key)
    together = {key: keys for keys in partners.values() for key in keys}
    end = dict.fromkeys(deps, 0.0)
    is_moving = True
    while is_moving:
        is_moving = False
        for key in deps:
            start = max((end[b] for k in together.get(key, [key]) for b in deps[k]), default=0.0)
            if start + durations[key] > end[key]:
                end[key] = start + durations[key]
                is_moving = True
    return max(end.values())


def costs_of(program: Program) -> dict[tuple[int, int], float]:
    graph = build_graph(program)
    works = ActionCosts(program).of(graph)
    return {
        (w, n): works[op].latency_s + works[op].time_s
        for w, ops in enumerate(graph.of_action)
        for n, op in enumerate(ops)
    }


def shares(program: Program) -> bool:
    """Whether a transfer and a ring, or two rings, pass the same wire."""
    graph = build_graph(program)
    return bool(shared_wires(program, graph, ActionCosts(program).of(graph)))


@pytest.mark.parametrize("cost", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("name", PIPELINES + OTHERS)
def test_nothing_ends_before_its_critical_path(name, cost):
    program = example(name, cost)
    prediction, bound = simulate(program), longest_path(program, costs_of(program))
    assert prediction.makespan_s >= bound * (1 - 1e-12)
    waits_for_room = any(a.kind == "DROP" for w in program.workers for a in w.actions)
    if not waits_for_room and not shares(program):  # then values and lanes are all that an action waits for
        assert prediction.makespan_s == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize("name", [*PIPELINES, *OTHERS, "axonn", "parameter-server", "hetpipe", "hogwild", "coarse"])
def test_no_worker_is_busier_than_the_makespan(name):
    prediction = simulate(example(name, 0.5))
    work = costs_of(prediction.program)
    for index, worker in enumerate(prediction.program.workers):
        computed = sum(work[index, n] for n, a in enumerate(worker.actions) if a.lane == "compute")
        assert prediction.busy_s[index] == pytest.approx(computed)
        assert prediction.busy_s[index] <= prediction.makespan_s
    assert 0 <= prediction.bubble_fraction < 1


# Speed.


@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved", "chimera", "pipedream", "fine", "zero-3", "ddp", "l2l"]),
    st.integers(0, 7),
    st.floats(1, 10),
    st.sampled_from(["unit", "link", "latency"]),
)
@laws
def test_slower_parts_never_make_a_fixed_program_faster(name, unit, factor, part):
    # In-order lanes without shared wires: every start is a maximum over ends, so longer durations move it later.
    # With shared wires or first come, first served this does not hold (Graham's anomalies).
    program = example(name, 0.5)
    slow = program
    if part == "unit":
        times = {
            kind: UnitTime(
                forward=Cost(fixed_s=t.forward.fixed_s * factor),
                backward=Cost(fixed_s=t.backward.fixed_s * factor),
                weight_backward=Cost(fixed_s=t.weight_backward.fixed_s),
                recompute=Cost(fixed_s=t.recompute.fixed_s * factor),
                update_s=t.update_s * factor,
            )
            for kind, t in program.profile.units[unit].times.items()
        }
        units = [*program.profile.units]
        units[unit] = units[unit].replace(times=times)
        slow = replace(program, profile=Profile(name="slow", units=tuple(units)))
    else:
        link = program.machine.links[0]
        changes = {"latency_s": link.latency_s * factor} if part == "latency" else {}
        changes |= {"bytes_per_s": link.bytes_per_s / factor} if part == "link" else {}
        slow = replace(program, machine=program.machine.replace(links=(link.replace(**changes),)))
    assert simulate(slow).makespan_s >= simulate(program).makespan_s * (1 - 1e-12)


@pytest.mark.parametrize("name", [*PIPELINES, *OTHERS, "axonn", "parameter-server", "hetpipe"])
def test_the_same_program_gives_the_same_timeline(name):
    program = example(name, 0.5)
    first, second = simulate(program), simulate(program, verify(program))
    assert first.timeline() == second.timeline()


@pytest.mark.parametrize("cost", [0.5, 3.0])
@pytest.mark.parametrize("name", PIPELINES + OTHERS)
def test_sweep_and_the_events_agree_where_nothing_is_shared(name, cost):
    program = example(name, cost)
    graph = build_graph(program)
    works = ActionCosts(program).of(graph)
    start, end = sweep(graph, [work.latency_s + work.time_s for work in works])
    events = run_events(graph, works, frozenset(), Overlap())
    assert events[0] == pytest.approx(start, rel=1e-12)
    assert events[1] == pytest.approx(end, rel=1e-12)


@pytest.mark.parametrize("name", PIPELINES + OTHERS)
def test_a_host_that_issues_compute_makes_it_no_longer_than_each_action_alone_would_be(name):
    program = example(name, 0.5)
    issues = {"forward": 1.5, "backward": 0.4, "weight_backward": 0.7, "recompute": 1.5}

    def issued(time: UnitTime) -> UnitTime:
        return time.replace(**{part: getattr(time, part).replace(issue_s=issue_s) for part, issue_s in issues.items()})

    units = tuple(u.replace(times={kind: issued(t) for kind, t in u.times.items()}) for u in program.profile.units)
    late = replace(program, profile=program.profile.replace(units=units))
    graph = build_graph(late)
    works = ActionCosts(late).of(graph)
    assert any(work.issue_s for work in works)
    start, end = sweep(graph, [work.latency_s + work.time_s for work in works], HostIssue.of(graph, works))
    events = run_events(graph, works, frozenset(), Overlap())
    assert events[0] == pytest.approx(start, rel=1e-12)
    assert events[1] == pytest.approx(end, rel=1e-12)
    _, most = sweep(graph, [work.latency_s + max(work.time_s, work.issue_s) for work in works])
    _, least = sweep(graph, [work.latency_s + work.time_s for work in works])
    assert max(least) <= max(end) <= max(most) * (1 + 1e-12)


@pytest.mark.parametrize("name", PIPELINES + OTHERS)
def test_replaying_a_timeline_s_own_durations_reproduces_it(name):
    program = example(name, 0.5)
    bus = program.machine.links[0].replace(wires=("bus",))
    program = replace(
        program, machine=program.machine.replace(links=(bus,), overlap=Overlap(compute=1.2, transfer=1.5))
    )
    prediction = simulate(program)
    graph = prediction.graph
    durations = [e - s for s, e in zip(prediction.start, prediction.end, strict=True)]
    start, end = sweep(graph, durations)
    assert start == pytest.approx(prediction.start, abs=1e-9)
    assert end == pytest.approx(prediction.end, abs=1e-9)


# Sharing.


def spans_of(prediction: Prediction, prefix: str) -> list[tuple[float, float]]:
    return [(s.start_s, s.end_s) for s in prediction.timeline().spans() if s.action.startswith(prefix)]


def test_two_equal_transfers_on_one_wire_take_twice_as_long():
    plan, profile = at("gpipe", 2, 1, replicas=2), model([(1.0, 2.0)] * 2)
    alone = run(plan, profile, computer(["here"] * 4, Link(bytes_per_s=10.0, latency_s=0.5)))
    assert spans_of(alone, "SEND:x") == [(1.0, 2.5)] * 2
    shared = run(plan, profile, computer(["here"] * 4, Link(bytes_per_s=10.0, latency_s=0.5, wires=("bus",))))
    assert spans_of(shared, "SEND:x") == [(1.0, 3.5)] * 2  # the latency is not shared


def test_a_transfer_that_comes_later_takes_half_of_the_wire_from_then_on():
    # Two pipelines, the second one's first stage 0.5 later; each transfer takes 1 alone.
    program = compile_plan(
        at("gpipe", 2, 1, replicas=2),
        model([(1.0, 2.0)] * 2),
        computer(["here"] * 4, Link(bytes_per_s=10.0, wires=("bus",))),
        fold=False,
    )
    slow = program.machine.devices[2].replace(kind="slow")
    machine = program.machine.replace(devices=(*program.machine.devices[:2], slow, *program.machine.devices[3:]))
    times = {"gpu": program.profile.units[0].times["gpu"]}
    times["slow"] = times["gpu"].replace(forward=Cost(fixed_s=1.5))
    units = tuple(unit.replace(times=times) for unit in program.profile.units)
    prediction = simulate(replace(program, machine=machine, profile=Profile(name="slow", units=units)))
    # The first has 0.5 left at 1.5 and ends at 2.5; the second then has 0.5 left, alone.
    assert spans_of(prediction, "SEND:x") == [(1.0, 2.5), (1.5, 3.0)]


def busy(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


@pytest.mark.parametrize("cost", [0.25, 2.0])
@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "zb-v", "chimera", "gems-master", "hippie", "zero-3", "easgd"]
)
def test_a_shared_wire_is_busy_for_as_long_as_its_bytes_take(name, cost):
    # Whoever is on the wire splits all of it, so it never idles while anything is under way.
    plan = at(name, 2, 8)
    trainers = plan.num_workers - plan.place.servers
    machine = computer(["here"] * trainers, Link(bytes_per_s=10 / cost, wires=("bus",)))
    prediction = run(plan, model([(1.0, 2.0)] * 8), machine)
    works = ActionCosts(prediction.program).of(prediction.graph)
    on_wire = [op for op, work in enumerate(works) if work.wires]
    spans = [(prediction.start[op], prediction.end[op]) for op in on_wire]
    assert busy(spans) == pytest.approx(sum(works[op].time_s for op in on_wire))


def test_a_ring_that_passes_a_wire_twice_loads_it_twice():
    # Workers on hosts a, b, a, b: two of the four hops leave each host by its one interface.
    plan = at("ddp", 4, 1)
    plan = plan.replace(order=plan.order.replace(is_eager=False))
    profile = model([(1.0, 2.0)])
    times = []
    for hosts in (["a", "b", "a", "b"], ["a", "b", "c", "d"]):
        machine = computer(hosts, Link(bytes_per_s=100.0, wires=("nic:{source_host}",)))
        ((start, end),) = set(spans_of(run(plan, profile, machine), "REDUCE"))
        times.append(end - start)
    assert times == pytest.approx([2 * 1.5, 1.5])


def test_overlap_slows_compute_and_transfer_while_both_run():
    machine = computer(["here"] * 2, Link(bytes_per_s=20.0), overlap=Overlap(compute=1.5, transfer=2.0))
    prediction = run(at("gpipe", 2, 2), model([(1.0, 2.0)] * 2), machine)
    spans = {s.action: (s.start_s, s.end_s) for s in prediction.timeline().spans()}
    # x0.0 takes 0.5 alone, and 1 beside F0.1, which gets 2/3 done meanwhile and ends 1/3 later.
    assert spans["SEND:x0.0>1"] == pytest.approx((1.0, 2.0))
    assert spans["F0.1@0"] == pytest.approx((1.0, 2 + 1 / 3))
    # x0.1 meets F1.0 (from 2 to 3, were it alone) on the other side: 1 s for x0.1, and 2/3 of it count for F1.0.
    assert spans["SEND:x0.1>1"] == pytest.approx((2 + 1 / 3, 3 + 1 / 3))
    assert spans["F1.0@0"] == pytest.approx((2.0, 3 + 1 / 3))


@given(st.sampled_from(["gpipe", "1f1b", "zero-3", "fine"]), st.floats(1, 3), st.floats(1, 3))
@laws
def test_overlap_slows_no_more_than_by_its_factors(name, compute, transfer):
    program = example(name, 0.5)
    slow = replace(program, machine=program.machine.replace(overlap=Overlap(compute=compute, transfer=transfer)))
    before, after = simulate(program).makespan_s, simulate(slow).makespan_s
    assert before * (1 - 1e-9) <= after <= before * max(compute, transfer) * (1 + 1e-9)


# Held once for many.


@given(
    st.sampled_from(["gpipe", "gpipe-recompute", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "gems-master",
                     "hippie", "pipedream", "pipedream-2bw", "axonn", "ddp", "zero-1", "zero-2", "zero-3", "zero-r"]),
    st.sampled_from([(2, 2), (2, 3), (4, 2)]),
    st.sampled_from(["a host for each stage", "a host for each pipeline", "one host"]),
    st.sampled_from(["{source}>{target}", "nic:{source_host}", "switch"]),
    st.sampled_from([20.0, 200.0]),
    st.booleans(),
)  # fmt: skip
@settings(derandomize=True, max_examples=150, deadline=None)
def test_a_folded_program_tells_the_same_as_the_whole(name, sizes, layout, wire, bytes_per_s, skips):
    p, replicas = sizes
    if preset(name).grows == "replicas":
        plan, p = at(name, replicas, 4), 1
    else:
        plan = at(name, p, 8, replicas=replicas)
    rows = [(copy, stage) for copy in range(replicas) for stage in range(p)]
    hosts = {
        "a host for each stage": [f"h{stage}" for _, stage in rows],
        "a host for each pipeline": [f"h{copy}" for copy, _ in rows],
        "one host": ["h0" for _ in rows],
    }[layout]
    here = Link(scope="same-host", bytes_per_s=4 * bytes_per_s, latency_s=0.001)
    if layout == "one host":
        here = here.replace(bytes_per_s=bytes_per_s, wires=(wire,))
    machine = computer(hosts, Link(scope="other-host", bytes_per_s=bytes_per_s, latency_s=0.01, wires=(wire,)), here)
    profile = model([(1 + n % 2, 2.0) for n in range(12)], skips=skips)
    folded, whole = run(plan, profile, machine, fold=True), run(plan, profile, machine)
    assume(folded.program.copies == replicas)
    assert folded.makespan_s == pytest.approx(whole.makespan_s)
    assert folded.bubble_fraction == pytest.approx(whole.bubble_fraction)
    count = len(folded.workers)
    for there in whole.workers:
        here_ = folded.workers[there.worker % count]
        assert here_.busy_s == pytest.approx(there.busy_s)
        assert here_.peak_bytes == pytest.approx(there.peak_bytes)
        assert here_.peak_live_microbatches == there.peak_live_microbatches
        assert here_.weight_versions == there.weight_versions
        assert [c.peak_bytes for c in here_.memory] == pytest.approx([c.peak_bytes for c in there.memory])


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "zero-r", "axonn"])
def test_replicas_that_behave_alike_are_folded(name):
    plan = at(name, 2, 4) if preset(name).grows == "replicas" else at(name, 2, 4, replicas=2)
    trainers = plan.num_workers
    program = compile_plan(plan, model([(1.0, 2.0)] * 4), computer(["here"] * trainers, Link(bytes_per_s=10.0)))
    assert program.copies == 2
    assert len(program.workers) == trainers // 2


def test_replicas_with_other_links_or_devices_are_not_folded():
    plan, profile = at("1f1b", 3, 4, replicas=2), model([(1.0, 2.0)] * 6)
    skipping = model([(1.0, 2.0)] * 6, skips=True)
    fast = Link(bytes_per_s=10.0)
    assert compile_plan(plan, profile, computer(["here"] * 6, fast)).copies == 2
    # A link that only a skip edge uses, from the first stage to the third.
    odd = computer(["here"] * 6, Link(source="gpu3", target="gpu5", bytes_per_s=5.0), fast)
    assert compile_plan(plan, skipping, odd).copies == 1
    assert compile_plan(plan, skipping, computer(["here"] * 6, fast)).copies == 2
    slow = computer(["here"] * 6, Link(source="gpu3", target="gpu4", bytes_per_s=5.0), fast)
    assert compile_plan(plan, profile, slow).copies == 1
    # Copies to the host over a slower link of the second pipeline.
    away = computer(["here"] * 6, Link(source="gpu4", target="cpu-here", bytes_per_s=5.0), fast)
    assert compile_plan(plan, profile, away).copies == 2
    offloads = plan.replace(keep=preset("axonn").plan.keep)
    assert compile_plan(offloads, profile, away).copies == 1


def test_copies_to_one_host_share_its_wire_also_when_folded():
    plan = at("1f1b", 1, 2, replicas=2).replace(keep=preset("axonn").plan.keep)
    machine = computer(["here"] * 2, Link(source="gpu*", target="cpu*", bytes_per_s=10.0, wires=("pcie",)),
                       Link(bytes_per_s=FREE))  # fmt: skip
    for fold in (True, False):
        prediction = run(plan, model([(1.0, 2.0)]), machine, fold=fold)
        spans = spans_of(prediction, "OFFLOAD")
        assert [e - s for s, e in spans] == pytest.approx([20.0] * len(spans))


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(("hosts", "times"), [
    (["here"] * 4, [1.0] * 4), (["here", "there"] * 2, [0.5] * 4), (["here"] * 3 + ["there"], [0.75] * 3 + [0.25]),
])  # fmt: skip
def test_a_cpu_that_updates_for_several_devices_at_once_is_shared_also_when_folded(hosts, times, fold):
    plan = at("1f1b", 1, 2, replicas=4).replace(keep=preset("axonn").plan.keep)
    prediction = run(plan, model([(1.0, 2.0)]), computer(hosts, Link(bytes_per_s=FREE)), fold=fold)
    spans = spans_of(prediction, "UPDATE")
    is_folded = fold and len({*times}) == 1
    assert prediction.program.copies == (4 if is_folded else 1)
    assert [end - start for start, end in spans] == pytest.approx(times[:1] if is_folded else times)


def test_pipelines_whose_stages_meet_on_a_cpu_in_turns_are_not_folded():
    plan = at("1f1b", 2, 4, replicas=2).replace(keep=preset("axonn").plan.keep)
    profile, link = model([(1.0, 2.0)] * 2), Link(bytes_per_s=FREE)
    for hosts in (["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a"] * 4):
        assert compile_plan(plan, profile, computer(hosts, link)).copies == 2
    # The second stage of one pipeline is updated where the first of the other is.
    assert compile_plan(plan, profile, computer(["a", "b", "b", "a"], link)).copies == 1


def test_workers_on_parts_of_a_cpu_update_on_their_own():
    plan = at("1f1b", 1, 1, replicas=2).replace(keep=preset("axonn").plan.keep)
    cpu = Device(name="cpu", kind="gpu", type="cpu", host="here", memory_bytes=2**40, most_workers=2)
    machine = Machine(name="cpu", hosts=(Host(name="here"),), devices=(cpu,), links=(Link(bytes_per_s=FREE),))
    prediction = run(plan, model([(1.0, 2.0)]), machine.divided(2))
    assert [end - start for start, end in spans_of(prediction, "UPDATE")] == [0.25] * 2


# Memory.

STATE = 100 + 600  # weights and optimizer state of a unit


def peaks(name: str, p: int, m: int) -> list[float]:
    prediction = run(at(name, p, m), model([(1.0, 2.0)] * p), computer(["here"] * p, Link(bytes_per_s=FREE)))
    return [w.peak_bytes for w in prediction.workers]


def test_gpipe_holds_what_all_microbatches_saved():
    # As the first backward begins: 4 × 50 saved, the gradient of the weights, one of activations.
    assert peaks("gpipe", 2, 4) == [STATE + 200 + 100 + 10] * 2


def test_1f1b_holds_what_its_warm_up_saved():
    # The last stage holds one microbatch, and the next one's input that has come meanwhile.
    assert peaks("1f1b", 2, 4) == [STATE + 100 + 100 + 10, STATE + 50 + 100 + 10 + 10]


def test_recompute_holds_inputs_and_one_microbatch():
    # The second stage keeps the inputs of the three microbatches left while it runs the fourth backward.
    assert peaks("gpipe-recompute", 2, 4) == [STATE + 50 + 100 + 10, STATE + 3 * 10 + 50 + 100 + 10]


@given(st.integers(1, 5), st.integers(1, 9))
@laws
def test_saved_bytes_of_gpipe_grow_with_m_and_those_of_1f1b_stop_at_p_minus_rank(p, m):
    for name, live in (("gpipe", lambda _: m), ("1f1b", lambda rank: min(p - rank, m))):
        prediction = run(
            at(name, p, m), model([(1.0, 2.0)] * p, output=0.0), computer(["here"] * p, Link(bytes_per_s=FREE))
        )
        for w in prediction.workers:
            assert max(w.memory[0].classes["activations"]) == 50 * live(w.worker)


def zero(name: str, n: int, layers: int) -> float:
    """Peak bytes for each parameter, at 2 bytes of weights, 2 of gradients and 12 of optimizer state."""
    parameters = 2400
    profile = model([(1.0, 2.0)] * layers, output=0.0)
    units = tuple(
        unit.replace(
            parameter_bytes=2 * parameters // layers,
            gradient_bytes=2 * parameters // layers,
            optimizer_bytes=12 * parameters // layers,
            activation_bytes=0.0,
        )
        for unit in profile.units
    )
    plan = at(name, n, 1).replace(bucket_bytes=1)
    prediction = run(plan, profile.replace(units=units), computer(["here"] * n, Link(bytes_per_s=FREE)))
    (peak,) = {w.peak_bytes for w in prediction.workers}
    return peak / parameters


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_zero_divides_what_its_stage_says(n):
    assert zero("ddp", n, 1) == pytest.approx(16)
    assert zero("zero-1", n, 1) == pytest.approx(4 + 12 / n)
    # Beside what is divided: the gradient of the layer that runs backward, whole until it is scattered.
    for layers in (1, 4, 24):
        bucket = 2 / layers
        assert zero("zero-2", n, layers) == pytest.approx(2 + 14 / n + bucket - bucket / n)
        # And two layers' weights: the one in use and the one that is prefetched.
        whole = 16 / n
        assert whole <= zero("zero-3", n, layers) <= whole + 3 * bucket
    assert zero("zero-3", n, 24) < zero("zero-2", n, 24) < zero("zero-1", n, 24) < zero("ddp", n, 24)


@pytest.mark.parametrize("name", ["l2l", "stronghold"])
def test_weights_on_the_device_do_not_grow_with_the_layers(name):
    found = []
    for layers in (4, 8, 16):
        plan = at(name, 1, 4)
        prediction = run(plan, model([(1.0, 2.0)] * layers), computer(["here"], Link(bytes_per_s=FREE)))
        (worker,) = prediction.workers
        device, host = worker.memory
        found.append(max(device.classes["weights"]))
        assert host.peak_bytes >= layers * (100 + 600)
    window = 1  # on links that take no time, a window of one hides all copies
    assert found == [100.0 * (window + preset(name).plan.order.prefetch)] * 3


@pytest.mark.parametrize("bytes_per_s", [FREE, 200.0, 20.0, 2.0])
def test_l2l_takes_the_same_device_memory_for_any_number_of_layers(bytes_per_s):
    peaks = []
    for layers in (12, 24, 96):
        machine = computer(["here"], Link(bytes_per_s=bytes_per_s))
        peaks.append(run(at("l2l", 1, 4), model([(1.0, 2.0)] * layers), machine).workers[0].peak_bytes)
    assert len({*peaks}) == 1


def test_boundary_activations_on_the_device_take_memory_for_every_layer():
    peaks = []
    for layers in (12, 96):
        plan = at("l2l", 1, 4)
        plan = plan.replace(keep=plan.keep.replace(activations="device"))
        machine = computer(["here"], Link(bytes_per_s=FREE))
        peaks.append(run(plan, model([(1.0, 2.0)] * layers), machine).workers[0].peak_bytes)
    assert peaks[1] - peaks[0] == 84 * 4 * 10.0


@pytest.mark.parametrize("bytes_per_s", [FREE, 20.0, 2.0])
def test_gradients_that_leave_take_the_memory_of_two_layers_at_most(bytes_per_s):
    found = set()
    for layers in (12, 48):
        machine = computer(["here"], Link(bytes_per_s=bytes_per_s))
        prediction = run(at("stronghold", 1, 1), model([(1.0, 2.0)] * layers), machine)
        found.add(max(prediction.workers[0].memory[0].classes["gradients"]))
    assert len(found) == 1
    assert found <= {100.0, 200.0}


def test_hippie_updates_all_stages_but_the_first_in_the_drain():
    """Stage s has s backwards of slack: its update ends before the first stage's last backward."""
    plan = at("hippie", 4, 8)
    prediction = simulate(compile_plan(*unit_costs(plan, {"F": 1.0, "B": 2.0, "R": 1.0, "U": 1.5})))
    spans = [*prediction.timeline().spans()]
    last = max(s.end_s for s in spans if s.worker == 0 and s.action.startswith("B"))
    for worker in (1, 2, 3):
        assert max(s.end_s for s in spans if s.worker == worker and s.action.startswith("UPDATE")) <= last
    assert prediction.makespan_s == pytest.approx(last + 1.5)
    assert prediction.workers[-1].peak_live_microbatches == 1  # the last stage runs F and B back to back


def test_memory_efficiency_is_throughput_over_the_fullest_devices_bytes():
    prediction = run(at("1f1b", 4, 8), model([(1.0, 2.0)] * 8), computer(["here"] * 4, Link(bytes_per_s=FREE)))
    most = max(worker.peak_bytes for worker in prediction.workers)
    assert prediction.memory_efficiency == pytest.approx(8 / prediction.makespan_s / most)


def test_a_curve_adds_up_to_its_peak():
    for name in ("1f1b", "zero-3", "pipedream", "fine"):
        for worker in simulate(example(name, 0.5)).workers:
            for curve in worker.memory:
                totals = [sum(level) for level in zip(*curve.classes.values(), strict=True)]
                assert sum(curve.peak_classes.values()) == pytest.approx(curve.peak_bytes)
                assert max(totals) <= curve.peak_bytes + 1e-9
