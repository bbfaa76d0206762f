"""Drafts: plans in the few numbers that a search turns, before any of them is written out.

A draft knows units by their positions and devices by their names; what it costs is `cost`'s, and how a plan says it is
`write`'s.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipedejavu.facts import Machine, Profile
from pipedejavu.plan.axis import in_line

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PlanningProblem:
    """A profile and a machine to plan for: those that were given, or with devices divided or joined."""

    profile: Profile
    machine: Machine
    devices: tuple[str, ...]
    """That may be used, by host and kind."""
    note: str = ""
    """What of the machine was changed."""
    question: "PlanningProblem | None" = None
    """The scene of the machine as it was given, where this one has teams of devices; plans are written for that."""
    tp_groups: tuple[tuple[str, ...], ...] = ()
    """That stand in the machine as one device each, under the name of their first."""
    degrees: tuple[int, ...] = (1,)
    """How many devices a worker may be a team of, where each stage has its own number."""

    @property
    def asked(self) -> "PlanningProblem":
        """The scene that plans are written for."""
        return self.question or self

    @property
    def team_size(self) -> int:
        """How many devices each one stands for."""
        return len(self.tp_groups[0]) if self.tp_groups else 1

    def tp_group(self, name: str) -> tuple[str, ...]:
        """Returns the devices that one stands for."""
        return next((tp_group for tp_group in self.tp_groups if tp_group[0] == name), (name,))


@dataclass(frozen=True)
class Mode:
    """Where state and saved activations rest, alike on all stages but for ZeRO."""

    recomputes: bool = False
    """As few units of each stage as make it fit, those that cost least for what they free."""
    activations: Literal["device", "host"] = "device"
    state: Literal["device", "host", "window"] = "device"
    """`host`: optimizer state, and who updates; `window`: the weights too."""
    device_pieces: int = 0
    """Of `host`: how many of the first units of each stage keep their state on the device."""
    zero: int = 0
    """Of the stages that divide their state over replicas; of several, each may."""

    @property
    def is_plain(self) -> bool:
        """Whether everything stays where it is made."""
        return self == PLAIN

    @property
    def uses_host(self) -> bool:
        """Whether anything waits in host memory."""
        return self.activations == "host" or self.state != "device"

    @property
    def goes_by_pieces(self) -> bool:
        """Whether units are pieces of their own: what is recomputed, moved or divided is then one of them at a time."""
        return self.recomputes or self.uses_host or self.zero > 0

    def __str__(self) -> str:
        replace = f" but for {self.device_pieces} units" if self.device_pieces else ""
        parts = ["recompute"] * self.recomputes + ["activations on the host"] * (self.activations == "host")
        parts += {
            "device": [],
            "host": [f"optimizer state on the host{replace}"],
            "window": ["weights through a window"],
        }[self.state]
        return ", ".join(parts + [f"ZeRO-{self.zero}"] * bool(self.zero)) or "all on the device"


PLAIN = Mode()

LEAST_BUCKET = 25 * 2**20
MOST_BUCKETS = 16
"""Of one stage's gradients, so that the programs of large models stay small."""


def bucket_bytes(gradient_bytes: float) -> float:
    """Returns the bytes that replicas of a whole model add up together, of so many gradients."""
    return max(LEAST_BUCKET, gradient_bytes // MOST_BUCKETS)


@dataclass(frozen=True)
class Stage:
    """A run of units, and the devices that hold it: each, and these share its microbatches, or teams of them."""

    start: int
    end: int
    group: tuple[str, ...]
    shards: int = 1
    """Of a team, next to each other in the group."""
    zero: int = 0

    @property
    def replicas(self) -> int:
        """Workers that each hold it."""
        return len(self.group) // self.shards


@dataclass(frozen=True)
class CandidatePlan:
    """One plan."""

    problem: PlanningProblem
    stages: tuple[Stage, ...]
    samples: int
    """Of a microbatch."""
    microbatches: int
    """Of an update, over all replicas."""
    mode: Mode = PLAIN
    is_stale: bool = False
    """Whether the pipeline never drains, with two weight versions (2BW)."""
    is_shared: bool = False
    """Whether replicas get shares of the samples by their speed: devices of the one stage, or pipelines and CPUs."""
    cpus: tuple[str, ...] = ()
    """That each train a whole replica beside the pipelines."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Those of the stages, one after the other."""
        return tuple(name for stage in self.stages for name in stage.group)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def is_even(self) -> bool:
        """Whether all stages have as many replicas."""
        return len({*self.sizes}) == 1

    @property
    def has_teams(self) -> bool:
        """Whether stages have teams of their own sizes."""
        return any(stage.shards > 1 for stage in self.stages)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Devices of each stage's workers."""
        return tuple(stage.shards * self.problem.team_size for stage in self.stages)

    @property
    def note(self) -> str:
        """What of the machine was changed, or which of its devices work together."""
        return note_of(self.degrees, self.problem)

    @property
    def keeping(self) -> str:
        """Where state and saved activations rest, in words."""
        divided = [str(number) for number, stage in enumerate(self.stages) if stage.zero]
        is_everywhere = len(divided) in (0, len(self.stages))
        where = "" if is_everywhere else f" in stage{'s' * (len(divided) > 1)} {', '.join(divided)}"
        return f"{self.mode}{where}"


def note_of(degrees: tuple[int, ...], problem: PlanningProblem) -> str:
    """Returns what is said of a scene whose stages have workers of so many devices."""
    return f"operators over {in_line(degrees)} devices" if max(degrees) > 1 else problem.asked.note
