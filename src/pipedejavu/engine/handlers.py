"""Handlers: one method per kind of action, which reads and writes the values of one worker.

`values` holds activations and gradients as tensors, saved tensors as `Saved`, and weights and weight gradients as
tensors by parameter name.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.applier import Applier, as_leaves
from pipedejavu.engine.batch_loader import BatchLoader
from pipedejavu.engine.device import CPU, device_of, moved, record_stream
from pipedejavu.engine.global_norm import GlobalNorm
from pipedejavu.engine.gradient_check import GradientCheck
from pipedejavu.engine.job import Batches, Job, Log, Read, with_moments
from pipedejavu.engine.joined_state import JoinedState
from pipedejavu.engine.loss_scale import LossScale
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import (
    Saved,
    backward,
    backward_input,
    backward_weights,
    carried,
    like,
    memory_of,
    tensors_of,
    with_loss,
    with_saved,
)
from pipedejavu.engine.summed_piece import is_summed, reduce_gradients, sent_tensors
from pipedejavu.engine.weight_average import average_weights
from pipedejavu.engine.wire import Wire
from pipedejavu.facts import InputError
from pipedejavu.program import Action, ActionKind, Program, Table, UpdatePlace, Value, ValueKind
from pipedejavu.program.action import value_of
from pipedejavu.program.effect import rest_of
from pipedejavu.program.value import BY_MICROBATCH, HOST
from pipedejavu.runtime.compiled_unit import LossCall
from pipedejavu.runtime.compute_precision import ComputeFormat

_PER_PARAMETER = frozenset((ValueKind.WEIGHTS, ValueKind.WEIGHT_GRADIENT, ValueKind.PUSH, ValueKind.CONSENSUS))
"""Kinds of values that are held as tensors by parameter name."""

Runners = dict[tuple[int, int], PieceRunner]
"""Piece runners by (piece, replica)."""

Notice = Callable[[str, str], None]
"""Called with a lane and the action that it begins, or '' when the action ends."""


def pieces_of(program: Program, index: int) -> list[tuple[int, int]]:
    """Returns the (piece, replica) pairs that a worker holds or serves, in order; a server's come last."""
    served = {a.piece for a in program.workers[index].actions if a.update_place == UpdatePlace.SERVER}
    return sorted({*program.held(index), *((piece, program.num_replicas) for piece in served)})


