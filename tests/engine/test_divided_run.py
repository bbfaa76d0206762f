"""Workers that divide operators train as one process does."""

import pytest
import torch

from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.threads import Threads
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
