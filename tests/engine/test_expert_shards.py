"""Training with divided experts, against a plain loop with all experts in one process."""

from dataclasses import replace

import pytest
import torch

from pipedejavu.analysis.size import Sizes
from pipedejavu.engine import AdamW
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import InputError
from pipedejavu.plan import Feed, Order, Place
from pipedejavu.profile.expert_rows import counted_rows
from pipedejavu.program import ActionKind, ValueKind
from pipedejavu.program.value import BY_MICROBATCH
from tests.engine.case import make_case


@pytest.mark.parametrize("shards", [2, 4])
def test_divided_experts_train_as_all_of_them_in_one_process(shards: int):
    case = make_case("moe", "moe", workers=shards, microbatches=2, rounds=3)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.moved() > 1e3 * case.tolerance
    assert case.audit() <= case.tolerance


@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        ({"clip": "global", "clip_norm": 0.3}, 2),
        ({"optimizer": AdamW(lr=1e-3)}, 2),
        ({"order": Order(is_eager=True, recompute=1.0)}, 2),
        ({"order": Order(is_eager=True, recompute_units=(1,))}, 2),
        ({"place": Place(shards=2, replicas=2), "clip": "global", "clip_norm": 0.3}, 2),
        ({"steps": 1, "sizes": (1, 4, 2, 3)}, 3),
    ],
    ids=["clipped", "adamw", "recomputed", "some-recomputed", "replicated", "uneven"],
)
def test_divided_experts_train_as_all_of_them_under_every_option(changes: dict, updates: int):
    changes = {"steps": 1} | changes
    case = make_case("moe", "moe", workers=2, microbatches=2, rounds=updates, **changes)
    assert case.furthest(case.trained_plainly()) <= case.tolerance
    assert case.moved() > 1e3 * case.tolerance
    assert case.audit() <= case.tolerance


def test_a_worker_holds_and_updates_its_own_experts_only():
    case = make_case("moe", "moe", workers=4, microbatches=1, steps=1)
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    for rank, handlers in enumerate(threads.handlers):
        held = handlers.held_masters((1, rank))
        assert held["u1.mixture.experts.weight_in"].shape[0] == 1
        assert held["u1.mixture.router.gate.weight"].shape[0] == 4
        state = handlers.applier.state[1, rank]["u1.mixture.experts.weight_in"]
        assert all(tensor.shape[0] == 1 for tensor in state.values() if tensor.dim())
    case.job.units[1][1].load_state_dict(  # the model itself stays whole
        {name.removeprefix("u1."): w for name, w in threads.outcome().weights[1, 0].items()}
    )


@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 1), (1, 2)])
def test_a_checkpoint_goes_on_with_another_number_of_workers(first: int, second: int):
    cases = [moe_of(workers) for workers in (first, second, second)]
    whole = Threads(*run_of(cases[1]))
    for _ in range(2):
        whole.run()
    begun, gone_on = Threads(*run_of(cases[0])), Threads(*run_of(cases[2]))
    begun.run()
    saved = take_all(begun)
    assert saved["weight/u1.mixture.experts.weight_in"].shape[0] == 4
    put_all(gone_on, 1, saved.get)
    gone_on.run()
    expected, resumed = whole.outcome().weights, gone_on.outcome().weights
    for key, weights in resumed.items():
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[key][name], rtol=1e-12, atol=1e-12)


def moe_of(workers: int):
    """A case whose updates have the same four microbatches on any number of workers."""
    torch.manual_seed(0)
    return make_case(
        "moe", "moe", workers=workers, microbatches=4 // workers, steps=1, rounds=2, optimizer=AdamW(lr=0.01)
    )


def run_of(case):
    return case.program, case.job, case.batches


def test_a_failure_of_one_worker_ends_the_others(monkeypatch):
    case = make_case("moe", "moe", workers=2, microbatches=1, steps=1)
    threads = Threads(case.program, case.job, case.batches)

    def fail(_a) -> None:
        raise InputError("no more")

    monkeypatch.setitem(threads.handlers[1]._handlers, ActionKind.FORWARD, fail)
    with pytest.raises(InputError, match="no more"):
        threads.run()


def test_what_workers_send_is_what_the_program_says():
    case = make_case("moe", "moe", workers=2, microbatches=1, steps=1, sizes=(3,), units=4, feed=Feed(samples=3))
    program = counted(case)
    threads = Threads(program, case.job, case.batches)
    before = [handlers.wire.traffic()[1] for handlers in threads.handlers]
    threads.run()
    sizes = Sizes(program)
    exchanges = [a for a in program.workers[0].actions if a.what in BY_MICROBATCH and a.kind in ("GATHER", "REDUCE")]
    assert len(exchanges) == 4 * 2  # two units with experts, two all-to-alls in the forward and in the backward
    rows = sum(sizes.moved(a) for a in exchanges) // 2  # half of them stay, as slots are the same for all experts
    sums = sum(2 * sizes.moved(a) // 2 for a in program.workers[0].actions if a.what == ValueKind.WEIGHT_GRADIENT)
    counts = 2 * 8  # the number of slots, of each unit with experts
    for handlers, start in zip(threads.handlers, before, strict=True):
        assert handlers.wire.traffic()[1] - start == rows + sums + counts


def counted(case):
    """Returns the program of a case whose profile has the rows of its experts."""
    value, units = case.batches.inputs(0), []
    for unit, (_, module) in zip(case.program.profile.units, case.units, strict=True):
        with counted_rows(module, value) as rows:
            value = module(value)
        size = sum(each.size_bytes for each in rows.values()) / case.batches.length(0)
        units.append(unit.replace(expert_row_bytes=size))
    return replace(case.program, profile=case.program.profile.replace(units=tuple(units)))
