"""Drafts: plans in the few numbers that a search turns, before any of them is written out.

A draft knows units by their positions and devices by their names; what it costs is `cost`'s, and how a plan says it is
`write`'s.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipedejavu.facts import Machine, Profile

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scene:
    """A profile and a machine to plan for: those that were given, or with devices divided or joined."""

    profile: Profile
    machine: Machine
    devices: tuple[str, ...]
    """That may be used, by host and kind."""
    note: str = ""
    """What of the machine was changed."""
    only_costed: str = ""
    """Why the engine does not run plans for it."""


@dataclass(frozen=True)
class Mode:
    """Where state and saved activations rest, alike on all stages."""

    recomputes: bool = False
    """As few units of each stage as make it fit, those that cost least for what they free."""
    activations: Literal["device", "host"] = "device"
    state: Literal["device", "host", "window"] = "device"
    """`host`: optimizer state, and who updates; `window`: the weights too."""
    device_pieces: int = 0
    """Of `host`: how many of the first units of each stage keep their state on the device."""
    zero: int = 0

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
        but = f" but for {self.device_pieces} units" if self.device_pieces else ""
        parts = ["recompute"] * self.recomputes + ["activations on the host"] * (self.activations == "host")
        parts += {"device": [], "host": [f"optimizer state on the host{but}"], "window": ["weights through a window"]}[
            self.state
        ]
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
    """A run of units, and the devices that each hold it and share its microbatches."""

    start: int
    end: int
    group: tuple[str, ...]


@dataclass(frozen=True)
class Draft:
    """One plan."""

    scene: Scene
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
        """Devices of each stage."""
        return tuple(len(stage.group) for stage in self.stages)
