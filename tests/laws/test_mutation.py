"""A legal program with one thing wrong is caught, whichever preset, mutation and place chance picks.

Each mutation below is illegal wherever it applies. What is left out, because the mutant is legal:
- another replica on a transfer, collective or move of x, g, s or b: a microbatch's number says whose it is, and
  the replica of such an action has no meaning;
- a SEND that moves ahead of actions that do not make what it sends, and a FETCH or RECV that moves ahead of
  others: lanes only keep their own order.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.analysis import verify
from pipedejavu.facts import FaultsError
from pipedejavu.plan import Keep, preset, presets
from pipedejavu.program import Action, Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import unit_costs

Sequence = list[Action]
Mutate = Callable[[Program, Sequence, int], Iterator[Sequence]]


def put(actions: Sequence, position: int, **changes: object) -> Sequence:
    return [*actions[:position], actions[position]._replace(**changes), *actions[position + 1 :]]


def moved(actions: Sequence, position: int, target: int) -> Sequence:
    rest = [*actions[:position], *actions[position + 1 :]]
    return [*rest[:target], actions[position], *rest[target:]]


def delete(_program, actions, n):
    yield [*actions[:n], *actions[n + 1 :]]


def duplicate(_program, actions, n):
    yield [*actions[: n + 1], *actions[n:]]


def change_microbatch(_program, actions, n):
    i = actions[n].microbatch
    if i >= 0:
        yield put(actions, n, microbatch=i + 1)
    if i > 0:
        yield put(actions, n, microbatch=i - 1)


def change_version(_program, actions, n):
    version = actions[n].version
    if version >= 0:
        yield put(actions, n, version=version + 1)
    if version > 0:
        yield put(actions, n, version=version - 1)


def change_piece(program, actions, n):
    if len(program.pieces) > 1:
        yield put(actions, n, piece=(actions[n].piece + 1) % len(program.pieces))


def change_replica(_program, actions, n):
    if actions[n].what not in {"x", "g", "s", "b"}:
        yield put(actions, n, replica=actions[n].replica + 1)


def change_peer(program, actions, n):
    a = actions[n]
    if a.kind in ("SEND", "RECV"):
        yield put(actions, n, via=f"{a.via[0]}{(a.peer + 1) % len(program.workers)}")


def change_group(program, actions, n):
    if actions[n].via.startswith("*"):
        others = [*program.groups, "nowhere"]
        yield from (put(actions, n, via=f"*{g}") for g in others if f"*{g}" != actions[n].via)


def change_what(_program, actions, n):
    if actions[n].what:
        yield from (put(actions, n, what=what) for what in "xgswodnbpce" if what != actions[n].what)


def change_kind(_program, actions, n):
    alike = (("F", "B", "I", "W", "R", "UPDATE", "EVAL"), ("SEND", "RECV"), ("REDUCE", "GATHER"),
             ("FETCH", "OFFLOAD", "DROP"))  # fmt: skip
    for kinds in alike:
        if actions[n].kind in kinds:
            yield from (put(actions, n, kind=kind) for kind in kinds if kind != actions[n].kind)


def change_place_of_update(_program, actions, n):
    if actions[n].kind == "UPDATE":
        places = ("", "~host", "~shard", "~server", "~shared")
        yield from (put(actions, n, via=via) for via in places if via != actions[n].via)


def swap_on_a_channel(_program, actions, n):
    a = actions[n]
    if a.kind in ("SEND", "RECV"):
        later = (k for k in range(n + 1, len(actions)) if actions[k].kind == a.kind and actions[k].via == a.via)
        for k in later:
            swapped = put(actions, n, **actions[k]._asdict())
            yield put(swapped, k, **a._asdict())


def drop_before_a_reader(_program, actions, n):
    a = actions[n]
    if a.kind == "DROP":
        for k in range(n):
            b = actions[k]
            same = (b.piece, b.replica, b.version) == (a.piece, a.replica, a.version)
            if same and b.kind in ("F", "R", "B", "I"):
                yield moved(actions, n, k)


def send_before_it_is_made(_program, actions, n):
    a = actions[n]
    maker = {"x": "F", "g": "BI", "d": "BW"}.get(a.what, "")
    if a.kind == "SEND":
        for k in range(n):
            b = actions[k]
            if b.kind in maker and b.piece == a.piece and (a.microbatch in (-1, b.microbatch)):
                yield moved(actions, n, k)


def update_before_the_last_gradient(_program, actions, n):
    a = actions[n]
    if a.kind == "UPDATE":
        makers = [k for k in range(n) if actions[k].kind in "BW" and actions[k][1:3] == a[1:3]]
        yield from (moved(actions, n, k) for k in makers[-1:])


MUTATIONS: dict[str, Mutate] = {
    f.__name__: f
    for f in (
        delete, duplicate, change_microbatch, change_version, change_piece, change_replica, change_peer, change_group,
        change_what, change_kind, change_place_of_update, swap_on_a_channel, drop_before_a_reader,
        send_before_it_is_made, update_before_the_last_gradient,
    )
}  # fmt: skip


PLACES = {
    "visit": Keep(kind="split", places=("visit", "visit", "visit", "host"), visitors=1),
    "lean": Keep(kind="split", places=("device", "visit", "lean", "lean"), visitors=2),
    "window": Keep(kind="split", places=("device", "window", "window", "host")),
}
"""Ways to keep state that are no preset: those of a hybrid step."""
SHARDED = {f"1f1b, zero-{n}": Keep(kind=f"zero-{n}", persists=n == 3) for n in (1, 2, 3)}  # type: ignore[arg-type]
"""State divided over the replicas of a pipeline."""


@cache
def legal(name: str) -> Program:
    if name in PLACES:
        plan = preset("zero-offload").at(microbatches=2, steps=2).replace(keep=PLACES[name])
        program = compile_plan(*unit_costs(plan, {}), fold=False)
        verify(program)
        return program
    if name in SHARDED:
        plan = preset("1f1b").at(workers=2, replicas=2, microbatches=2, steps=2).replace(keep=SHARDED[name])
        program = compile_plan(
            *unit_costs(plan.replace(reduce=plan.reduce.replace(wire="reduce-scatter")), {}), fold=False
        )
        verify(program)
        return program
    found = preset(name)
    plan = found.at(workers=None if found.grows == "none" else 2, microbatches=4, steps=None if found.per_update else 2)
    program = compile_plan(*unit_costs(plan, {}), fold=False)
    verify(program)
    return program


@cache
def mutants(name: str, mutation: str) -> list[tuple[int, int, int]]:
    """Where a mutation applies: (worker, position, which of the mutants there)."""
    program, mutate = legal(name), MUTATIONS[mutation]
    return [
        (w, n, k)
        for w, worker in enumerate(program.workers)
        for n in range(len(worker.actions))
        for k, _ in enumerate(mutate(program, [*worker.actions], n))
    ]


tried: Counter[str] = Counter()


@given(st.data())
@settings(derandomize=True, max_examples=2000, deadline=None)
def check_one_mutant(data: st.DataObject) -> None:
    mutation = data.draw(st.sampled_from([*MUTATIONS]), "mutation")
    name = data.draw(st.sampled_from([n for n in (*presets(), *PLACES, *SHARDED) if mutants(n, mutation)]), "preset")
    w, n, k = data.draw(st.sampled_from(mutants(name, mutation)), "place")
    program = legal(name)
    changed = [*MUTATIONS[mutation](program, [*program.workers[w].actions], n)][k]
    sequences = [worker.actions for worker in program.workers]
    sequences[w] = tuple(changed)
    tried[mutation] += 1
    with pytest.raises(FaultsError):
        verify(program.with_actions(sequences))


def test_every_mutant_is_caught():
    tried.clear()
    check_one_mutant()
    assert tried.total() >= 1000
    assert tried.keys() == MUTATIONS.keys()


@pytest.mark.parametrize(
    "name",
    ["1f1b", "pipedream", "zb-h1", "gems-mast", "l2l", "zero-1", "zero-3", "easgd", "hetpipe", *PLACES, *SHARDED],
)
@pytest.mark.parametrize("mutation", ["delete", "duplicate"])
def test_no_action_of_these_presets_can_go_missing_or_come_twice(name, mutation):
    program = legal(name)
    escaped = []
    for w, n, k in mutants(name, mutation):
        sequences = [worker.actions for worker in program.workers]
        sequences[w] = tuple([*MUTATIONS[mutation](program, [*sequences[w]], n)][k])
        try:
            verify(program.with_actions(sequences))
        except FaultsError:
            continue
        escaped.append(f"worker {w}: {program.workers[w].actions[n]}")
    assert not escaped
