"""The eight axes of a plan: small records that print as short texts.

An axis states a choice, not its implementation; `compile` gives the values their meaning.
"""

from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field

from pipedejavu.facts import Record

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Zero = Annotated[int, Field(ge=0, le=3)]
Rest = Literal["device", "visit", "host", "lean", "window"]
Layout = Literal[
    "col", "row", "head", "sequence", "vocabulary", "context", "stationary-x", "stationary-y", "stationary-w", "expert"
]


def in_line(numbers: tuple[int, ...]) -> str:
    """Returns a number per stage as '4-1-1', or a single number if all are equal."""
    return "-".join(map(str, numbers if len({*numbers}) > 1 else numbers[:1]))


class Cut(Record):
    """What is divided: nothing, the chain of units, or each operator."""

    kind: Literal["whole", "chain", "layout"] = "whole"
    stages: int | None = Field(default=None, ge=1)
    """Stages of a chain; by default as many as the place holds."""
    bounds: tuple[Count, ...] | None = None
    """First unit of each stage but the first; by default stages have about equal forward and backward times."""
    begins: tuple[Count, ...] = ()
    """Boundaries of the units, if the model is not a chain: the first operation of each unit but the first in the
    recorded graph, and at the end the number of operations. `train` cuts the model there."""
    layouts: tuple[Layout, ...] = ()
    """Layouts of the operators inside each unit, in order, for a `layout` cut. Of those, `sequence`, `vocabulary` and
    `context` go with a chain whose workers are tensor-parallel groups, too."""
    capacity: float | None = Field(default=None, gt=0)
    """For layout `expert`: slots per expert, as a multiple of an even share of a worker's rows. Rows over it skip their
    expert. By default no row is dropped."""

    def __str__(self) -> str:
        if self.kind == "chain":
            return " ".join([f"chain({self.stages})" if self.stages else "chain", *self.layouts])
        text = " ".join(self.layouts) if self.kind == "layout" else self.kind
        return text if self.capacity is None else f"{text}({self.capacity:g})"


class Place(Record):
    """Which worker holds each stage of each replica."""

    kind: Literal["linear", "loop", "v", "bidirectional"] = "linear"
    workers: int = Field(default=1, ge=1)
    """Workers per pipeline."""
    chunks: int = Field(default=1, ge=1)
    """Stages per worker, for `loop`; 2 for `v` and `bidirectional`."""
    replicas: int = Field(default=1, ge=1)
    """Data-parallel copies of the whole pipeline."""
    stage_replicas: tuple[Count, ...] | None = Field(default=None, min_length=1)
    """Workers per stage of one linear pipeline, if stages differ; they share its microbatches."""
    shards: int = Field(default=1, ge=1)
    """Workers that divide each stage's operators, for a `layout` cut."""
    stage_shards: tuple[Count, ...] | None = Field(default=None, min_length=1)
    """Size of the tensor-parallel group that each worker is: per stage or, if workers have several stages, per worker
    of a pipeline."""
    cpu_replicas: int = Field(default=0, ge=0)
    """CPU workers that each train a whole replica beside the pipelines."""
    servers: int = Field(default=0, ge=0)
    """Workers that hold weights or sum gradients but train no samples."""
    devices: tuple[str, ...] | None = None
    """The machine's devices, worker by worker, with all devices of a tensor-parallel group: pipelines first, then CPU
    replicas, then servers. By default GPUs in the machine's order, then CPUs; servers and CPU replicas take CPUs."""

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
    """Which samples each worker gets."""

    kind: Literal["microbatch", "round-robin", "own", "alternate", "share", "mask", "same"] = "microbatch"
    microbatches: int = Field(default=1, ge=1)
    """Microbatches per update and pipeline."""
    samples: int = Field(default=1, ge=1)
    """Samples per microbatch; for `share`, at most."""
    shares: tuple[Share, ...] | None = Field(default=None, min_length=1)
    """For `share`: each replica's share of an update's samples, CPU replicas last; by default the shares with the
    shortest update, in whole samples. A replica may get none."""
    is_controlled: bool = False
    """Whether shares or masks follow the measured speeds during the run."""
    budgets: tuple[Share, ...] | None = Field(default=None, min_length=1)
    """For `mask`: the share of the full computation that each replica can afford."""
    later_budgets: tuple[tuple[Share, ...], ...] = ()
    """For `mask`: budgets that follow in turn, each row for as many updates as there are between two averages; after
    the last row `budgets` hold again."""
    drops: tuple[tuple[Share, ...], ...] = ()
    """For `mask`: vectors to choose from, each with the share of filters to drop per group of filters; by default the
    same share for all groups."""

    @property
    def is_own(self) -> bool:
        """Whether each replica makes updates of its own, from its own samples."""
        return self.kind in ("own", "mask")

    def budgets_at(self, period: int) -> tuple[float, ...]:
        """Returns each replica's budget in a period between two averages; empty without budgets."""
        rows = [self.budgets, *self.later_budgets] if self.budgets else [()]
        return rows[period % len(rows)]

    def __str__(self) -> str:
        return self.kind + ("*" if self.is_controlled else "")


