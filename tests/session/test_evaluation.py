"""Evaluation between rounds: it equals the whole model in eval mode, and leaves the run's bits as they are."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.threads import Threads
from pipedejavu.profile import ModelCut
from pipedejavu.run.run_folder import result_of
from pipedejavu.runtime.evaluation_mode import evaluation_mode
from pipedejavu.session.evaluation import RankPlaces, WorkerPlaces, run_model
from pipedejavu.session.newest_weights import NewestWeights, final_replicas
from tests.engine.case import Case, Samples, make_case, sum_of_losses
from tests.engine.test_presets import ADAMW, ALL, MOMENTUM

PRESETS = [(name, *sizes[0]) for name, sizes in ALL.items()]
SIZES = [3, 3, 2]
"""Samples of the microbatches that are evaluated; the last is short."""


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def held_out(case: Case) -> Samples:
    samples: Samples = case.make_samples(SIZES, torch.Generator().manual_seed(9))
    return samples


def evaluate(case: Case, threads: Threads) -> list[float]:
    """Returns the sum of all losses: by threads that pass values on as ranks do, and by one process."""
    ranks = [([handlers], RankPlaces(handlers)) for handlers in threads.handlers]
    with ThreadPoolExecutor(len(ranks)) as pool:
        by_ranks = sum(pool.map(lambda rank: sum_of(case, *rank), ranks))
    devices = {handlers.index: handlers.device for handlers in threads.handlers}
    return [by_ranks, sum_of(case, threads.handlers, WorkerPlaces(devices))]


def sum_of(case: Case, handlers: list[Handlers], places: WorkerPlaces) -> float:
    units, samples = copy.deepcopy(case.units), held_out(case)  # each rank has its own modules
    replicas = [NewestWeights(case.program, units, handlers, n) for n in final_replicas(case.program, units)]
    cut = ModelCut(units, "chain", lambda x: x, lambda x: x, torch.nn.Sequential())
    total = 0.0
    with torch.no_grad(), evaluation_mode(*(module for _, module in units)):
        for number, size in enumerate(SIZES):
            read: Callable[[], object] = lambda number=number: samples.inputs(number)  # type: ignore[misc]  # noqa: E731
            output, worker = run_model(cut, read, size, replicas[number % len(replicas)], places)
            if places.is_here(worker):
                total += float(sum_of_losses(output, samples.targets(number).to(output.device)))
    places.finish()
    return total


def expected(case: Case, units: list[torch.nn.Module]) -> float:
    samples, total = held_out(case), 0.0
    with torch.no_grad():
        for number in range(len(SIZES)):
            value = samples.inputs(number)
            for module in units:
                value = module.eval()(value)
            total += float(sum_of_losses(value, samples.targets(number)))
    return total


@pytest.mark.parametrize(("name", "workers", "microbatches"), PRESETS)
@pytest.mark.parametrize("model", ["convnet", "gpt"])
def test_it_equals_the_whole_model_in_eval_mode(name: str, workers: int, microbatches: int, model: str) -> None:
    optimizer = MOMENTUM if model == "gpt" else ADAMW
    case = make_case(name, model, workers=workers, microbatches=microbatches, optimizer=optimizer)
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    losses = evaluate(case, threads)
    # In HetPipe the two uses of a tied weight may end with different versions.
    units = [(u, copy.deepcopy(m)) for u, m in case.units] if name == "hetpipe" else copy.deepcopy(case.units)
    trained = result_of(case.program, threads.outcome().weights)
    for handlers in threads.handlers:
        for (_, replica), runner in handlers.runners.items():
            if replica == 0:  # a server has no running statistics
                trained |= dict(runner.saved_buffers())
    for unit, module in units:
        module.load_state_dict({n: trained.get(f"{unit}.{n}", w) for n, w in module.state_dict().items()})
    assert losses == pytest.approx([expected(case, [module for _, module in units])] * 2, rel=1e-12)


@pytest.mark.parametrize("model", ["convnet", "gpt"])
def test_a_run_that_evaluates_has_the_same_bits(model: str) -> None:
    case = make_case("1f1b", model, workers=2, microbatches=3, rounds=2, optimizer=ADAMW)
    before = torch.get_rng_state()
    threads = Threads(case.program, case.job, case.batches)
    threads.run()
    first = evaluate(case, threads)
    threads.run()
    assert evaluate(case, threads) != first
    torch.set_rng_state(before)
    for key, weights in case.outcome.weights.items():
        for name, weight in weights.items():
            assert torch.equal(threads.outcome().weights[key][name], weight)
    modules = [module for handlers in threads.handlers for _, unit in handlers.job.units for module in unit.modules()]
    assert all(module.training for module in modules)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "workers", "microbatches"), [("gpipe", 2, 3), ("stronghold", None, 3), ("ddp", 2, 2)])
@pytest.mark.parametrize("model", ["convnet", "calm-gpt"])
def test_it_equals_the_whole_model_on_a_gpu(name: str, workers: int | None, microbatches: int, model: str) -> None:
    case = make_case(name, model, workers=workers, microbatches=microbatches, optimizer=MOMENTUM, type_="gpu")
    threads = Threads(case.program, case.job, case.batches)
    losses = evaluate(case, threads)
    units = [copy.deepcopy(module).cpu() for _, module in case.units]
    assert losses == pytest.approx([expected(case, units)] * 2, rel=1e-9)
    threads.run()
    assert evaluate(case, threads) != losses
