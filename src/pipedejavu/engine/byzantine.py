"""Byzantine replicas and stages: some send faulty values, so that schedules and aggregation rules can be compared.

What a faulty worker sends depends only on the true value, the run's seed, the replica, the piece and the update or
microbatch, so that runs are repeatable and the audit can replay the faults.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pipedejavu.engine.unit_random import mixed
from pipedejavu.facts import InputError, nearest
from pipedejavu.plan import Plan

Kind = Literal["sign-flip", "scale", "random"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Sent = Literal["gradients", "activations", "errors"]
"""What is faulty: weight gradients, outputs of forwards, or input gradients of backwards."""
SENT: tuple[Sent, ...] = get_args(Sent)


@dataclass(frozen=True)
class Byzantine:
    """The fault of the last `count` replicas, or of one of their stages: what they send in place of a tensor g.

    `sign-flip`: −factor·g; `scale`: factor·g; `random`: normal noise with factor times the RMS of g, per tensor.
    """

    count: int
    kind: Kind
    factor: float = 10.0
    stage: int | None = None
    """The faulty stage; None for all stages of a replica."""
    sent: Sent = "gradients"

    @classmethod
    def parse(cls, text: str) -> "Byzantine":
        """Reads 'COUNT:KIND[:FACTOR][@STAGE[:SENT]]'."""
        text, at, place = text.partition("@")
        stage, sent = _place(place) if at else (None, SENT[0])
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
                return cls(number, known, size, stage, sent)
        if number < 1:
            raise InputError(f"'{text}' makes {number} replicas faulty; give 1 or more")
        raise InputError(f"replicas are not faulty by '{kind}'{nearest(kind, KINDS)}")

    def check(self, plan: Plan, num_replicas: int) -> None:
        """Raises InputError if the plan's replicas send no gradients, or are fewer than `count`."""
        reduce, stages = plan.reduce, plan.num_stages or 1
        if self.stage is not None and self.stage >= stages:
            raise InputError(
                f"stage {self.stage} is to be faulty and plan '{plan.name}' has {stages} from 0 on; name one of them"
            )
        passes = self.sent != "gradients"
        if passes and (plan.place.kind != "linear" or plan.order.is_eager or stages == 1):
            raise InputError(
                f"faulty {self.sent} are those that workers of a linear pipeline pass on, stage by stage; plan"
                f" '{plan.name}' has {stages} stages, place '{plan.place.kind}'; use preset:1f1b or preset:pipedream"
            )
        silent = {"gradients": None, "activations": stages - 1, "errors": 0}[self.sent]
        if silent is not None and self.stage == silent:
            raise InputError(f"stage {silent} of plan '{plan.name}' passes no {self.sent} on; name another stage")
        if self.sent == "gradients" and (
            reduce.wire in ("none", "shared-memory")
            or reduce.combiner in ("elastic", "average")
            or (reduce.gate == "bound")
        ):
            raise InputError(
                f"the replicas of plan '{plan.name}' hand no gradients over, so none can be faulty; use preset:ddp,"
                " preset:zeno or preset:parameter-server"
            )
        if self.sent == "gradients" and plan.compensates_shares:
            raise InputError(
                f"plan '{plan.name}' compensates late shares, and the replay of a fault does not; set"
                " version.correction to 'none'"
            )
        if self.count > num_replicas:
            raise InputError(
                f"{self.count} replicas are to be faulty and plan '{plan.name}' has {num_replicas}; name fewer"
            )

    def is_faulty(self, replica: int, num_replicas: int, stage: int, sent: Sent = "gradients") -> bool:
        """Whether what a stage of a replica sends is faulty."""
        return sent == self.sent and replica >= num_replicas - self.count and self.stage in (None, stage)

    def spoilt(self, gradient: Tensor, *origin: int) -> Tensor:
        """Returns what is sent in place of one tensor; `origin` identifies the tensor within the run."""
        if self.kind != "random":
            return gradient * (-self.factor if self.kind == "sign-flip" else self.factor)
        source = torch.Generator().manual_seed(mixed(*origin))
        noise = torch.randn(gradient.shape, generator=source, dtype=torch.float32)
        size = gradient.square().mean().sqrt()
        return noise.to(gradient) * (self.factor * size)


def _place(text: str) -> tuple[int, Sent]:
    """Reads 'STAGE' or 'STAGE:SENT'."""
    stage, colon, sent = text.partition(":")
    if not stage.isdecimal():
        raise InputError(f"a faulty stage is @STAGE or @STAGE:SENT, such as @1:activations, not '@{text}'")
    for known in SENT:
        if known == sent or not colon:
            return int(stage), known
    raise InputError(f"a stage sends no '{sent}'{nearest(sent, SENT)}")


class StageReplica(NamedTuple):
    """A piece of a replica."""

    piece: int
    stage: int
    replica: int
    num_replicas: int


def spoilt_values(
    fault: Byzantine, seed: int, sent: Sent, at: StageReplica, tensors: Sequence[Tensor], microbatch: int
) -> tuple[Tensor, ...]:
    """Returns what a stage passes on for a microbatch in place of some tensors."""
    if not fault.is_faulty(at.replica, at.num_replicas, at.stage, sent):
        return tuple(tensors)
    origin = (seed, SENT.index(sent), microbatch, at.piece)
    pairs = enumerate(tensors)
    return tuple(fault.spoilt(t, *origin, n) if t.is_floating_point() else t for n, t in pairs)
