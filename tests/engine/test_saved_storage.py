"""Saved activations that wait in host memory: nothing of them stays behind, and they come back as they were."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipedejavu.engine import recompute_span
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import (
    Saved,
    backward,
    backward_input,
    backward_weights,
    carried,
    memory_of,
    with_loss,
)
from pipedejavu.plan import Keep
from pipedejavu.runtime import saved_storage
from tests.engine.test_recompute_span import assert_same_bits, noisy, trained

CPU = torch.device("cpu")
PRESETS = [("gpipe", 2), ("1f1b", 2), ("zb-h1", 2), ("interleaved", 2), ("chimera", 2), ("gpipe", 1)]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Lets a CPU stand in for a GPU: what moves is copied, and was somewhere else before."""
    made: list[Tensor] = []

    def moved(tensor: Tensor, _device: torch.device) -> Tensor:
        made.append(tensor.detach().clone())
        return made[-1]

    for module in (saved_storage, recompute_span):
        monkeypatch.setattr(module, "move_tensor", moved)
    return made


def on_host(case: Any) -> Any:
    return replace(case, plan=case.plan.replace(keep=Keep(activations="host")))


@pytest.mark.parametrize(("name", "workers"), PRESETS)
@pytest.mark.parametrize("again", [None, (0, 2, 5, 7)], ids=["kept", "some run again"])
def test_training_is_the_same_bit_for_bit(
    make: Any, name: str, workers: int, again: tuple[int, ...] | None, copies: list[Tensor]
) -> None:
    case = noisy(make, name, workers=workers, microbatches=4)
    found, run = trained(on_host(case), recompute_units=again)
    actions = [a for worker in run.program.workers for a in worker.actions]
    assert {(a.kind, a.what) for a in actions} >= {("OFFLOAD", "s"), ("FETCH", "s")}
    assert copies
    assert_same_bits(found, trained(case)[0])


@pytest.mark.parametrize(("name", "workers"), [("gpipe", 2), ("interleaved", 2), ("gpipe", 4)])
def test_checkpoints_that_came_from_another_worker_wait_on_the_host(make: Any, name: str, workers: int) -> None:
    case = noisy(make, name, workers=workers, microbatches=4)
    found, run = trained(on_host(case), recompute=1.0)
    actions = [(n, a) for n, worker in enumerate(run.program.workers) for a in worker.actions if a.what == "x"]
    came, left = ({(n, a.piece, a.microbatch) for n, a in actions if a.kind == kind} for kind in ("RECV", "OFFLOAD"))
    assert came & left
    assert_same_bits(found, trained(case)[0])


def test_tied_weights_stay_where_they_are(make: Any, copies: list[Tensor]) -> None:
    case = make("gpipe", "gpt", workers=1, microbatches=3, units=6)
    assert_same_bits(trained(on_host(case))[0], trained(case)[0])
    assert copies


# A piece alone.

WIDTH, SAMPLES = 24, 16


class Heads(nn.Module):
    """Cuts one product into three, so that tensors are saved that share memory and are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        q, k, v = self.all(value).chunk(3, dim=1)
        return value + self.out((q @ k.T).softmax(1) @ v)


def piece(departs: bool, again: tuple[int, ...] = ()) -> tuple[PieceRunner, dict[str, Tensor]]:
    torch.manual_seed(0)
    modules = [
        Heads(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        nn.Dropout(0.3),
        Heads(),
    ]
    runner = PieceRunner([(n, f"unit{n}", module) for n, module in enumerate(modules)], 0, again, departs)
    return runner, {name: weight.clone().requires_grad_() for name, weight in runner.initial.items()}


class Made(TorchDispatchMode):
    """Notes all memory that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > 64:
                self.known.append(StorageWeakRef(tensor.untyped_storage()))
        return found

    def living(self) -> set[int]:
        return {ref.cdata for ref in self.known if not ref.expired()}


def forward(runner: PieceRunner, weights: dict[str, Tensor], x: Tensor, loses: bool) -> Saved:
    tensor_offload = runner.tensor_offload(weights)
    with tensor_offload:
        output, saved = runner.forward(weights, x, 0)
        saved = with_loss(saved, output.square().sum()) if loses else saved
    return (replace(saved[0], tensor_offload=tensor_offload), *saved[1:])


@pytest.mark.parametrize("loses", [False, True], ids=["handed on", "with a loss"])
@pytest.mark.parametrize("again", [(), (0,), (1, 2), (3,)])
def test_offloaded_storages_keep_no_memory(loses: bool, again: tuple[int, ...], copies: list[Tensor]) -> None:
    runner, weights = piece(True, again)
    x = torch.randn(SAMPLES, WIDTH)
    with Made() as made:
        saved = forward(runner, weights, x, loses)
    here = made.living()
    assert len(here) > 4
    others = [*weights.values(), *(buffer for _, _, module in runner.units for buffer in module.buffers())]
    own = {StorageWeakRef(t.untyped_storage()).cdata for t in others}
    saved = carried(saved, CPU)
    del x
    assert made.living() <= own
    assert sum(t.untyped_storage().nbytes() for t in memory(saved)) == sum(t.nbytes for t in copies)
    assert all(any(t is copy or t.data_ptr() == copy.data_ptr() for copy in copies) for t in memory(saved))


def memory(saved: Saved) -> Iterator[Tensor]:
    yield from tree_leaves(memory_of(saved))


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "in halves"])
@pytest.mark.parametrize("again", [(), (0,), (1, 2), (3,)])
def test_it_comes_back_as_it_was(is_split: bool, again: tuple[int, ...], copies: list[Tensor]) -> None:
    x, gradient = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)
    results = []
    for departs in (False, True):
        runner, weights = piece(departs, again)
        if departs:
            saved = carried(carried(forward(runner, weights, x, loses=False), CPU), CPU)
        else:
            saved = runner.forward(weights, x, 0)[1]
        if again:
            saved = runner.forward_again(weights, saved, 0)[1]
        if is_split:
            passed, half = backward_input(saved, [gradient])
            results.append((passed, backward_weights(half)))
        else:
            results.append(backward(saved, [gradient]))
    (passed, own), (passed_away, own_away) = results
    assert torch.equal(passed[0], passed_away[0])
    assert own.keys() == own_away.keys()
    assert all(torch.equal(own[name], own_away[name]) for name in own)
    assert copies


def test_a_storage_is_freed_with_its_graph(copies: list[Tensor]) -> None:
    runner, weights = piece(True)
    saved = forward(runner, weights, torch.randn(SAMPLES, WIDTH), loses=True)
    assert list(memory(saved))
    backward(saved, [torch.ones(())])
    assert not list(memory(saved))
    assert not copies


def test_what_was_on_the_cpu_comes_back_there() -> None:
    runner, weights = piece(True)
    saved = forward(runner, weights, torch.randn(SAMPLES, WIDTH), loses=True)
    tensor_offload = saved[0].tensor_offload
    assert tensor_offload is not None
    tensor_offload.move(torch.device("meta"))  # as it would be for a worker whose device is not the CPU
    assert {content.device for content in tensor_offload.contents} == {CPU}