class Order(Record):
    """The order of actions on each worker."""

    kind: Literal[
        "step", "gpipe", "1f1b", "1f1b-async", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "gems",
        "chimera", "layer-major", "ready-first", "written",
    ] = "step"  # fmt: skip
    rows: tuple[str, ...] | None = None
    """For order 'written': the passes of each worker of a pipeline, such as 'F0 F1 B0 B1'."""
    recompute: Share = 0.0
    """Share of each stage's units that are recomputed for the backward pass, counted from its first unit."""
    recompute_units: tuple[int, ...] | None = Field(default=None, min_length=1)
    """The recomputed units, instead of a share; other units of the same piece keep their activations."""
    checkpoints: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Units inside stages at which another piece begins. A piece is recomputed as one and keeps only its input."""
    recomputes_early: bool = False
    """Whether recompute starts before the gradient has arrived, as in torchgpipe."""
    prefetch: int = Field(default=0, ge=0)
    """Pieces, or batches of data, that are fetched ahead of their use."""
    is_eager: bool = False
    """Whether each piece is reduced and updated as soon as its gradient is final, rather than the whole stage at
    once."""
    head_chunks: int = Field(default=1, ge=1)
    """Chunks of tokens in which a linear head and its cross-entropy run; 1 for all tokens at once."""

    @property
    def has_recompute(self) -> bool:
        """Whether any unit is recomputed."""
        return self.recompute > 0 or self.recompute_units is not None

    def __str__(self) -> str:
        recompute = "recompute" if self.recompute == 1 else f"recompute({self.recompute:g})"
        if self.recompute_units is not None:
            recompute = f"recompute({len(self.recompute_units)} units)"
        recompute += f" by {len(self.checkpoints)} checkpoints" if self.checkpoints else ""
        recompute = f"early {recompute}" if self.recomputes_early else recompute
        parts = [self.kind] + [recompute] * self.has_recompute
        parts += [f"prefetch({self.prefetch})"] * (self.prefetch > 0) + ["eager"] * self.is_eager
        parts += [f"head({self.head_chunks} chunks)"] * (self.head_chunks > 1)
        return " + ".join(parts)


class Version(Record):
    """Which weights a microbatch reads."""

    kind: Literal["sync", "stash", "vertical", "double-buffer", "late", "local", "torn"] = "sync"
    """`late`: CPU replicas compute their share of an update with the weights of `delay` updates before; all other
    replicas read the newest."""
    delay: int = Field(default=1, ge=0)
    """For `late`: updates by which the weights that a CPU replica reads are older than the newest; 0 is `sync`."""
    correction: Literal["none", "weight-prediction", "discrepancy", "delay-compensation"] = "none"
    """What restores the accuracy that older weights cost. `weight-prediction`: forwards read the newest weights plus
    their velocity times the updates until the gradient is applied. `discrepancy`: no weights are stashed; backwards
    read the newest weights minus the velocity times the updates since the forward. `delay-compensation`: gradients g
    are replaced by g + λ·g⊙g⊙(newest weights − weights that were read)."""
    decay: float | None = Field(default=None, ge=0, lt=1)
    """Share of the velocity that is left after as many updates as the stage is late; by default 0 (the last update) for
    `weight-prediction`, and 0.135 for `discrepancy`."""
    compensation: float = Field(default=0.04, ge=0)
    """For `delay-compensation`: λ."""
    rate_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate of a stage rises from its value divided by the stage's delay to its value;
    0 for no such scaling."""

    def __str__(self) -> str:
        kind = f"late({self.delay})" if self.kind == "late" else self.kind
        parts = [kind] + [self.correction] * (self.correction != "none")
        return " + ".join(parts + [f"rates({self.rate_updates})"] * (self.rate_updates > 0))


