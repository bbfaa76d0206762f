"""Evaluation between two rounds: the newest weights, in eval mode and without gradients, on the workers that hold them.

Activations pass from worker to worker as in training. It changes no weight, buffer or random generator, so a run has
the same bits with and without it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipedejavu.engine.device import moved
from pipedejavu.engine.handlers import Handlers, pieces_of
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import tensors_of
from pipedejavu.engine.threads import final_weights
from pipedejavu.facts import InputError
from pipedejavu.program import Program


class _Generators:
    """The random generators of this process, whose states are set back once its last worker has evaluated."""

    def __init__(self) -> None:
        self._lock, self._num_workers, self._forks = threading.Lock(), 0, ExitStack()

    @contextmanager
    def kept(self, devices: Sequence[torch.device]) -> Iterator[None]:
        """Keeps the states for the duration; threads of one process may be inside together."""
        with self._lock:
            if not self._num_workers:
                self._forks.enter_context(torch.random.fork_rng(range(torch.cuda.device_count()) if devices else []))
            self._num_workers += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_workers -= 1
                if not self._num_workers:
                    self._forks.close()


_generators = _Generators()


class EvaluationBatches(Protocol):
    """The samples to evaluate, as numbered microbatches."""

    def __len__(self) -> int:
        """Returns the number of microbatches."""
        ...

    def inputs(self, number: int) -> Any:
        """Returns what the first piece reads."""
        ...

    def size(self, number: int) -> int:
        """Returns the number of samples of a microbatch."""
        ...


Measure = Callable[[int, Any], Tensor]
"""Takes the number of a microbatch and the last piece's output; returns a vector of figures to add up."""


def final_replicas(program: Program) -> list[int]:
    """Returns the replicas that hold the weights which the run would end with."""
    plan = program.plan
    if plan.reduce.combiner == "elastic" or (plan.reduce.wire == "server" and plan.reduce.gate == "lock"):
        return [program.num_replicas]
    replicas = sorted({replica for _, replica in _holders(program) if replica < program.num_replicas})
    is_common = plan.version.kind == "sync" and plan.feed.kind != "own"
    return replicas if is_common else replicas[:1]


class EvaluationRunner:
    """Runs one worker's pieces forward on microbatches of an evaluation."""

    def __init__(self, handlers: Handlers, units: Sequence[tuple[str, nn.Module]]):
        """`units` are the units of the job in eval mode, or its own modules if these have both modes."""
        self.handlers, self.program = handlers, handlers.program
        self.workers = _holders(self.program)
        self.replicas = final_replicas(self.program)
        if _has_statistics(units):  # those of the first replica are the run's
            if self.replicas[0] == self.program.num_replicas:
                raise InputError(
                    f"plan '{self.program.plan.name}' ends with the weights of a server, which has no running"
                    " statistics; leave --eval and --eval-data out, or use another plan"
                )
            self.replicas = self.replicas[:1]
        self._runners: dict[tuple[int, int], PieceRunner] = {}
        for (piece, replica), runner in handlers.runners.items():
            own = [(number, *units[number]) for number in self.program.pieces[piece].units]
            self._runners[piece, replica] = PieceRunner(own, handlers.job.seed)
            self._runners[piece, replica].share(runner, handlers.device)

    def run(self, batches: EvaluationBatches, measure: Measure, num_figures: int) -> Tensor:
        """Returns the sums of the figures of the microbatches whose last piece this worker runs.

        All workers call it together, between two rounds.
        """
        device = self.handlers.device
        total = torch.zeros(num_figures, dtype=torch.float64, device=device)
        weights = self._weights()
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), _generators.kept(devices), self._eval_mode():
            for number in range(len(batches)):
                replica = self.replicas[number % len(self.replicas)]
                for piece in range(len(self.program.pieces)):
                    if self.workers[piece, replica] == self.handlers.index:
                        figures = self._run_piece(piece, replica, number, batches, weights, measure)
                        total += 0 if figures is None else figures.to(device, torch.float64)
        self.handlers.wire.flush()
        return total.cpu()

    def _run_piece(
        self,
        piece: int,
        replica: int,
        number: int,
        batches: EvaluationBatches,
        weights: dict[tuple[int, int], Tensors],
        measure: Measure,
    ) -> Tensor | None:
        """Runs one piece and sends its output; returns the figures of the last piece."""
        handlers, device = self.handlers, self.handlers.device
        before, after = self.program.inputs[piece], self.program.outputs[piece]
        if not before:
            value = moved(batches.inputs(number), device)
        elif self.workers[before[0], replica] == handlers.index:
            value = self._kept.pop((before[0], number))
        else:
            key = ("evaluation", piece, batches.size(number))
            tensors = handlers.wire.receive(self.workers[before[0], replica], key)
            value = tensors if len(tensors) > 1 else tensors[0]
        handlers.notice("compute", f"the evaluation of microbatch {number}, piece {piece}")
        runner = self._runners[piece, replica]
        output, _ = runner.forward(moved(weights[piece, replica], device), value, number, is_first=not before)
        handlers.notice("compute", "")
        if not after:
            return measure(number, output)
        peer = self.workers[after[0], replica]
        if peer == handlers.index:
            self._kept[piece, number] = output
        else:
            handlers.wire.send(tensors_of(output), peer, ("evaluation", after[0], batches.size(number)))
        return None

    def _weights(self) -> dict[tuple[int, int], Tensors]:
        """Returns the newest weights, by the names that the pieces have in eval mode."""
        newest = final_weights(self.handlers)
        self._kept: dict[tuple[int, int], Any] = {}
        named: dict[tuple[int, int], Tensors] = {}
        for key, runner in self._runners.items():
            first = self.handlers.runners[key].names
            named[key] = {name: newest[key][first[name]] for name in runner.initial} if key in newest else {}
        return named

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Puts the modules into eval mode for the duration, each then back into the mode that it had."""
        modules = [m for runner in self._runners.values() for _, _, unit in runner.units for m in unit.modules()]
        modes = [(module, module.training) for module in modules]
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _has_statistics(units: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether a model has buffers that are part of its state, as running statistics are."""
    return any(
        buffer is not None and key not in part._non_persistent_buffers_set
        for _, unit in units
        for part in unit.modules()
        for key, buffer in part._buffers.items()
    )


def _holders(program: Program) -> dict[tuple[int, int], int]:
    """Returns the first worker that holds each piece of each replica."""
    workers: dict[tuple[int, int], int] = {}
    for worker in range(len(program.workers)):
        for key in pieces_of(program, worker):
            workers.setdefault(key, worker)
    return workers
