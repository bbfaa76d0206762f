"""The seven axes of a plan: small records, each of which prints as a short text.

An axis says what a plan chose, never how it is carried out; `compile` gives the values their meaning.
"""

from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field

from pipedejavu.facts import Record

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Zero = Annotated[int, Field(ge=0, le=3)]
Rest = Literal["device", "visit", "host", "lean", "window"]
Layout = Literal["col", "row", "head", "stationary-x", "stationary-y", "stationary-w", "expert"]


def in_line(numbers: tuple[int, ...]) -> str:
    """Returns a number for each stage as '4-1-1', or once where all have the same."""
    return "-".join(map(str, numbers if len({*numbers}) > 1 else numbers[:1]))


class Cut(Record):
    """What is divided: nothing, the chain of units, or each operator."""

    kind: Literal["whole", "chain", "layout"] = "whole"
    stages: int | None = Field(default=None, ge=1)
    """Of a chain; by default as many as the place has room for."""
    bounds: tuple[Count, ...] | None = None
    """The first unit of each stage after the first; by default stages of about equal forward and
    backward time."""
    begins: tuple[Count, ...] = ()
    """The units that are meant, where the model is no chain: the operation of its recorded graph with which each after
    the first begins, and at the end the number of all. `train` cuts it there."""
    layouts: tuple[Layout, ...] = ()
    """Of a layout: how the operators inside each unit are divided, in order."""

    def __str__(self) -> str:
        if self.kind == "chain":
            return f"chain({self.stages})" if self.stages else "chain"
        return " ".join(self.layouts) if self.kind == "layout" else self.kind


class Place(Record):
    """Where each (replica, stage) lives."""

    kind: Literal["linear", "loop", "v", "bidirectional"] = "linear"
    workers: int = Field(default=1, ge=1)
    """In one pipeline."""
    chunks: int = Field(default=1, ge=1)
    """Stages on each worker, for `loop`; 2 for `v` and `bidirectional`."""
    replicas: int = Field(default=1, ge=1)
    """Data-parallel copies of the whole pipeline."""
    stage_replicas: tuple[Count, ...] | None = Field(default=None, min_length=1)
    """Workers for each stage of one linear pipeline, where stages differ; they share its microbatches."""
    shards: int = Field(default=1, ge=1)
    """Workers that hold each stage together, for a `layout` cut."""
    stage_shards: tuple[Count, ...] | None = Field(default=None, min_length=1)
    """Devices that each worker of a stage is a team of, which divides its operators; for each stage, or, where workers
    have several, for each worker of a pipeline."""
    cpu_replicas: int = Field(default=0, ge=0)
    """CPU workers that each hold a whole replica beside the pipelines."""
    servers: int = Field(default=0, ge=0)
    """Workers that hold weights or sum gradients but train no samples."""
    devices: tuple[str, ...] | None = None
    """The machine's devices, worker by worker, of a team all: pipelines first, then CPU replicas, then servers.
    By default GPUs in the machine's order, then CPUs; servers and CPU replicas take CPUs."""

    def __str__(self) -> str:
        text = f"loop({self.chunks})" if self.kind == "loop" else self.kind
        if self.kind == "linear" and self.workers == 1 and not self.stage_replicas:
            text = "one"
        if self.stage_replicas:
            text += f" ×{'-'.join(map(str, self.stage_replicas))}"
        if self.replicas > 1:
            text += f" ×{self.replicas}"
        if self.shards > 1:
            text += f" mesh({self.shards})"
        if self.stage_shards:
            text += f" mesh({in_line(self.stage_shards)})"
        if self.cpu_replicas:
            text += f" + {self.cpu_replicas} cpu"
        if self.servers:
            text += f" + {self.servers} server" + "s" * (self.servers > 1)
        return text


class Feed(Record):
    """Who gets which samples."""

    kind: Literal["microbatch", "round-robin", "own", "alternate", "share", "mask", "same"] = "microbatch"
    microbatches: int = Field(default=1, ge=1)
    """In one update, for each pipeline."""
    samples: int = Field(default=1, ge=1)
    """In one microbatch; of `share`, at most."""
    shares: tuple[Share, ...] | None = Field(default=None, min_length=1)
    """Of `share`: each replica's part of the samples of an update, CPU replicas last; by default those with the
    shortest update, in whole samples, where some may get none."""
    is_controlled: bool = False
    """Whether shares, or masks, follow the measured rates while the run goes on."""
    budgets: tuple[Share, ...] | None = Field(default=None, min_length=1)
    """Of `mask`: the share of the full computation that each replica can afford."""

    def __str__(self) -> str:
        return self.kind + ("*" if self.is_controlled else "")


