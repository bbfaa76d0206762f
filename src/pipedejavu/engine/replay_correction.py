"""What a replay computes besides the model: corrections of stale weights, and faults of stages."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedejavu.engine.byzantine import Sent, StageReplica, spoilt_values
from pipedejavu.engine.correction import Correction
from pipedejavu.engine.job import Applied, Batches, Job, Read, Reread
from pipedejavu.engine.optimizer import Optimizer, State, Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import Saved, backward, like, tensors_of, with_saved
from pipedejavu.engine.staleness import ReboundWeights, add_to_velocity, compensate, extrapolate
from pipedejavu.program import Program


class ReplayCorrection:
    """What a plan's correction and a job's faults do to a replay; nothing if there are none."""

    def __init__(self, program: Program, job: Job, batches: Batches):
        self.program, self.job, self.correction = program, job, Correction(program, job)
        self.batches = batches
        self.weights: dict[tuple[int, int], Tensors] = {}
        """By (piece, microbatch), the weights that its forward read, if shares are compensated."""
        self.velocities: dict[tuple[int, int, int], State] = {}
        """By (piece, replica, version), the velocity of the weights when they had that version."""
        self.reread: dict[tuple[int, int], Tensors] = {}
        """By (piece, microbatch), the weights of a backward that reads others than its forward."""
        self.versions: dict[tuple[int, int], int] = {}
        """By (piece, microbatch), the version that its forward read."""
        self.replicas: dict[tuple[int, int], int] = {}
        """By (piece, microbatch), the replica that ran it."""

    def after_read(self, event: Read, weights: Tensors) -> Tensors:
        """Returns what a forward computes with, given the version that it read."""
        self.versions[event.piece, event.microbatch] = event.version
        self.replicas[event.piece, event.microbatch] = event.replica
        if self.program.plan.compensates_shares:
            self.weights[event.piece, event.microbatch] = weights
        if not self.correction.predicts:
            return weights
        late = event.microbatch // self.program.update_size - event.version
        return extrapolate(weights, self._velocity(event.piece, event.replica, event.version), late)

    def after_reread(self, event: Reread, weights: Tensors | None) -> bool:
        """Notes what a backward computes with; returns False if something that it reads does not exist yet."""
        piece, replica, microbatch, version = event
        if weights is None or (piece, microbatch) not in self.versions:
            return False
        back = self.versions[piece, microbatch] - version
        self.reread[piece, microbatch] = extrapolate(weights, self._velocity(piece, replica, version), back)
        return True

    def _velocity(self, piece: int, replica: int, version: int) -> State:
        return self.velocities.get((piece, replica, version), {})

    def after_update(self, event: Applied, old: Tensors, new: Tensors) -> None:
        """Keeps the velocity after an update, on a stage that keeps one."""
        piece, replica, version, *_ = event
        if (decay := self.correction.decay(piece)) is None:
            return
        before = self._velocity(piece, replica, version - 1)
        state = {name: {slot: tensor.clone() for slot, tensor in slots.items()} for name, slots in before.items()}
        add_to_velocity(state, old, new, decay)
        self.velocities[piece, replica, version] = state

    def compensated(self, summed: Tensors, newest: Tensors, read: Tensors, coefficient: float) -> Tensors:
        """Returns the gradients that an update applies."""
        if not self.correction.compensates:
            return summed
        return compensate(summed, newest, read, self.program.plan.version.compensation, coefficient)

    def summed(self, microbatches: Sequence[int], piece: int, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Returns the sum of a parameter's gradients over microbatches; each late share is compensated as a whole."""
        if not self.program.plan.compensates_shares:
            return torch.stack([*parts]).sum(0)
        versions = [self.versions[piece, i] for i in microbatches]
        newest = self.weights[piece, microbatches[versions.index(max(versions))]]
        shares: dict[int, list[int]] = {}
        for n, i in enumerate(microbatches):
            shares.setdefault(self.replicas[piece, i], []).append(n)
        sums = []
        for numbers in shares.values():
            total, read = torch.stack([parts[n] for n in numbers]).sum(0), self.weights[piece, microbatches[numbers[0]]]
            if read is not newest:
                count = sum(self.batches.count(microbatches[n]) for n in numbers)
                strength = self.program.plan.version.compensation
                total = compensate({name: total}, newest, read, strength, 1 / max(count, 1))[name]
            sums.append(total)
        return torch.stack(sums).sum(0)

    def optimizer(self, piece: int, number: int) -> Optimizer:
        """Returns the optimizer of an update, with the learning rate of its stage."""
        return self.correction.optimizer(piece, number)

    def has_all(self, microbatch: int) -> bool:
        """Whether the weights of all backwards of a microbatch are known."""
        update = microbatch // self.program.update_size
        pieces = range(len(self.program.pieces))
        return not self.correction.rebinds or all(
            self.versions[piece, microbatch] == update or (piece, microbatch) in self.reread for piece in pieces
        )

    def forward(
        self, runner: PieceRunner, at: tuple[int, int], leaves: Tensors, value: Any, computed: Callable[..., Any]
    ) -> tuple[Any, Saved]:
        """Runs the forward `at` a (piece, microbatch), so that its backward reads what it read in the run."""
        if (others := self.reread.get(at)) is None:
            value, saved = runner.forward(leaves, value, at[1])
            return like(value, self._sent(at, "activations", tensors_of(value))), saved
        with (rebound := ReboundWeights(leaves)):
            value, saved = runner.forward(rebound.linked(leaves), value, at[1])
        rebound.bound = {name: computed(name, weight) for name, weight in others.items()}
        return like(value, self._sent(at, "activations", tensors_of(value))), with_saved(saved, rebound=rebound)

    def backward(
        self, at: tuple[int, int], saved: Saved, gradients: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Tensors]:
        """Runs the backward `at` a (piece, microbatch); returns what it passes on, and the gradients of weights."""
        passed, of_weights = backward(saved, gradients)
        return self._sent(at, "errors", passed), of_weights

    def _sent(self, at: tuple[int, int], sent: Sent, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns what a stage passes on, with the fault that the job injects."""
        fault, (piece, microbatch) = self.job.byzantine, at
        if fault is None:
            return tensors
        stage, replica = self.program.pieces[piece].stage, self.replicas[at]
        where = StageReplica(piece, stage, replica, self.program.num_replicas)
        return spoilt_values(fault, self.job.seed, sent, where, tensors, microbatch)
