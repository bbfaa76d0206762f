"""Byzantine replicas: some send faulty gradients, so that aggregation rules can be compared.

What a faulty replica sends depends only on its true gradient, the run's seed, the replica and the update, so that runs
are repeatable and the audit can replay the faults.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from pipedejavu.engine.unit_random import mixed
from pipedejavu.facts import InputError, nearest
from pipedejavu.plan import Plan

Kind = Literal["sign-flip", "scale", "random"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Byzantine:
    """The fault of the last `count` replicas: what they send in place of a gradient g.

    `sign-flip`: −factor·g; `scale`: factor·g; `random`: normal noise with factor times the RMS of g, per tensor.
    """

    count: int
    kind: Kind
    factor: float = 10.0

    @classmethod
    def parse(cls, text: str) -> "Byzantine":
        """Reads 'COUNT:KIND' or 'COUNT:KIND:FACTOR'."""
        count, _, rest = text.partition(":")
        kind, colon, factor = rest.partition(":")
        try:
            number, size = int(count), float(factor) if colon else cls.factor
        except ValueError:
            raise InputError(
                f"faulty replicas are COUNT:KIND or COUNT:KIND:FACTOR, such as 2:sign-flip, not '{text}'"
            ) from None
        for known in KINDS:
            if kind == known and number > 0:
                return cls(number, known, size)
        if number < 1:
            raise InputError(f"'{text}' makes {number} replicas faulty; give 1 or more")
        raise InputError(f"replicas are not faulty by '{kind}'{nearest(kind, KINDS)}")

    def check(self, plan: Plan, num_replicas: int) -> None:
        """Raises InputError if the plan's replicas send no gradients, or are fewer than `count`."""
        reduce = plan.reduce
        if (
            reduce.wire in ("none", "shared-memory")
            or reduce.combiner in ("elastic", "average")
            or (reduce.gate == "bound")
        ):
            raise InputError(
                f"the replicas of plan '{plan.name}' hand no gradients over, so none can be faulty; use preset:ddp,"
                " preset:zeno or preset:parameter-server"
            )
        if self.count > num_replicas:
            raise InputError(
                f"{self.count} replicas are to be faulty and plan '{plan.name}' has {num_replicas}; name fewer"
            )

    def is_faulty(self, replica: int, num_replicas: int) -> bool:
        """Whether a replica is one of the last `count`."""
        return replica >= num_replicas - self.count

    def spoilt(self, gradient: Tensor, *origin: int) -> Tensor:
        """Returns what is sent in place of one tensor; `origin` identifies the tensor within the run."""
        if self.kind != "random":
            return gradient * (-self.factor if self.kind == "sign-flip" else self.factor)
        source = torch.Generator().manual_seed(mixed(*origin))
        noise = torch.randn(gradient.shape, generator=source, dtype=torch.float32)
        size = gradient.square().mean().sqrt()
        return noise.to(gradient) * (self.factor * size)