class Handlers(JoinedState):
    """The values of one worker and the handlers of its actions."""

    def __init__(self, program: Program, index: int, runners: Runners, job: Job, batches: Batches, wire: Wire):
        super().__init__()
        self.program, self.index, self.runners = program, index, runners
        self.device = device_of(program, index)
        self.job = job = with_moments(job, program.plan.precision)
        self.batches, self.wire, self.log, self.live = batches, wire, Log(), 0
        self.loader = BatchLoader(program, index, batches)
        self.notice: Notice = lambda _lane, _action: None
        self.values: dict[Value, Any] = {}
        self.check = GradientCheck(job, program.plan, index)
        self._form = ComputeFormat.of(program.plan.precision, [module for _, module in job.units])
        self.scale, shared = LossScale(program.plan), (self.values, self.log)
        self.applier = Applier(program, runners, job, batches, *shared, self.device, self.check, self.scale)
        self.norm = GlobalNorm(program, index, runners, job, batches, *shared, self.check, self.scale)
        table = Table(program)
        self.effects = {a: table(a, index)[:2] for a in program.workers[index].actions}
        """The values that each action reads and writes."""
        self.reads = Counter(value for a in program.workers[index].actions for value in self.effects[a][0])
        self.readers = self.reads.copy()
        self.summed = {key: is_summed(program, index, key) for key in runners}
        self.lock = threading.Lock()
        self.first_microbatch = self.first_version = 0
        self._unread_losses: dict[int, Tensor] = {}
        """Losses of microbatches on a GPU, read at the end of the round so that no lane waits for the device."""
        self._present: dict[int, Action] = {}
        """By thread, the action that it runs."""
        for runner in runners.values():
            runner.while_compiling = self._unwatched
        self._handlers: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.FORWARD: self.forward,
            ActionKind.RECOMPUTE: self.recompute,
            ActionKind.BACKWARD: self.backward,
            ActionKind.INPUT_BACKWARD: self.backward_input,
            ActionKind.WEIGHT_BACKWARD: self.backward_weights,
            ActionKind.SEND: self.send,
            ActionKind.RECV: self.receive,
            ActionKind.REDUCE: self.reduce,
            ActionKind.SUM: lambda a: self.wire.serve(a.group),
            ActionKind.GATHER: self.gather,
            ActionKind.UPDATE: self.applier.update,
            ActionKind.DROP: self.drop,
            ActionKind.OFFLOAD: self.offload,
            ActionKind.FETCH: self.fetch,
            ActionKind.EVAL: self.applier.evaluate,
        }

    def begin(self, update: int) -> None:
        """Prepares a round that starts at an update: the newest weights become version 0."""
        plan, self.whole = self.program.plan, None
        self.first_microbatch = update * self.program.update_size
        self.first_version = update
        self.applier.begin(update)
        if self.divided is not None:
            count = self.program.update_size * plan.steps
            self.divided.prepare(range(self.first_microbatch, self.first_microbatch + count))
        self.readers = self.reads.copy()
        norms = {key.number: self.values.pop(key) for key in list(self.values) if key.kind == ValueKind.NORM}
        if plan.reduce.clip == "delayed" and plan.steps - 1 in norms:
            self.values[Value.norm(-1)] = norms[plan.steps - 1]
        weights = [value for value in self.values if value.kind == ValueKind.WEIGHTS]
        for value in weights:
            if value.number == self.applier.last_version(value.replica):
                self.values[value.at(0)] = self.values.pop(value)
        waves = [value for value in self.values if value.kind in (ValueKind.PUSH, ValueKind.CONSENSUS)]
        for value in waves:  # the round's end has applied them
            del self.values[value]
        self.norm.begin()

    def do(self, a: Action) -> None:
        """Runs one action and frees the values that no later action reads."""
        reads, writes = self.effects[a]
        if self.device.type == "cuda":
            held = tuple(memory_of(self.values.get(value)) for value in reads)
            record_stream(held, torch.cuda.current_stream(self.device))
        self._present[threading.get_ident()] = a
        self._handlers[a.kind](a)
        weights = [value for value in writes if value.kind == ValueKind.WEIGHTS]
        with self.lock:
            for value in reads:
                self.readers[value] -= 1
            older = (value.at(value.number - 1) for value in weights)
            ends = [value for value in (*reads, *older) if not self.readers[value]]
            freed = [self.values.pop(value, None) for value in ends if self._is_spent(value)]
            for value in weights:
                self._count_versions(value.piece, value.replica)
        del freed  # slow, so outside of the lock

    def _is_spent(self, value: Value) -> bool:
        """Whether a value that no later action reads can be freed: held weights only once a newer version exists."""
        if value.kind != ValueKind.WEIGHTS:
            return True
        is_held = (value.piece, value.replica) in self.runners
        return not is_held or value.at(value.number + 1) in self.values

    def _count_versions(self, piece: int, replica: int) -> None:
        """Records the peak number of versions of the weights that the worker holds; received weights do not count."""
        if (piece, replica) in self.program.held(self.index):
            first = Value.weights(piece, replica, 0)
            held = sum(value.at(0) == first for value in list(self.values))
            self.log.peak_versions = max(self.log.peak_versions, held)

    def forward(self, a: Action) -> None:
        """Runs the forward of a piece and keeps the tensors that its backward needs."""
        wave = next((v.number for v in self.effects[a][0] if v.kind == ValueKind.CONSENSUS), -1)
        if wave >= 0:
            self.applier.pull((a.piece, a.replica), a.version, wave)
        version = a.version if a.version < 0 else self.first_version + a.version
        known = self.applier.first_wave + wave if wave >= 0 else -1
        self.log.events.append(Read(a.piece, a.replica, self.first_microbatch + a.microbatch, version, known))
        if self.program.pieces[a.piece].opens_stage:
            self.live += 1
            self.log.peak_live = max(self.log.peak_live, self.live)
            self.log.peak_versions = max(self.log.peak_versions, 1)
        output, saved = self._run_piece(a, keeps_buffers=False)
        if self.program.outputs[a.piece]:
            self.values[Value.activation(a.piece, a.microbatch)] = output
        if self.program.keeps_saved(a.piece):
            self.values[Value.saved(a.piece, a.microbatch)] = saved

    def recompute(self, a: Action) -> None:
        """Recomputes a piece, or its recomputed units, with the weights and random numbers of the forward."""
        key = Value.saved(a.piece, a.microbatch)
        if not self.program.keeps_saved(a.piece):
            self.values[key] = self._run_piece(a, keeps_buffers=True)[1]
            return
        weights = self.values[Value.weights(a.piece, a.replica, a.version)]
        number = self.first_microbatch + a.microbatch
        head = self._head(a)
        output, saved = self._runner(a).forward_again(weights, self.values[key], number, head)
        ends = self.program.pieces[a.piece].units[-1] in self.program.recomputed[a.piece]
        if ends and not self.program.outputs[a.piece]:
            saved = with_loss(saved, output if head else self._loss(a, number, output))
        self.values[key] = saved

    def _run_piece(self, a: Action, keeps_buffers: bool) -> tuple[Any, Saved]:
        before = self.program.inputs[a.piece]
        if before:
            value = self.values[Value.activation(before[0], a.microbatch)]
        else:
            value = self.values.get(Value.batch(a.piece, a.microbatch))
            value = self._inputs(a.microbatch) if value is None else value
        weights = self.values[Value.weights(a.piece, a.replica, a.version)]
        weights, rebound = self.applier.corrected(a, weights)
        number, runner = self.first_microbatch + a.microbatch, self.runners[a.piece, a.replica]
        tensor_offload = runner.tensor_offload(weights) if runner.departs else None
        with tensor_offload or rebound or nullcontext():
            head = self._head(a)
            output, saved = runner.forward(weights, value, number, keeps_buffers, is_first=not before, head=head)
            if not self.program.outputs[a.piece]:
                loss = output if head else self._loss(a, number, output)
                self._note_loss(number, loss)
                saved = with_loss(saved, loss)
        saved = with_saved(saved, tensor_offload, rebound)
        return like(output, [t.detach() for t in tensors_of(output)]), saved

    def _head(self, a: Action) -> LossCall | None:
        """Returns the loss if it is compiled with the last unit of a piece."""
        runner = self._runner(a)
        if self.program.outputs[a.piece] or runner.compiler is None or runner.head is not None:
            return None
        return LossCall(self.job.loss, self._targets(self.first_microbatch + a.microbatch))

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Ends the notice of the present action while a unit is compiled, which takes longer than any forecast."""
        a = self._present[threading.get_ident()]
        self.notice(a.lane, "")
        try:
            yield
        finally:
            self.notice(a.lane, str(a))

    def _loss(self, a: Action, number: int, output: Any) -> Tensor:
        loss = self.divided.loss(a.piece, a.replica) if self.divided is not None else None
        with self._form.context(self.device):
            return (loss or self.job.loss)(output, self._targets(number))

    def _targets(self, number: int) -> Any:
        return moved(self.batches.targets(number), self.device)

    def _inputs(self, microbatch: int) -> Any:
        return moved(self.batches.inputs(self.first_microbatch + microbatch), self.device)

    def _note_loss(self, number: int, loss: Tensor) -> None:
        """Records the loss of a microbatch: now on a CPU, at the end of the round on a GPU."""
        if loss.is_cuda:
            self._unread_losses[number] = loss.detach()
            return
        loss_value = loss.item()
        self.log.note_loss(number, loss_value)
        if not math.isfinite(loss_value) and self.job.on_nan == "stop":
            step = number // self.program.update_size + 1
            raise InputError(
                f"the loss is {loss_value} in step {step}, microbatch {number}, on worker {self.index};"
                f" {self.check.remedy}"
            )

    def finish(self) -> None:
        """Ends a round: completes all sends, then reads losses and gradient checks from the device."""
        self.wire.flush()
        self._read_losses()
        self.check.read()

    def _read_losses(self) -> None:
        unread, self._unread_losses = self._unread_losses, {}
        for number, loss in unread.items():
            self._note_loss(number, loss.cpu())

    def backward(self, a: Action) -> None:
        """Runs the backward of a piece: writes its input gradient and adds to its weight gradient."""
        saved, gradients = self._needed(a)
        self.applier.rebind(a, saved[0].rebound, self.first_microbatch + a.microbatch)
        total = self._of_update(a)
        passed, self.values[total] = backward(saved, gradients, self.values.get(total), is_wide=self._is_wide(a))
        self._pass_on(a, passed)
        self._end_microbatch(a)

    def backward_input(self, a: Action) -> None:
        """Computes the gradient of the piece's input; of what was saved, only what the weights' half needs stays."""
        passed, self.values[Value.saved(a.piece, a.microbatch)] = backward_input(*self._needed(a))
        self._pass_on(a, passed)

    def backward_weights(self, a: Action) -> None:
        """Adds to the weight gradient of the piece."""
        total, half = self._of_update(a), self.values[Value.saved(a.piece, a.microbatch)]
        self.values[total] = backward_weights(half, self.values.get(total), is_wide=self._is_wide(a))
        self._end_microbatch(a)

    def _runner(self, a: Action) -> PieceRunner:
        return self.runners[a.piece, a.replica]

    def _needed(self, a: Action) -> tuple[Saved, tuple[Tensor, ...]]:
        """Returns the saved tensors and output gradients that a backward reads."""
        saved: Saved = self.values[Value.saved(a.piece, a.microbatch)]
        after = self.program.outputs[a.piece]
        if not after:
            number = self.first_microbatch + a.microbatch
            scale = self.scale.of_microbatch(self.program, self.batches, number)
            return saved, (torch.full_like(saved[-1].outputs[0], scale),)
        return saved, self.values[Value.gradient(after[0], a.microbatch)]

    def _of_update(self, a: Action) -> Value:
        """Returns the weight gradient that a backward adds to."""
        return Value.weight_gradient(a.piece, a.replica, a.microbatch // self.program.update_size)

    def _is_wide(self, a: Action) -> bool:
        """Whether gradients of 16-bit weights are added up in float32: if there is anything to add."""
        return self._runner(a).form.sums_wide and self.summed[a.piece, a.replica]

    def _pass_on(self, a: Action, gradients: tuple[Tensor, ...]) -> None:
        if self.program.inputs[a.piece]:
            self.values[Value.gradient(a.piece, a.microbatch)] = gradients

    def _end_microbatch(self, a: Action) -> None:
        if self.program.pieces[a.piece].opens_stage:
            self.live -= 1

    def send(self, a: Action) -> None:
        """Sends a value to another worker."""
        self.wire.send(sent_tensors(self, a), a.peer, self._key(a))

    def expect(self, a: Action) -> None:
        """Tells the wire what is received after the next value."""
        self.wire.expect(a.peer, self._key(a))

    def receive(self, a: Action) -> None:
        """Receives a value from another worker."""
        tensors = self.wire.receive(a.peer, self._key(a))
        if a.what in _PER_PARAMETER:
            names = next(runner.initial for (piece, _), runner in self.runners.items() if piece == a.piece)
            received = dict(zip(names, tensors, strict=True))
            self.values[value_of(a)] = as_leaves(received) if a.what == ValueKind.WEIGHTS else received
        else:
            self.values[value_of(a)] = tensors if len(tensors) > 1 or a.what == ValueKind.GRADIENT else tensors[0]

    def _key(self, a: Action) -> tuple[object, ...]:
        size = self.batches.length(self.first_microbatch + a.microbatch) if a.microbatch >= 0 else 0
        return (a.what, a.piece, size)

    def reduce(self, a: Action) -> None:
        """Sums a value over a group, in place; weights are averaged."""
        group = a.group
        if a.what == ValueKind.NORM:
            if self.program.plan.reduce.clip == "global":  # no forward is in flight, so reading does not wait
                self._read_losses()
            step = self.first_version + a.version + 1
            self.values[value_of(a)] = self.norm.find(a.version, step, lambda part: self.wire.add_up(part, group))
        elif a.what == ValueKind.WEIGHT_GRADIENT:
            self.applier.compensate_share(a)
            reduce_gradients(self, a)
        elif a.what in BY_MICROBATCH:
            return  # a unit exchanges rows inside its forward and its backward
        else:  # replicas that update separately average their weights
            self.values[value_of(a)] = as_leaves(average_weights(self, self.applier.masks, a))

    def gather(self, a: Action) -> None:
        """Makes the whole weights of a piece from the shards of its group."""
        if a.what not in BY_MICROBATCH:
            self.values[value_of(a)] = self.sharded[a.piece, a.replica].gather(self.wire)

    def drop(self, a: Action) -> None:
        """Frees a value, unless it was freed after its last reader."""
        self.values.pop(value_of(a), None)
        if a.what == ValueKind.WEIGHTS and (shards := self.sharded.get((a.piece, a.replica))) is not None:
            shards.drop()

    def offload(self, a: Action) -> None:
        """Moves a value to host memory."""
        if a.what == ValueKind.OPTIMIZER_STATE:
            del self.values[value_of(a)]
            self.applier.move_state((a.piece, a.replica), CPU)
        else:
            self.values[value_of(a, HOST)] = _taken(a, self.values.pop(value_of(a)), CPU)

    def fetch(self, a: Action) -> None:
        """Copies a value to the device; weights that rest in host memory also stay there."""
        key = value_of(a, HOST)
        if a.what == ValueKind.BATCH:
            self.values[value_of(a)] = moved(self.loader.inputs(self.first_microbatch + a.microbatch), self.device)
        elif a.what == ValueKind.OPTIMIZER_STATE:
            self.values[value_of(a)] = self.applier.move_state((a.piece, a.replica), self.device)
        else:
            stays = a.what == ValueKind.WEIGHTS and rest_of(self.program, a.piece) != "lean"
            brought = _taken(a, self.values[key] if stays else self.values.pop(key), self.device)
            self.values[value_of(a)] = as_leaves(brought) if a.what == ValueKind.WEIGHTS else brought


def _taken(a: Action, value: Any, device: torch.device) -> Any:
    """Returns the value of a FETCH or OFFLOAD, moved to a device."""
    return carried(value, device) if a.what == ValueKind.SAVED else moved(value, device)