class Order(Record):
    """The order of actions on each worker."""

    kind: Literal[
        "step", "gpipe", "1f1b", "1f1b-async", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "gems",
        "chimera", "layer-major", "ready-first", "written",
    ] = "step"  # fmt: skip
    rows: tuple[str, ...] | None = None
    """Of order 'written': what each worker of a pipeline runs, as 'F0 F1 B0 B1'."""
    recompute: Share = 0.0
    """Share of each stage's units whose activations are computed again for the backward pass: its first ones."""
    recompute_units: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Units that are, in place of a share; of a piece that holds some of them these alone run forward again."""
    recomputes_early: bool = False
    """Whether recomputing starts before the gradient has arrived, as torchgpipe does."""
    prefetch: int = Field(default=0, ge=0)
    """How many pieces, or batches of data, are brought in ahead of their use."""
    is_eager: bool = False
    """Whether a piece is reduced and updated as soon as its gradient is final, piece by piece, rather
    than the worker's whole stage at once."""

    @property
    def has_recompute(self) -> bool:
        """Whether anything is computed again."""
        return self.recompute > 0 or self.recompute_units is not None

    def __str__(self) -> str:
        recompute = "recompute" if self.recompute == 1 else f"recompute({self.recompute:g})"
        if self.recompute_units is not None:
            recompute = f"recompute({len(self.recompute_units)} units)"
        recompute = f"early {recompute}" if self.recomputes_early else recompute
        parts = [self.kind] + [recompute] * self.has_recompute
        parts += [f"prefetch({self.prefetch})"] * (self.prefetch > 0) + ["eager"] * self.is_eager
        return " + ".join(parts)


class Version(Record):
    """Which weights a microbatch reads."""

    kind: Literal["sync", "stash", "vertical", "double-buffer", "local", "torn"] = "sync"

    def __str__(self) -> str:
        return self.kind


class Reduce(Record):
    """How contributions become an update."""

    wire: Literal[
        "none", "all-reduce", "reduce-scatter", "server", "shared-memory", "summation-service"
    ] = "none"  # fmt: skip
    gate: Literal["barrier", "lock", "none", "round-robin", "bound"] = "barrier"
    """When a contribution may be applied."""
    bound: int = Field(default=0, ge=0)
    """Of the gate `bound`: how many waves the fastest may be ahead (D)."""
    combiner: Literal["sum", "average", "elastic", "score-trim"] = "sum"
    trim: int = Field(default=0, ge=0)
    """Of `score-trim`: how many contributions, those with the lowest scores, are dropped."""
    penalty: float = Field(default=0.005, ge=0)
    """Of `score-trim`: what a score loses for the squared norm of its gradient, in learning rates (ρ/γ)."""
    period: int = Field(default=1, ge=1)
    """Local updates between two reductions."""
    clip: Literal["none", "global", "delayed"] = "none"
    """Clipping by the norm over all stages: of this update's gradients, or of the one before."""
    has_buffer_broadcast: bool = False
    """Whether running statistics are sent from the first replica to the others."""

    def __str__(self) -> str:
        if self.wire == "none":
            text = "–"
        else:
            gate = f"bound({self.bound})" if self.gate == "bound" else self.gate
            combiner = f"score-trim({self.trim})" if self.combiner == "score-trim" else self.combiner
            text = ", ".join([self.wire] + [gate] * (gate != "barrier") + [combiner] * (combiner != "sum"))
        text += f", every {self.period}" if self.period > 1 else ""
        return text + (f", clip {self.clip}" if self.clip != "none" else "")


class Keep(Record):
    """Where each state rests, and who updates it."""

    kind: Literal["replicated", "zero-1", "zero-2", "zero-3", "host", "split", "server", "shared"] = "replicated"
    """`host`: weights and optimizer state rest in host memory; `split`: weights on the device, optimizer
    state of the first pieces there too and of the rest in host memory; `shared`: one copy for all."""
    zeros: tuple[Zero, ...] | None = Field(default=None, min_length=1)
    """Of a zero kind, the highest of them: the one of each stage, where they differ; 0 divides nothing."""
    window: int = Field(default=1, ge=1)
    """Of weights that rest in host memory: pieces on the device at once, beside those that are prefetched."""
    device_pieces: int = Field(default=0, ge=0)
    """Of `split`: how many of the first pieces of a stage keep their optimizer state on the device."""
    places: tuple[Rest, ...] | None = Field(default=None, min_length=1)
    """Of `split`: where the state of each piece of a stage rests, in place of `device_pieces`. `device`, which updates
    it; `visit`: host memory, from where it comes to the device for its update; `host`, which updates it; `lean`: the
    host, which has no copy of the weights and asks the device for them; `window`: the host, with the weights, which
    come for each use."""
    visitors: int = Field(default=1, ge=1)
    """Of `visit`: pieces whose state is on the device at once."""
    activations: Literal["device", "host"] = "device"
    """Where saved activations wait for the backward pass."""
    versions: int | None = Field(default=None, ge=1)
    """Most weight versions that may be held; by default as many as the algorithm needs."""
    persists: bool = False
    """Of `zero-3`: gathered weights stay until the last backward pass of the batch."""

    def __str__(self) -> str:
        text: str = self.kind
        if self.zeros:
            text = f"zero-{in_line(self.zeros)}"
        if self.kind == "host":
            text += f"({self.window})"
        if self.kind == "split":
            text += f"({self._places() if self.places else self.device_pieces})"
        if self.activations == "host":
            text += ", activations on host"
        if self.versions:
            text += f", {self.versions} version" + "s" * (self.versions > 1)
        return text + (", persists" if self.persists else "")

    def _places(self) -> str:
        """Returns runs of pieces that rest alike: '2 device, 5 visit'."""
        runs = ((rest, len([*found])) for rest, found in groupby(self.places or ()))
        return ", ".join(f"{count} {rest}" for rest, count in runs)
