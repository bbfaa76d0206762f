"""Operators that a group divides, with state that the replicas of each part divide (ZeRO)."""

import pytest
import torch

from pipedejavu.engine import AdamW
from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.threads import Threads
from pipedejavu.plan import Keep
from tests.engine.divided_case import divided_case

ADAMW = AdamW(lr=0.01, eps=0.01, weight_decay=0.1)


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(before)


def keep_of(zero, workers=1):
    return Keep(kind=f"zero-{zero}", persists=zero == 3 and workers > 1)


def check(case):
    assert len(case.program.workers) == case.plan.place.workers * 4
    assert case.furthest(case.trained_plainly()) <= 1e-12
    assert case.audit() <= 1e-12
    assert case.moved() > 1e-6


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("model", ["heads", "wide-mlp"])
def test_two_parts_of_two_replicas_equal_a_plain_loop(model, zero):
    """With clipping, tied weights and dropout."""
    check(divided_case(model, shards=2, replicas=2, keep=keep_of(zero), clip_norm=0.5, optimizer=ADAMW))


@pytest.mark.parametrize("zero", [1, 3])
def test_with_a_pipeline(zero):
    keep = keep_of(zero, workers=2)
    check(divided_case("heads", shards=2, workers=2, replicas=2, keep=keep, clip_norm=0.5, optimizer=ADAMW))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layouts", [("sequence",), ("sequence", "vocabulary"), ("context",)], ids="-".join)
def test_with_divided_sequences_and_vocabularies(layouts, zero):
    case = divided_case("tokens", layouts=layouts, shards=2, replicas=2, keep=keep_of(zero), optimizer=ADAMW)
    check(case)


@pytest.mark.parametrize(("layout", "zero"), [("stationary-w", 3), ("stationary-x", 2)])
def test_with_divided_channels(layout, zero):
    check(divided_case("filters", layout=layout, shards=2, replicas=2, keep=keep_of(zero), is_eager=True))


def test_recomputed_units_gather_their_weights_again():
    check(divided_case("heads", shards=2, replicas=2, keep=keep_of(3), recompute=1.0))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_worker_holds_its_replicas_share_of_its_part(zero):
    case = divided_case("heads", shards=2, replicas=2, keep=keep_of(zero), optimizer=ADAMW, rounds=1)
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    for handlers in threads.handlers:
        assert handlers.sharded.keys() == handlers.runners.keys()
        for key, shards in handlers.sharded.items():
            part = sum(weight.numel() for weight in handlers.runners[key].initial.values())
            padded = sum(layout.length for layout in shards.layouts)
            assert part <= 2 * padded <= part + 2 * len(shards.layouts)
            moments = [t for slots in handlers.applier.state[key].values() for n, t in slots.items() if n != "step"]
            assert sum(t.numel() for t in moments) <= 2 * padded
            if zero == 3:
                assert not any(whole.untyped_storage().nbytes() for whole in shards.wholes)
    threads.close()


def test_a_checkpoint_continues_under_any_plan():
    plans = {
        "tensor × ZeRO-3": {"shards": 2, "replicas": 2, "keep": keep_of(3)},
        "tensor × ZeRO-1 × pipeline": {"shards": 2, "replicas": 2, "workers": 2, "keep": keep_of(1)},
        "vocabulary × ZeRO-2": {"shards": 2, "replicas": 2, "layouts": ("vocabulary",), "keep": keep_of(2)},
        "one": {"shards": 1},
    }
    expected = case_of(plans["one"]).trained_plainly()
    state, update = None, 0
    for name in [*plans, "tensor × ZeRO-3"]:
        case = case_of(plans[name])
        threads = Threads(case.program, case.job, case.batches)
        if state is not None:
            put_all(threads, update, state.get)
        threads.run()
        update += case.program.plan.steps
        state = take_all(threads)
        threads.close()
    for name, tensor in state.items():
        if name.startswith("weight/"):
            assert (tensor - expected[name.removeprefix("weight/")]).abs().max() <= 1e-12, name


def case_of(options):
    torch.manual_seed(3)
    microbatches = 6 // options.get("replicas", 1)
    case = divided_case("tokens", optimizer=ADAMW, rounds=5, **options)
    case.plan = case.plan.replace(feed=case.plan.feed.replace(microbatches=microbatches))
    return case
