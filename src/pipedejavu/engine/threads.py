"""Workers as threads of this process: runs a program and returns its outcome."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from pipedejavu.analysis import verify
from pipedejavu.engine.applier import as_leaves
from pipedejavu.engine.device import CPU, device_of
from pipedejavu.engine.expert_shards import with_divided_experts
from pipedejavu.engine.filter_masks import FilterFinder, FilterMasks
from pipedejavu.engine.handlers import Handlers, Runners, pieces_of
from pipedejavu.engine.job import Batches, Job, Log
from pipedejavu.engine.master import masters_of, weights_of
from pipedejavu.engine.optimizer import LOW, Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.sharded_piece import ShardedPiece, is_sharded
from pipedejavu.engine.stage_division import Divisions
from pipedejavu.engine.staged_wire import staged
from pipedejavu.engine.tensor_parallel import (
    DividedStages,
    check_divisible,
    check_gpus_apart,
    divides_operators,
    is_first,
)
from pipedejavu.engine.unit_random import Unit
from pipedejavu.engine.wire import Exchange, ThreadWire, Wire, WireStoppedError
from pipedejavu.engine.worker_loop import WorkerLoop
from pipedejavu.engine.worker_thread import WorkerThread
from pipedejavu.facts import InputError, Span
from pipedejavu.plan import Plan
from pipedejavu.program import ActionKind, Program, Value, ValueKind
from pipedejavu.program.effect import rest_of, resting, update_place
from pipedejavu.program.value import HOST, SHARD
from pipedejavu.runtime.compiled_unit import UnitCompiler, is_compiled
from pipedejavu.runtime.compute_precision import ComputeFormat, allowed_tf32
from pipedejavu.runtime.deferred_logits import HeadUse


@dataclass(frozen=True)
class Outcome:
    """The result of a run: final weights by (piece, replica), logs, and the span of every action."""

    weights: dict[tuple[int, int], dict[str, Tensor]]
    logs: tuple[Log, ...]
    spans: tuple[Span, ...]


def check_runnable(program: Program) -> None:
    """Raises InputError if the program needs something that the engine cannot run yet."""
    plan = program.plan
    check_divisible(plan)
    cannot = {
        "compiled units with feed 'mask'": plan.is_compiled and plan.feed.kind == "mask",
        f"combiner 'average' with feed '{plan.feed.kind}'": plan.reduce.combiner == "average" and not plan.feed.is_own,
        "edges that skip": any(len(before) > 1 for before in program.inputs + program.outputs),
        "a folded program": program.copies > 1,
        f"{plan.precision.moments} moments of weights that are divided between workers": plan.precision.moments
        != "fp32"
        and divides_weights(plan),
        "precision fp16 with a server": plan.precision.compute == "fp16" and plan.reduce.wire == "server",
        "weights shared between devices": plan.keep.kind == "shared"
        and len({device_of(program, worker) for worker in range(len(program.workers))}) > 1,
    }
    for what, asked in cannot.items():
        if asked:
            raise InputError(f"the engine does not run {what} yet; plan '{plan.name}' needs it")


def divides_weights(plan: Plan) -> bool:
    """Whether workers hold parts of a parameter or of its state: by ZeRO, tensor parallelism, or experts."""
    return plan.keep.kind.startswith("zero") or plan.place.stage_shards is not None or plan.cut.kind == "layout"


def check_units(program: Program, job: Job) -> None:
    """Raises InputError if the plan splits the backward and a unit is compiled, as it runs its backward as a whole."""
    if not program.plan.splits_backward:
        return
    for name, module in job.units:
        if is_compiled(module):
            raise InputError(
                f"unit '{name}' is compiled and order '{program.plan.order.kind}' splits the backward, which a compiled"
                " module runs only as a whole; use order '1f1b', or the module as it was before torch.compile"
            )


class WorkerRunner(Protocol):
    """What runs the sequence of one worker."""

    @property
    def handlers(self) -> Handlers:
        """Its values and its log."""

    def run(self) -> list[Span]:
        """Runs the sequence once and returns its spans; raises the first error."""

    def stop(self, error: BaseException) -> None:
        """Makes `run` raise an error as soon as it can; callable from any thread."""


class Threads:
    """The workers of a program as threads of this process; their weights persist between runs."""

    def __init__(self, program: Program, job: Job, batches: Batches, workers: Sequence[WorkerRunner] | None = None):
        """Makes the workers, or uses those that are given."""
        check_runnable(program)
        check_units(program, job)
        self.program, self.updates = program, 0
        self.workers = _make_workers(program, job, batches) if workers is None else workers
        self.handlers = [worker.handlers for worker in self.workers]
        self.threads = [WorkerThread() for _ in self.workers]
        self.failure: BaseException | None = None
        self._ends: SimpleQueue[None] = SimpleQueue()
        """An entry for each worker that has ended its round."""

    def run(self) -> tuple[Span, ...]:
        """Runs the program once; returns the span of every action, or raises the error of the first worker to fail.

        After a failure the state is lost, and each later call raises the same error.
        """
        if self.failure is not None:
            raise self.failure
        results: list[list[Span] | BaseException] = []
        started, errors = 0, list[BaseException]()
        try:
            for handlers in self.handlers:
                handlers.begin(self.updates)
            with allowed_tf32(self.program.plan.precision):
                for index, worker in enumerate(self.workers):
                    self.threads[index].do(partial(_work, worker, results, self._ends))
                    started += 1
                self._wait(results, started)
        except KeyboardInterrupt as error:
            errors.append(error)
            self._stop(error)
            self._wait(results, started)  # a thread that still runs when its process ends may abort it
        errors += [end for end in results if isinstance(end, BaseException)]
        if errors or self.failure is not None:
            self.failure = self.failure or min(errors, key=lambda e: isinstance(e, WireStoppedError))
            self.threads.clear()
            raise self.failure
        self.updates += self.program.plan.steps
        spans = [span for end in results if not isinstance(end, BaseException) for span in end]
        return tuple(sorted(spans, key=lambda span: span.worker))

    def _wait(self, results: Sequence[object], count: int) -> None:
        """Waits until `count` workers have ended, or `give_up` is called. An interrupt may drop a queue entry."""
        while len(results) < count and self.failure is None:
            self._ends.get()

    def give_up(self, error: BaseException) -> None:
        """Makes `run` raise an error even if some worker never returns; callable from any thread."""
        self.failure = self.failure or error
        self._stop(error)
        self._ends.put(None)

    def _stop(self, error: BaseException) -> None:
        for worker in self.workers:
            worker.stop(error)

    def close(self) -> None:
        """Ends all workers; they cannot be used again."""
        self.threads.clear()
        for handlers in self.handlers:
            handlers.close()

    def outcome(self, spans: tuple[Span, ...] = ()) -> Outcome:
        """Returns the weights and logs so far."""
        weights = {key: tensors for handlers in self.handlers for key, tensors in final_weights(handlers).items()}
        return Outcome(weights, tuple(handlers.log for handlers in self.handlers), spans)


def _make_workers(program: Program, job: Job, batches: Batches) -> list[WorkerRunner]:
    check_gpus_apart(program)
    graph, handlers = verify(program), list[Handlers]()
    groups = program.groups.items()
    exchange = Exchange({name: g.workers for name, g in groups}, {name: g.helpers for name, g in groups if g.helpers})
    divisions, finder = Divisions(program, job, batches), FilterFinder(program.plan, job, batches)
    compiler = job.compiler_for(program)
    for index in range(len(program.workers)):
        # A module is run by one thread at a time, so each worker has a copy.
        copied = replace(job, units=copy.deepcopy(list(job.units)))
        wire = staged(ThreadWire(exchange, index), device_of(program, index))
        handlers.append(make_handlers(program, index, copied, batches, wire, compiler, divisions, finder))
    if program.plan.keep.kind == "shared":
        for other in handlers[1:]:
            _share_weights(handlers[0], other)
    fellows = WeakValueDictionary(enumerate(handlers))
    for worker in handlers:
        worker.fellows = fellows
    return [WorkerLoop(graph, index, worker) for index, worker in enumerate(handlers)]


def _work(worker: WorkerRunner, results: list[list[Span] | BaseException], ends: "SimpleQueue[None]") -> None:
    try:
        results.append(worker.run())
    except BaseException as error:
        results.append(error)
    ends.put(None)


def run_threads(program: Program, job: Job, batches: Batches, rounds: int = 1) -> Outcome:
    """Runs a program `rounds` times with one thread per worker."""
    threads = Threads(program, job, batches)
    spans: tuple[Span, ...] = ()
    for _ in range(rounds):
        spans = threads.run()
    return threads.outcome(spans)


def make_handlers(
    program: Program,
    index: int,
    job: Job,
    batches: Batches,
    wire: Wire,
    compiler: UnitCompiler | None = None,
    divisions: Divisions | None = None,
    finder: FilterFinder | None = None,
) -> Handlers:
    """Returns a worker's handlers, with the first version of its weights in their resting places.

    With a `compiler`, which workers may share, units run compiled. Workers of a process may share `divisions` of
    operators, and the `finder` of filters that can be left out.
    """
    form = ComputeFormat.of(program.plan.precision, [module for _, module in job.units])
    divided: DividedStages | None = None
    if divides_operators(program):
        divided = DividedStages(program, index, wire, divisions or Divisions(program, job, batches))
    runners: Runners = {}
    for piece, replica in pieces_of(program, index):
        parts = divided.units_of(piece, replica) if divided else {}
        units = [(u, job.units[u][0], parts.get(u, job.units[u][1])) for u in program.pieces[piece].units]
        if program.has_experts(piece) and program.plan.place.shards > 1:
            units = with_divided_experts(program, replica, units, wire)
        runners[piece, replica] = _make_runner(program, index, piece, units, job.seed, compiler, form)
    handlers = Handlers(program, index, runners, job, batches, wire)
    handlers.divided = divided
    if program.plan.feed.kind == "mask":
        masks = FilterMasks(program, job.seed, finder or FilterFinder(program.plan, job, batches))
        masks.note, handlers.applier.masks = handlers.log.events.append, masks
        for runner in runners.values():
            runner.filters = masks.of_microbatch
    if divides_operators(program) and not is_first(program, index):
        handlers.log.silence()
    for key in runners:
        put = _put_shards if is_sharded(program, key[0]) else _put_weights
        put(handlers, key)
    return handlers


def _make_runner(
    program: Program,
    index: int,
    piece: int,
    units: list[Unit],
    seed: int,
    compiler: UnitCompiler | None,
    form: ComputeFormat,
) -> PieceRunner:
    departs = any(
        a.kind == ActionKind.OFFLOAD and a.what == ValueKind.SAVED and a.piece == piece
        for a in program.workers[index].actions
    )
    runner = PieceRunner(units, seed, program.recomputed[piece], departs, compiler, form)
    if program.plan.order.head_chunks > 1 and not program.outputs[piece]:
        runner.head = HeadUse(program.plan.order.head_chunks, is_early=False)
    return runner.to(device_of(program, index))


def _put_weights(handlers: Handlers, key: tuple[int, int]) -> None:
    """Puts the initial weights of a piece into their resting places."""
    program, device, runner = handlers.program, handlers.device, handlers.runners[key]
    version = -1 if program.plan.version.kind == "torn" else 0
    for place in [place for kind, place in resting(program, key[0]) if kind == ValueKind.WEIGHTS]:
        weights, lows = weights_of(runner.initial, runner.lowered, is_split=runner.form.is_split)
        if device != CPU:
            weights = {n: w.pin_memory() if place == HOST else w.to(device) for n, w in weights.items()}
        handlers.values[Value.weights(*key, version, place)] = as_leaves(weights)
        put_lows(handlers, key, lows)


def _put_shards(handlers: Handlers, key: tuple[int, int]) -> None:
    """Begins a piece whose state is divided over replicas with its initial weights."""
    (piece, replica), runner = key, handlers.runners[key]
    weights, lows = weights_of(runner.initial, runner.lowered, is_split=runner.form.is_split)
    weights = {name: weight.to(handlers.device) for name, weight in weights.items()}
    shards = ShardedPiece(handlers.program, handlers.index, piece, weights, handlers.job.ties)
    handlers.sharded[key] = shards
    handlers.values[Value.weights(piece, replica, 0, SHARD)] = shards.parts
    if shards.zero < 3:
        handlers.values[Value.weights(piece, replica, 0)] = shards.leaves
    put_lows(handlers, key, lows)


def put_lows(handlers: Handlers, key: tuple[int, int], lows: Tensors) -> None:
    """Begins the optimizer state of a piece with the low halves of its split weights, unless a server updates it."""
    program = handlers.program
    if program.plan.keep.kind == "server" and key[1] < program.num_replicas:
        return
    device = CPU if state_rests_on_host(program, key[0]) else handlers.load_device or handlers.device
    state, shards = handlers.applier.state.setdefault(key, {}), handlers.sharded.get(key)
    for name, whole in lows.items():
        low = whole if shards is None else shards.part(name, whole)
        if low is not None:
            state.setdefault(name, {})[LOW] = low.to(device)


def state_rests_on_host(program: Program, piece: int) -> bool:
    """Whether the optimizer state of a piece is in host memory between updates."""
    return update_place(program, piece) == HOST or rest_of(program, piece) == "visit"


def _share_weights(first: Handlers, other: Handlers) -> None:
    """Makes a worker use the memory of the first worker's weights."""
    for value in list(other.values):
        if value.kind == ValueKind.WEIGHTS:
            shared = first.values[value._replace(replica=0)]
            # New tensors over the same memory, so that each worker has its own gradients.
            other.values[value] = {name: weight.data.requires_grad_() for name, weight in shared.items()}


def final_weights(handlers: Handlers, replica: int | None = None) -> dict[tuple[int, int], Tensors]:
    """Returns the newest masters of every piece that a worker holds or serves, with its frozen parameters.

    With a `replica`, only its pieces. Workers that divide state over replicas call it together.
    """
    masters = held_weights(handlers) | handlers.gather_masters()
    return {
        key: handlers.runners[key].frozen | tensors
        for key, tensors in masters.items()
        if replica is None or key[1] == replica
    }


def held_weights(handlers: Handlers) -> dict[tuple[int, int], Tensors]:
    """Returns the newest masters of every piece whose state is not divided over replicas."""
    handlers.settle()
    newest: dict[tuple[int, int], tuple[int, Tensors]] = {}
    for value, weights in handlers.values.items():
        key = (value.piece, value.replica)
        is_held = value.kind == ValueKind.WEIGHTS and key in handlers.runners and key not in handlers.sharded
        if is_held and value.number >= newest.get(key, (-2, {}))[0]:
            newest[key] = (value.number, weights)
    return {key: masters_of(ws, handlers.applier.state.get(key, {})) for key, (_, ws) in newest.items()}
