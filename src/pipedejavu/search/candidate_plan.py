"""Candidate plans: the few numbers that a search varies, before a plan is written out.

A candidate names units by position and devices by name. `stage_cost` knows its cost, `plan_writer` writes its plan.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipedejavu.facts import Machine, Profile
from pipedejavu.plan.axis import Layout, in_line

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PlanningProblem:
    """A profile and a machine to plan for: as given, with CPUs divided, or with GPUs joined into groups."""

    profile: Profile
    machine: Machine
    devices: tuple[str, ...]
    """Devices that may be used, by host and kind."""
    note: str = ""
    """How the machine differs from the given one."""
    joined_from: "PlanningProblem | None" = None
    """The problem of the machine as given, if this one has tensor-parallel groups."""
    tp_groups: tuple[tuple[str, ...], ...] = ()
    """Groups that the machine lists as one device each, under the name of their first device."""
    degrees: tuple[int, ...] = (1,)
    """Tensor-parallel degrees that each stage may choose from."""
    layouts: tuple[Layout, ...] = ()
    """What the devices of a group divide beside columns, rows and heads."""
    is_optimistic: bool = False
    """Whether memory is estimated without the inputs and outputs that a stage of a pipeline holds only while its
    neighbours run ahead or wait."""

    @property
    def original(self) -> "PlanningProblem":
        """The problem that plans are written for."""
        return self.joined_from or self

    @property
    def tp_size(self) -> int:
        """Devices that each listed device stands for."""
        return len(self.tp_groups[0]) if self.tp_groups else 1

    def tp_group(self, name: str) -> tuple[str, ...]:
        """Returns the devices that a listed device stands for."""
        return next((tp_group for tp_group in self.tp_groups if tp_group[0] == name), (name,))


@dataclass(frozen=True)
class Mode:
    """Where state and saved activations rest: the same for all stages, but for ZeRO."""

    recomputes: bool = False
    """Whether each stage recomputes as few segments as make it fit, the least time per byte freed first."""
    activations: Literal["device", "host"] = "device"
    state: Literal["device", "host", "window"] = "device"
    """`host`: the host holds the optimizer state and updates it; `window`: it holds the weights, too."""
    device_pieces: int = 0
    """The first units of each stage whose state stays on the device, if `state` is `host`."""
    zero: int = 0
    """ZeRO stage of the pipeline stages that divide their state; in a pipeline each stage may or may not."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing is recomputed, moved or divided."""
        return self == PLAIN

    @property
    def uses_host(self) -> bool:
        """Whether anything waits in host memory."""
        return self.activations == "host" or self.state != "device"

    @property
    def goes_by_pieces(self) -> bool:
        """Whether each unit is a piece, so that units are moved, divided or recomputed one at a time."""
        return self.uses_host or self.zero > 0

    def __str__(self) -> str:
        exception = f" but for {self.device_pieces} units" if self.device_pieces else ""
        parts = ["recompute"] * self.recomputes + ["activations on the host"] * (self.activations == "host")
        parts += {
            "device": [],
            "host": [f"optimizer state on the host{exception}"],
            "window": ["weights through a window"],
        }[self.state]
        return ", ".join(parts + [f"ZeRO-{self.zero}"] * bool(self.zero)) or "all on the device"


PLAIN = Mode()

LEAST_BUCKET = 25 * 2**20
MOST_BUCKETS = 16
"""Buckets per stage at most, so that the programs of large models stay small."""


def bucket_bytes(gradient_bytes: float) -> float:
    """Returns the bucket size with which replicas of a whole model reduce their gradients."""
    return max(LEAST_BUCKET, gradient_bytes // MOST_BUCKETS)


@dataclass(frozen=True)
class Stage:
    """Consecutive units, and the devices of the workers that hold them and share their microbatches."""

    start: int
    end: int
    group: tuple[str, ...]
    shards: int = 1
    """Consecutive devices of the group per worker: its tensor-parallel group."""
    zero: int = 0

    @property
    def replicas(self) -> int:
        """Workers that each hold the stage."""
        return len(self.group) // self.shards


@dataclass(frozen=True)
class CandidatePlan:
    """A plan as a search sees it."""

    problem: PlanningProblem
    stages: tuple[Stage, ...]
    samples: int
    """Samples per microbatch."""
    microbatches: int
    """Microbatches per update, over all replicas."""
    mode: Mode = PLAIN
    is_stale: bool = False
    """Whether the pipeline never drains, with two weight versions (2BW)."""
    is_shared: bool = False
    """Whether replicas get shares of the batch by their speed: the devices of a single stage, or pipelines and CPUs."""
    cpus: tuple[str, ...] = ()
    """CPUs that each train a whole replica beside the pipelines."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of all stages, in order."""
        return tuple(name for stage in self.stages for name in stage.group)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def is_even(self) -> bool:
        """Whether all stages have the same number of replicas, which each get as many microbatches."""
        return len({*self.sizes}) == 1 and (self.is_shared or self.microbatches % self.sizes[0] == 0)

    @property
    def has_tp_groups(self) -> bool:
        """Whether stages choose their own tensor-parallel degrees."""
        return any(stage.shards > 1 for stage in self.stages)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Devices per worker of each stage."""
        return tuple(stage.shards * self.problem.tp_size for stage in self.stages)

    @property
    def note(self) -> str:
        """How the machine differs from the given one, or its tensor-parallel degrees."""
        return note_of(self.degrees, self.problem)

    @property
    def keeping(self) -> str:
        """Where state and saved activations rest, and which stages divide them."""
        divided = [str(number) for number, stage in enumerate(self.stages) if stage.zero]
        is_everywhere = len(divided) in (0, len(self.stages))
        where = "" if is_everywhere else f" in stage{'s' * (len(divided) > 1)} {', '.join(divided)}"
        return f"{self.mode}{where}"


def note_of(degrees: tuple[int, ...], problem: PlanningProblem) -> str:
    """Returns the note on a plan with these devices per worker of each stage."""
    if max(degrees) == 1:
        return problem.original.note
    what = " and ".join({"context": "sequence"}.get(layout, layout) for layout in problem.layouts)
    beside = "" if "context" in problem.layouts else "operators, " if what else "operators"
    return f"{beside}{what} over {in_line(degrees)} devices"
