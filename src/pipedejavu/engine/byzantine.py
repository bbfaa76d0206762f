"""Faulty replicas on purpose: some hand over other gradients than theirs, so that aggregations can be compared.

What they hand over is a function of their true gradient, the run's seed, the replica and the update: runs repeat, and
the audit replays the faults too.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from pipedejavu.engine.piece import mixed
from pipedejavu.facts import InputError, nearest
from pipedejavu.plan import Plan

Kind = Literal["sign-flip", "scale", "random"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Byzantine:
    """How many replicas, the last ones, are faulty, and what they hand over in place of a gradient g.

    `sign-flip`: −factor·g; `scale`: factor·g; `random`: normal noise of factor times g's size, tensor by tensor.
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
            found = int(count), float(factor) if colon else cls.factor
        except ValueError:
            raise InputError(
                f"faulty replicas are COUNT:KIND or COUNT:KIND:FACTOR, such as 2:sign-flip, not '{text}'"
            ) from None
        for known in KINDS:
            if kind == known and found[0] > 0:
                return cls(found[0], known, found[1])
        if found[0] < 1:
            raise InputError(f"'{text}' makes {found[0]} replicas faulty; give 1 or more")
        raise InputError(f"replicas are not faulty by '{kind}'{nearest(kind, KINDS)}")

    def check(self, plan: Plan, num_replicas: int) -> None:
        """Raises InputError where a plan's replicas hand no gradients over, or are fewer."""
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

    def spoilt(self, gradient: Tensor, *place: int) -> Tensor:
        """Returns what is handed over in place of one tensor; `place` tells it from all others of the run."""
        if self.kind != "random":
            return gradient * (-self.factor if self.kind == "sign-flip" else self.factor)
        source = torch.Generator().manual_seed(mixed(*place))
        noise = torch.randn(gradient.shape, generator=source, dtype=torch.float32)
        size = gradient.square().mean().sqrt()
        return noise.to(gradient) * (self.factor * size)
