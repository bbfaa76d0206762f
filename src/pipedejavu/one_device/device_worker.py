"""The worker of one GPU and its host: runs a round as a user's own loop with HybridAdamW would.

    forward over all units, loss and backward per microbatch    gradients leave as they are made
    one update per step                                         of the host's state during the next forward

It writes the log that the engine's worker would write, so that the audit replays it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.device import moved
from pipedejavu.engine.job import Applied, Job, Read
from pipedejavu.facts import InputError, Span
from pipedejavu.one_device.device_handlers import DeviceHandlers
from pipedejavu.one_device.round_spans import RoundSpans
from pipedejavu.one_device.step_review import PendingLosses, StepReview
from pipedejavu.one_device.unit_chain import UnitChain
from pipedejavu.program import ActionKind, Program


class DeviceWorker:
    """Runs the rounds of the only worker of a program."""

    def __init__(self, handlers: DeviceHandlers):
        self.handlers: DeviceHandlers = handlers
        self.optimizer = handlers.optimizer
        program, job = handlers.program, handlers.job
        recomputed = {unit for some in program.recomputed for unit in some}
        runners = [runner for _, runner in sorted(handlers.runners.items())]
        for runner in runners:
            runner.while_compiling = self._unwatched
        self._chain = UnitChain(runners, recomputed, job.loss, handlers.plain)
        self._pieces = {unit: number for number, piece in enumerate(program.pieces) for unit in piece.units}
        self._losses = PendingLosses(handlers.device)
        self._review = StepReview(
            program, job, handlers.batches, handlers.log, runners, self.optimizer.scheduler.model_state
        )
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._action = ""
        self.optimizer.scheduler.updates.accept = self._accept
        self.optimizer.scheduler.is_active = False

    @property
    def program(self) -> Program:
        """The program."""
        return self.handlers.program

    @property
    def job(self) -> Job:
        """The job."""
        return self.handlers.job

    def run(self) -> list[Span]:
        """Makes the updates of one round; returns the spans of its actions if the handlers need them."""
        handlers, device = self.handlers, self.handlers.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._raise_failure()
        spans: list[Span] = []
        for update in range(self.program.plan.steps):
            recorder = RoundSpans(self.program, self.optimizer, update) if handlers.needs_spans else None
            try:
                with self._active():
                    self._step(update, recorder)
            except BaseException as error:
                self.stop(error)
                raise
            if recorder is not None:
                spans += recorder.finish(after_s=max((span.end_s for span in spans), default=0.0))
        handlers.drop_loaded()
        handlers.log.peak_live = handlers.log.peak_versions = 1
        self._notice("")
        return spans

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Makes passes of the units count as training; gradients that the user's loop has left in them stay."""
        scheduler = self.optimizer.scheduler
        left = [(p, p.grad) for p in scheduler.model_state.params if p.grad is not None]
        for parameter, _ in left:
            parameter.grad = None
        scheduler.is_active = True
        try:
            yield
        finally:
            scheduler.is_active = False
            for parameter, gradient in left:
                parameter.grad = gradient

    def stop(self, error: BaseException) -> None:
        """Makes the round raise an error before its next unit; callable from any thread."""
        with self._lock:
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _step(self, update: int, recorder: RoundSpans | None) -> None:
        """Trains on the microbatches of one update, and applies their gradients."""
        handlers, optimizer = self.handlers, self.optimizer
        size, step = self.program.update_size, handlers.first_version + update + 1
        microbatches = tuple(range((step - 1) * size, step * size))
        count = sum(handlers.batches.count(i) for i in microbatches)
        if not count:
            raise InputError(
                f"no sample or label of update {step} counts; leave such samples out, or use larger batches"
            )
        handlers.settings.write(optimizer.param_groups, step - 1)
        optimizer.scheduler.updates.count = count
        self._review.begin(step)
        for microbatch in microbatches:
            self._train(microbatch, step - 1, recorder)
        optimizer.scheduler.complete()
        is_first = optimizer.plan is None  # it allocates and pins memory, which may take longer than a hang may
        self._notice("" if is_first else f"UPDATE0@{update + 1}")
        optimizer.step()
        scale = optimizer.scheduler.updates.scale
        for piece in range(len(self.program.pieces)):
            handlers.log.events.append(Applied(piece, 0, step, microbatches, scale or 0.0))

    def _train(self, microbatch: int, version: int, recorder: RoundSpans | None) -> None:
        """Runs forward, loss and backward of one microbatch."""
        handlers, relative = self.handlers, microbatch - self.handlers.first_microbatch
        for piece in range(len(self.program.pieces)):
            handlers.log.events.append(Read(piece, 0, microbatch, version))

        def passed(kind: ActionKind, unit: int) -> None:
            self._raise_failure()
            self._notice(f"{kind}{self._pieces[unit]}.{relative}@0")
            if recorder is not None:
                recorder.note(kind, unit, relative)

        value = moved(handlers.batches.inputs(microbatch), handlers.device)
        targets = moved(handlers.batches.targets(microbatch), handlers.device)
        with handlers.form.context(handlers.device):
            loss = self._chain.forward(_detached(value), targets, microbatch, passed, is_recorded=recorder is not None)
        del value
        self._losses.add(microbatch, loss)
        self._notice(f"B{len(self.program.pieces) - 1}.{relative}@0")
        loss.backward()  # type: ignore[no-untyped-call]
        if recorder is not None:
            recorder.note("ended", 0, relative)

    def _notice(self, action: str) -> None:
        """Tells the watchdog which action the compute lane begins; "" if none."""
        if self._action:
            self.handlers.notice("compute", "")
        self._action = action
        if action:
            self.handlers.notice("compute", action)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Ends the notice of the present action while a unit is compiled, which takes longer than any forecast."""
        action = self._action
        self._notice("")
        try:
            yield
        finally:
            self._notice(action)

    def _accept(self, norm: float) -> float | None:
        """Notes the losses of the step, and decides whether its gradients are applied."""
        review = self._review
        review.losses = self._losses.take(self.handlers.device)
        for microbatch, loss in review.losses:
            self.handlers.log.note_loss(microbatch, loss)
        return review.accept(norm, self.optimizer.scheduler.updates.count)


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_detached(part) for part in value)
    return value.detach() if isinstance(value, Tensor) else value
