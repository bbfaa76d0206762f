"""State that is taken between rounds: the same plan goes on bit for bit, any other within rounding."""

import pytest
import torch

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.engine.engine_state import SLOTS, put_all, take_all, take_norm
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import InputError
from tests.engine.test_presets import ADAMW, MOMENTUM, SCORED, SYNCHRONOUS, VERSIONED

PLANS = [(name, *size) for name, sizes in {**SYNCHRONOUS, **VERSIONED, **SCORED}.items() for size in sizes[:1]]
# Several workers of a server push in any order, so that no two runs are alike; one worker's are.
PLANS = [(name, 1 if name in ("parameter-server", "dc-asgd") else workers, count) for name, workers, count in PLANS]


def run(threads, rounds):
    for _ in range(rounds):
        threads.run()
    return threads


def goes_on(case, state, update, rounds, norm=None):
    """Starts anew from a state, as another process would."""
    threads = Threads(case.program, case.job, case.batches)
    put_all(threads, update, state.get, norm)
    return run(threads, rounds)


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("model", ["convnet", "gpt"])
@pytest.mark.parametrize(("name", "workers", "microbatches"), PLANS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(make, name, workers, microbatches, model):
    """Weights, optimizer state and running statistics of every replica; with dropout in the model of tokens."""
    case = make(
        name, model, workers=workers, microbatches=microbatches, rounds=5,
        optimizer=MOMENTUM if model == "convnet" else ADAMW,
    )  # fmt: skip
    whole = Threads(case.program, case.job, case.batches)
    state = take_all(run(whole, 2))
    update, norm = whole.updates, take_norm(whole.handlers[0])
    run(whole, 3)
    again = goes_on(case, state, update, 3, norm)
    assert again.updates == whole.updates
    assert same(take_all(again), take_all(whole))
    for home, weights in whole.outcome().weights.items():
        assert same(weights, again.outcome().weights[home])


@pytest.mark.parametrize("name", ["parameter-server", "hogwild"])
def test_every_worker_gets_back_what_was_its_own(make, name):
    case = make(name, "convnet", workers=3, steps=2, optimizer=MOMENTUM)
    state = take_all(run(Threads(case.program, case.job, case.batches), 1))
    assert {name.split("/")[1] for name in state if name.startswith("replica/")} >= {"1", "2"}
    assert same(take_all(goes_on(case, state, 2, 0)), state)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_it_continues_from_any_round(make, stop):
    case = make("1f1b", "gpt", workers=2, microbatches=3, rounds=5, optimizer=ADAMW)
    whole = Threads(case.program, case.job, case.batches)
    state = take_all(run(whole, stop))
    again = goes_on(case, state, whole.updates, 5 - stop)
    assert same(take_all(again), take_all(run(whole, 5 - stop)))


def test_delayed_clipping_continues_with_the_norm_before(make):
    options = {"workers": 2, "microbatches": 2, "clip": "delayed", "clip_norm": 0.02, "rounds": 4}
    case = make("pipedream-2bw", steps=2, **options)
    whole = Threads(case.program, case.job, case.batches)
    state, norm = take_all(run(whole, 2)), take_norm(whole.handlers[0])
    assert norm is not None
    again, without = (goes_on(case, state, whole.updates, 2, known) for known in (norm, None))
    run(whole, 2)
    assert same(take_all(again), take_all(whole))
    assert not same(take_all(without), take_all(whole))


# Another plan, other workers, another placement.

OTHERS = [("ddp", 3, 2), ("gpipe", 3, 6), ("zb-h1", 2, 6), ("chimera", 2, 6), ("interleaved", 2, 6), ("fine", 2, 6),
          ("zero-offload", None, 6), ("stronghold", None, 6), ("coarse", 2, 6), ("byteps", 2, 3)]  # fmt: skip


@pytest.mark.parametrize("model", ["convnet", "calm-gpt"])
@pytest.mark.parametrize(("name", "workers", "microbatches"), OTHERS)
def test_any_other_plan_continues_from_the_same_state_within_rounding(make, name, workers, microbatches, model):
    first = make("1f1b", model, workers=2, microbatches=6, steps=1, units=6, rounds=4, optimizer=ADAMW, sizes=(3,))
    whole = Threads(first.program, first.job, first.batches)
    state = take_all(run(whole, 2))
    run(whole, 2)
    other = make(name, model, workers=workers, microbatches=microbatches, steps=1, units=6, optimizer=ADAMW, sizes=(3,))
    assert other.program.update_size == first.program.update_size
    other.batches = first.batches
    again = goes_on(other, state, 2, 2)
    expected, found = take_all(whole), take_all(again)
    weights = [name for name in found if name.startswith("weight/")]
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded(other, state).items())
    for tensor_name in weights:
        known = tensor_name if tensor_name in expected else next(iter(ties(first, tensor_name) & expected.keys()))
        assert torch.allclose(found[tensor_name], expected[known], rtol=0, atol=2 * first.tolerance)


