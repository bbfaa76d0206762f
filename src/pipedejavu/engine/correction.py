"""The correction of stale weights that a plan asks for: which stages it concerns, with which numbers."""

from dataclasses import replace

from pipedejavu.engine.job import Job
from pipedejavu.engine.optimizer import AdamW, Optimizer, Sgd
from pipedejavu.facts import InputError
from pipedejavu.plan.correction_rule import keeps_velocity, rate_factor, velocity_decay
from pipedejavu.program import Program
from pipedejavu.program.effect import compared_versions


class Correction:
    """What updates, forwards and backwards of one program do beside their own arithmetic."""

    def __init__(self, program: Program, job: Job):
        version = program.plan.version
        if version.rate_updates and not isinstance(job.optimizer, Sgd | AdamW):
            raise InputError(
                f"plan '{program.plan.name}' scales the learning rate of each stage, and the optimizer is"
                f" {type(job.optimizer).__name__}; use SGD, Adam or AdamW, or leave version.rate_updates out"
            )
        self.program, self.plan, self.job = program, program.plan, job
        self.predicts = version.correction == "weight-prediction"
        self.rebinds = version.correction == "discrepancy"
        self.compensates = version.correction == "delay-compensation" and version.kind != "late"
        """Whether updates compensate the gradients of all replicas."""
        self._compared = compared_versions(program)

    def decay(self, piece: int) -> float | None:
        """Returns the decay of a piece's velocity; None if it keeps none."""
        late = self.program.late_by(piece)
        return velocity_decay(self.plan, late) if keeps_velocity(self.plan) and late else None

    def version_read(self, key: tuple[int, int], update: int) -> int:
        """Returns the version that the forwards of an update read, within its round."""
        return self._compared.get((*key, update), update)

    def optimizer(self, piece: int, number: int) -> Optimizer:
        """Returns the optimizer for an update of a piece, with the learning rate of its stage."""
        optimizer, factor = self.job.optimizer, rate_factor(self.plan, self.program.late_by(piece), number)
        if factor == 1.0:
            return optimizer
        assert isinstance(optimizer, Sgd | AdamW)
        return replace(optimizer, lr=optimizer.lr * factor)
