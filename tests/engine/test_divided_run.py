"""Workers that divide operators train as one process does."""

import pytest
import torch

from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.threads import Threads, check_runnable
from pipedejavu.facts import InputError
from pipedejavu.plan.axis import Keep, Order, Place
from pipedejavu.program import compile as compile_plan
from pipedejavu.runtime.graph_step import SumForward
from tests.engine.case import machine_of, profile_of
from tests.engine.divided_case import divided_case

PLACES = [{"shards": 2}, {"shards": 4}, {"shards": 2, "workers": 2}, {"shards": 2, "workers": 2, "replicas": 2}]


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("model", ["heads", "wide-mlp", "filters"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_training_equals_a_plain_loop(model, place):
    case = divided_case(model, **place, clip_norm=0.5)
    assert len(case.program.workers) == place["shards"] * place.get("workers", 1) * place.get("replicas", 1)
    assert case.furthest(case.trained_plainly()) <= 1e-12
    assert case.audit() <= 1e-12
    assert case.moved() > 1e-6


@pytest.mark.parametrize("layout", ["stationary-x", "stationary-y", "stationary-w"])
@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (4, 1), (2, 2)])
def test_channels_are_divided_as_the_layout_says(layout, shards, replicas):
    case = divided_case("filters", layout=layout, shards=shards, replicas=replicas, is_eager=True)
    assert case.furthest(case.trained_plainly()) <= 1e-12
    assert case.audit() <= 1e-12


@pytest.mark.parametrize("kept", [{"recompute": 1.0}, {"recompute_units": (1, 3)}])
def test_recomputed_units_draw_the_same_masks(kept):
    case = divided_case("heads", workers=2, **kept)
    assert case.furthest(case.trained_plainly()) <= 1e-12


def test_a_rank_holds_its_share_of_what_is_divided():
    case = divided_case("heads", shards=4)
    threads = Threads(case.program, case.job, case.batches)
    sizes = [sum(w.numel() for w in handlers.held_masters((0, 0)).values()) for handlers in threads.handlers]
    layouts = threads.handlers[0].runners[0, 0].layouts
    threads.close()
    named = {f"{u}.{n}": p for u, m in case.units for n, p in m.named_parameters()}
    unique = {id(p): (name, p) for name, p in reversed(named.items())}.values()
    whole = sum(p.numel() for name, p in unique if name not in layouts)
    divided = sum(p.numel() for name, p in unique if name in layouts)
    assert sizes == [whole + divided // 4] * 4
    assert divided > 4 * whole


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        ("heads", {"shards": 3}, "plan 'divided' divides operators over 3 workers, and the model has none for heads"),
        ("heads", {"layout": "stationary-x"}, "the model has none for stationary-x that can be divided by 2"),
    ],
)
def test_a_model_that_has_nothing_to_divide_is_refused(model, options, sentence):
    case = divided_case(model, **options)
    with pytest.raises(InputError, match=sentence):
        Threads(case.program, case.job, case.batches)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"order": Order(kind="ready-first")}, "order 'ready-first'"),
        ({"keep": Keep(kind="shared")}, "keep 'shared'"),
        ({"place": Place(workers=2, stage_shards=(2, 1))}, "tensor-parallel groups of different sizes .2-1."),
    ],
)
def test_plans_that_do_not_divide_are_refused(changes, what):
    case = divided_case("heads", workers=2)
    case.plan = case.plan.replace(**changes)
    with pytest.raises(InputError, match=what):
        check_runnable(compile_plan(case.plan, profile_of(case.units, 1), machine_of(case.plan, "gpu"), fold=False))


def test_a_worker_that_fails_inside_a_sum_stops_the_others():
    case = divided_case("heads", shards=4)
    threads = Threads(case.program, case.job, case.batches)
    third = threads.handlers[2].runners[0, 0].units[1][2]
    steps = [module for module in third.modules() if isinstance(module, SumForward)]

    def fail(*_):
        raise RuntimeError("worker 2 fails")

    steps[-1].forward = fail
    with pytest.raises(RuntimeError, match="worker 2 fails"):
        threads.run()


@pytest.mark.parametrize("model", ["heads", "filters"])
def test_a_checkpoint_continues_under_any_plan(model):
    torch.manual_seed(3)
    reference = divided_case(model, shards=1, rounds=4)
    expected = reference.trained_plainly()
    torch.manual_seed(3)
    first = divided_case(model, shards=2, workers=2, rounds=4)
    state = _run(first, 0, 2, None)
    for place in ({"shards": 4}, {"shards": 1}, {"shards": 2, "replicas": 1}):
        torch.manual_seed(3)
        then = divided_case(model, **place, rounds=4)
        final = _run(then, 2, 2, state)
        for name, tensor in final.items():
            if name.startswith("weight/"):
                torch.testing.assert_close(tensor, expected[name.removeprefix("weight/")], rtol=0, atol=1e-12)


def _run(case, update, rounds, state):
    threads = Threads(case.program, case.job, case.batches)
    if state is not None:
        put_all(threads, update, state.get)
    for _ in range(rounds):
        threads.run()
    taken = take_all(threads)
    threads.close()
    return taken