def ties(case, name):
    return {f"weight/{n}" for tie in case.job.ties if name.removeprefix("weight/") in tie for n in tie}


def loaded(case, state):
    """Returns what a plan makes of a state before it runs, where it has the same names."""
    found = take_all(goes_on(case, state, 2, 0))
    return {name: tensor for name, tensor in found.items() if name in state}


def test_a_plan_that_shares_updates_drops_those_of_single_workers(make):
    """A parameter server's workers hold older weights than the server; a synchronous plan takes the server's."""
    first = make("parameter-server", workers=2, steps=2, rounds=2, optimizer=ADAMW)
    state = take_all(run(Threads(first.program, first.job, first.batches), 1))
    served = [name for name in state if name.startswith("weight/")]
    assert any(not torch.equal(state[f"replica/{r}/{name}"], state[name]) for name in served for r in (0, 1))
    other = make("ddp", workers=2, microbatches=1, optimizer=ADAMW)
    for weights in goes_on(other, state, 4, 0).outcome().weights.values():
        assert all(torch.equal(weight, state[f"weight/{name}"]) for name, weight in weights.items())


@pytest.mark.parametrize("name", ["easgd", "easgd-sync"])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW])
def test_rounds_of_an_elastic_plan_are_one_long_round(make, name, optimizer):
    """The end of a round cuts nothing off: bit for bit, and wherever the rounds end."""
    ends = []
    for steps, rounds in ((6, 1), (3, 2), (2, 3), (1, 6)):
        torch.manual_seed(0)
        case = make(name, "convnet", workers=3, steps=steps, rounds=rounds, optimizer=optimizer)
        ends.append(take_all(run(Threads(case.program, case.job, case.batches), rounds)))
    assert all(same(found, ends[0]) for found in ends)


def test_a_round_of_hetpipe_ends_with_all_waves_in_all_replicas(make):
    """Replicas that have taken in each other's updates have the same weights, up to the order of the sums."""
    case = make("hetpipe", workers=2, microbatches=5, rounds=2, optimizer=MOMENTUM)  # so that the last wave is short
    weights = case.outcome.weights
    for piece in {piece for piece, _ in weights}:
        for name, weight in weights[piece, 0].items():
            assert torch.allclose(weight, weights[piece, 1][name], rtol=0, atol=case.tolerance)
    assert case.audit() <= case.tolerance


def test_a_state_of_another_model_or_optimizer_is_refused(make):
    case = make("1f1b", workers=2, microbatches=2, optimizer=AdamW(lr=0.1))
    state = take_all(run(Threads(case.program, case.job, case.batches), 1))
    kept = {SLOTS[slot] for slot in ("step", "m", "v")}
    assert {name.split("/")[1] for name in state if name.startswith("state/")} == kept
    for changed, message in [
        ({"weight/u0.0.bias": None}, "the checkpoint has no weight 'u0.0.bias'; it is of another model"),
        ({"weight/u0.0.bias": torch.zeros(7)}, "weight 'u0.0.bias' is 7 in the checkpoint and 5 in the model"),
        ({"state/exp_avg/u0.0.bias": torch.zeros(7)}, "'exp_avg' of 'u0.0.bias' is 7, and the weight 5"),
        ({"state/exp_avg/u0.0.bias": None}, "keeps exp_avg_sq and step of 'u0.0.bias', and this optimizer exp_avg and"),
    ]:
        with pytest.raises(InputError, match=message):
            goes_on(case, {**state, **changed}, 2, 0)
    other = make("1f1b", workers=2, microbatches=2, optimizer=Sgd(lr=0.1, momentum=0.9))
    with pytest.raises(InputError, match="and this optimizer momentum_buffer"):
        goes_on(other, state, 2, 0)
