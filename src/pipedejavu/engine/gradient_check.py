"""The check of gradients before an update, and the error that it raises.

On a GPU the largest values are read at the end of the round, so that no update waits for them.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from pipedejavu.engine.finite import largest_values, read_all
from pipedejavu.engine.job import Job
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan


class _Unread(NamedTuple):
    """The largest gradients of an update on a GPU, not read yet."""

    step: int
    coefficient: float
    names: tuple[str, ...]
    limits: tuple[float, ...]
    values: list[Tensor]


class GradientCheck:
    """Finds gradients that are not finite, or so large that the optimizer's arithmetic overflows."""

    def __init__(self, job: Job, plan: Plan, worker: int):
        self.job, self.worker = job, worker
        self.remedy = "lower the learning rate or look at that batch"
        if plan.version.kind == "sync":
            self.remedy = "lower the learning rate, look at that batch, or skip such updates (--on-nan skip)"
        self._unread: list[_Unread] = []

    def check(self, step: int, summed: Tensors, coefficient: float) -> None:
        """Raises InputError if the gradients cannot be applied; for gradients on a GPU the next `read` raises it."""
        if any(gradient.is_cuda for gradient in summed.values()):
            values = largest_values([*summed.values()])
            self._unread.append(_Unread(step, coefficient, tuple(summed), self._limits(step, summed), values))
        elif fault := self.fault(step, summed, coefficient):
            raise InputError(f"{fault}; {self.remedy}")

    def read(self) -> None:
        """Raises InputError if an update on a GPU since the last call had gradients that cannot be applied."""
        unread, self._unread = self._unread, []
        for step, coefficient, names, limits, values in unread:
            if fault := self._describe(step, coefficient, names, limits, read_all(values)):
                raise InputError(f"{fault}; {self.remedy}")

    def fault(self, step: int, summed: Tensors, coefficient: float, clip_norm: float | None = None) -> str:
        """Returns what is wrong with gradients that are multiplied by `coefficient` and then clipped, or ""."""
        values = read_all(largest_values([*summed.values()]))
        if clip_norm is not None:  # no finite gradient exceeds it after clipping
            values = [min(value, clip_norm / coefficient) if math.isfinite(value) else value for value in values]
        return self._describe(step, coefficient, tuple(summed), self._limits(step, summed), values)

    def _limits(self, step: int, summed: Tensors) -> tuple[float, ...]:
        return tuple(self.job.optimizer.largest_gradient(step - 1, g.dtype) for g in summed.values())

    def _describe(
        self, step: int, coefficient: float, names: Iterable[str], limits: Iterable[float], values: Iterable[float]
    ) -> str:
        place = f"in step {step} on worker {self.worker}"
        for name, limit, value in zip(names, limits, values, strict=True):
            if not math.isfinite(value):
                return f"the gradient of '{name}' is {value} {place}"
            if value * coefficient > limit:
                size = f"reaches {value * coefficient:.3g} {place}, and the optimizer overflows beyond {limit:.3g}"
                return f"the gradient of '{name}' {size}"
        return ""
