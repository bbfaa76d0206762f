"""Evaluation between rounds: it equals the whole model in eval mode, and leaves the run's bits as they are."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipedejavu.engine.evaluation import EvaluationRunner, final_replicas
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import InputError
from pipedejavu.run.run_folder import result_of
from tests.engine.case import sum_of_losses
from tests.engine.test_presets import ADAMW, ALL, MOMENTUM, can_tie

PRESETS = [(name, *sizes[0]) for name, sizes in ALL.items()]
SIZES = [3, 3, 2]
"""Samples of the microbatches that are evaluated; the last is short."""


class HeldOut:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(SIZES)

    def inputs(self, number):
        return self.samples.inputs(number)

    def size(self, number):
        return SIZES[number]


def evaluate(threads, held_out):
    def measure(number, output):
        return sum_of_losses(output, held_out.samples.targets(number).to(output.device)).double()[None]

    runners = [EvaluationRunner(handlers, handlers.job.units) for handlers in threads.handlers]
    with ThreadPoolExecutor(len(runners)) as pool:
        return sum(pool.map(lambda runner: runner.run(held_out, measure, 1), runners))


@pytest.mark.parametrize(("name", "workers", "microbatches"), PRESETS)
@pytest.mark.parametrize("model", ["convnet", "gpt"])
def test_it_equals_the_whole_model_in_eval_mode(make, name, workers, microbatches, model):
    if model == "gpt" and not can_tie(name):
        pytest.skip("ties are refused")
    optimizer = MOMENTUM if model == "gpt" else ADAMW
    case = make(name, model, workers=workers, microbatches=microbatches, optimizer=optimizer)
    if model == "convnet" and final_replicas(case.program)[0] == case.program.num_replicas:
        with pytest.raises(InputError, match="has no running statistics; leave --eval and --eval-data out"):
            evaluate(Threads(case.program, case.job, case.batches), None)
        return
    held_out = HeldOut(case.make_samples(SIZES, torch.Generator().manual_seed(9)))
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    loss = float(evaluate(threads, held_out))
    # In HetPipe the two uses of a tied weight may end with different versions.
    units = [(u, copy.deepcopy(m)) for u, m in case.units] if name == "hetpipe" else copy.deepcopy(case.units)
    trained = result_of(case.program, threads.outcome().weights)
    replica = final_replicas(case.program)[0]
    for handlers in threads.handlers:
        for (_, of), runner in handlers.runners.items():
            if of == replica:
                trained |= dict(runner.saved_buffers())
    expected = 0.0
    for unit, module in units:
        state = module.state_dict()
        module.load_state_dict({n: trained.get(f"{unit}.{n}", w) for n, w in state.items()})
        module.eval()
    with torch.no_grad():
        for number in range(len(SIZES)):
            value = held_out.inputs(number)
            for _, module in units:
                value = module(value)
            expected += float(sum_of_losses(value, held_out.samples.targets(number)))
    assert loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("model", ["convnet", "gpt"])
def test_a_run_that_evaluates_has_the_same_bits(make, model):
    case = make("1f1b", model, workers=2, microbatches=3, rounds=2, optimizer=ADAMW)
    held_out = HeldOut(case.make_samples(SIZES, torch.Generator().manual_seed(9)))
    before = torch.get_rng_state()
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    state = torch.get_rng_state()
    first = float(evaluate(threads, held_out))
    assert torch.equal(torch.get_rng_state(), state)
    threads.run()
    assert float(evaluate(threads, held_out)) != first
    torch.set_rng_state(before)
    for key, weights in case.outcome.weights.items():
        for name, weight in weights.items():
            assert torch.equal(threads.outcome().weights[key][name], weight)
    modules = [module for handlers in threads.handlers for _, unit in handlers.job.units for module in unit.modules()]
    assert all(module.training for module in modules)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "workers", "microbatches"), [("gpipe", 2, 3), ("stronghold", None, 3), ("ddp", 2, 2)])
@pytest.mark.parametrize("model", ["convnet", "calm-gpt"])
def test_it_equals_the_whole_model_on_a_gpu(make, name, workers, microbatches, model):
    case = make(name, model, workers=workers, microbatches=microbatches, optimizer=MOMENTUM, type_="gpu")
    held_out = HeldOut(case.make_samples(SIZES, torch.Generator().manual_seed(9)))
    threads = Threads(case.program, case.job, case.batches)
    loss = float(evaluate(threads, held_out))
    units = [copy.deepcopy(module).eval() for _, module in case.units]
    expected = 0.0
    with torch.no_grad():
        for number in range(len(SIZES)):
            value = held_out.inputs(number)
            for module in units:
                value = module(value)
            expected += float(sum_of_losses(value, held_out.samples.targets(number)))
    assert loss == pytest.approx(expected, rel=1e-9)
    threads.run()
    assert float(evaluate(threads, held_out)) != loss