class Reduce(Record):
    """How gradients of several workers become an update."""

    wire: Literal[
        "none", "all-reduce", "reduce-scatter", "server", "shared-memory", "summation-service"
    ] = "none"  # fmt: skip
    gate: Literal["barrier", "lock", "none", "round-robin", "bound"] = "barrier"
    """When a worker's contribution may be applied."""
    bound: int = Field(default=0, ge=0)
    """For the gate `bound`: waves by which the fastest worker may be ahead (D)."""
    combiner: Literal["sum", "average", "elastic", "score-trim"] = "sum"
    trim: int = Field(default=0, ge=0)
    """For `score-trim`: number of contributions to drop, those with the lowest scores."""
    penalty: float = Field(default=0.005, ge=0)
    """For `score-trim`: weight of the gradient's squared norm in a score, in learning rates (ρ/γ)."""
    period: int = Field(default=1, ge=1)
    """Local updates between two reductions."""
    clip: Literal["none", "global", "delayed"] = "none"
    """Clipping by the norm over all stages: `global` uses this update's gradients, `delayed` the last update's."""
    has_buffer_broadcast: bool = False
    """Whether the first replica sends its running statistics to the others."""

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
    """Which memory holds each state, and which device updates it."""

    kind: Literal["replicated", "zero-1", "zero-2", "zero-3", "host", "split", "server", "shared"] = "replicated"
    """`host`: weights and optimizer state are in host memory. `split`: weights are on the device, with the optimizer
    state of the first pieces; the rest is in host memory. `shared`: one copy for all workers."""
    zeros: tuple[Zero, ...] | None = Field(default=None, min_length=1)
    """The ZeRO stage of each pipeline stage, 0 for none; `kind` is then the highest of them."""
    window: Literal["auto"] | Annotated[int, Field(ge=1)] = 1
    """For weights in host memory: pieces on the device at once, in addition to those that are prefetched. `auto`: the
    fewest that hide the copies which any window hides."""
    device_pieces: Literal["auto"] | Annotated[int, Field(ge=0)] = 0
    """For `split`: number of a stage's first pieces whose optimizer state is on the device. `auto`: the fewest with
    which the other updates end before the next forwards, as far as possible."""
    places: tuple[Rest, ...] | None = Field(default=None, min_length=1)
    """For `split`: where the state of each piece of a stage is, instead of `device_pieces`. `device`: on the device,
    which updates it. `visit`: in host memory, streamed to the device for its update. `host`: in host memory, updated
    there. `lean`: the same without a copy of the weights, which the device sends for each update. `window`: in host
    memory with the weights, which are fetched for each use."""
    visitors: int = Field(default=1, ge=1)
    """For `visit`: pieces whose streamed state is on the device at once."""
    activations: Literal["device", "host"] = "device"
    """Memory that holds saved activations until the backward pass."""
    versions: int | None = Field(default=None, ge=1)
    """Most weight versions to hold; by default as many as the algorithm needs."""
    persists: bool = False
    """For `zero-3`: whether gathered weights stay until the last backward pass of the batch."""

    @property
    def num_windowed(self) -> int:
        """The window, once it is chosen."""
        assert self.window != "auto", "`compile` chooses the window"
        return self.window

    @property
    def num_on_device(self) -> int:
        """The number of a stage's first pieces whose state is on the device, once it is chosen."""
        assert self.device_pieces != "auto", "`compile` chooses the pieces"
        return self.device_pieces

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
        """Returns runs of pieces with the same place: '2 device, 5 visit'."""
        runs = ((rest, len([*pieces])) for rest, pieces in groupby(self.places or ()))
        return ", ".join(f"{count} {rest}" for rest, count in runs)


class Precision(Record):
    """In which number formats a run computes, updates and adds up."""

    compute: Literal["fp32", "fp64", "tf32", "bf16", "fp16"] = "fp32"
    """The format of matrix products. `bf16` and `fp16` run under autocast: norms, softmax and losses stay float32."""
    masters: Literal["none", "split", "fp32"] = "none"
    """What updates work on if products are of 16 bits. `split`: weights are bf16, and the optimizer state holds the
    other 16 bits of their float32 masters. `fp32`: weights are float32, and autocast rounds them for each use."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """The format in which AdamW's moments rest; `int8` has 8 bits per value and a float32 scale per block of 256."""
    accumulate: Literal["fp32", "bf16"] = "fp32"
    """The format in which gradients of bf16 weights are summed over microbatches and replicas."""

    @property
    def is_split(self) -> bool:
        """Whether weights are the high halves of their masters."""
        return self.masters == "split"

    def moment_bytes(self, numel: int) -> int:
        """Returns the bytes of both moments of a parameter with this many values; those of `fp32` are float32."""
        if self.moments == "int8":
            return 2 * numel + 2 * 4 * -(-numel // 256)
        return {"fp32": 8, "bf16": 4}[self.moments] * numel

    @property
    def is_low(self) -> bool:
        """Whether matrix products round to fewer bits than their inputs have in float32."""
        return self.compute in ("tf32", "bf16", "fp16")

    @property
    def rounds(self) -> bool:
        """Whether products or moments are rounded to fewer bits than float32 has."""
        return self.is_low or self.moments != "fp32"

    def __str__(self) -> str:
        masters = {"none": "", "split": ", split masters", "fp32": ", fp32 masters"}[self.masters]
        text = self.compute + masters + (f", {self.moments} moments" if self.moments != "fp32" else "")
        return text + (f", sums in {self.accumulate}" if self.accumulate != "fp32" else "")
