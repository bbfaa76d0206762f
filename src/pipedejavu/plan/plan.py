"""The plan: a value on each of the eight axes, and the reason for each automatic choice."""

from typing import Literal

from pydantic import Field

from pipedejavu.facts import Bytes, Record
from pipedejavu.plan.axis import Cut, Feed, Keep, Order, Place, Precision, Reduce, Version

AXES = ("cut", "place", "feed", "order", "version", "reduce", "keep", "precision")


class Decision(Record):
    """An automatic choice and its reason."""

    axis: Literal["cut", "place", "feed", "order", "version", "reduce", "keep", "precision", "compile", "profile"]
    choice: str
    reason: str


class Plan(Record):
    """How a training run uses a machine; `compile` turns it into a program."""

    name: str = "plan"
    cut: Cut = Cut()
    place: Place = Place()
    feed: Feed = Feed()
    order: Order = Order()
    version: Version = Version()
    reduce: Reduce = Reduce()
    keep: Keep = Keep()
    precision: Precision = Precision()
    steps: int = Field(default=1, ge=1)
    """Updates per program; a run repeats the program."""
    first_update: int = Field(default=0, ge=0)
    """The update of the run that the program begins with, if the first updates of the run are flushed."""
    bucket_bytes: Bytes = 25 * 2**20
    """Bytes of gradients that are reduced together if the order is eager."""
    is_compiled: bool = False
    """Whether units run under torch.compile."""
    decisions: tuple[Decision, ...] = ()

    def axes(self) -> dict[str, str]:
        """Returns each axis as a short text; without the precision if it is the default, which `train` replaces."""
        texts = {a: str(getattr(self, a)) for a in AXES if a != "precision" or self.precision != Precision()}
        if self.order.has_recompute:
            texts["keep"] += ", checkpoint"
        return texts

    @property
    def pipeline_size(self) -> int:
        """Workers per pipeline, with all replicas of its stages."""
        return sum(self.place.stage_replicas) if self.place.stage_replicas else self.place.workers

    @property
    def num_workers(self) -> int:
        """Number of workers: those of all pipelines and shards, CPU replicas and servers."""
        place = self.place
        return self.pipeline_size * place.replicas * place.shards + place.cpu_replicas + place.servers

    @property
    def data_replicas(self) -> int:
        """Pipelines that train different samples, without CPU replicas."""
        return self.place.replicas * self.place.shards // self.tensor_shards

    @property
    def degrees(self) -> tuple[int, ...]:
        """Devices per worker; above 1 the worker is a tensor-parallel group."""
        place = self.place
        shards = place.stage_shards or (1,) * len(place.stage_replicas or range(place.workers))
        # A rule checks that both are equally long.
        pairs = zip(shards, place.stage_replicas or (1,) * len(shards), strict=False)
        line = tuple(size for size, count in pairs for _ in range(count))
        return line * (place.replicas * place.shards) + (1,) * (place.cpu_replicas + place.servers)

    def zero_of(self, stage: int) -> int:
        """Returns the ZeRO stage of a pipeline stage, or 0."""
        if self.keep.zeros is not None:
            return self.keep.zeros[stage]
        return int(self.keep.kind[-1]) if self.keep.kind.startswith("zero") else 0

    @property
    def num_stages(self) -> int | None:
        """Number of stages; None if each unit is a stage."""
        if self.cut.kind != "chain":
            return 1
        if self.order.kind == "layer-major":
            return None
        if self.place.stage_replicas:
            return len(self.place.stage_replicas)
        return self.place.workers * {"v": 2, "loop": self.place.chunks}.get(self.place.kind, 1)

    @property
    def is_flush_free(self) -> bool:
        """Whether the pipeline continues from one update to the next without a flush."""
        return self.order.kind == "1f1b-async"

    @property
    def num_flushed(self) -> int:
        """Updates at the beginning of the program before each of which a pipeline that else never drains is flushed."""
        return self.num_flushed_from(self.first_update)

    def num_flushed_from(self, update: int) -> int:
        """Returns the same number for a program that begins with another update of the run."""
        left = self.version.flushed_updates - update
        return min(max(left, 0), self.steps) if self.is_flush_free else 0

    @property
    def compensates_shares(self) -> bool:
        """Whether late shares of a gradient are compensated for their delay before they are summed."""
        return self.version.kind == "late" and self.version.correction == "delay-compensation"

    @property
    def splits_backward(self) -> bool:
        """Whether the backward pass runs as two halves."""
        return self.order.kind in ("zb-h1", "zb-v", "dualpipe-v")

    @property
    def prefetches_data(self) -> bool:
        """Whether samples are copied to the device ahead of their use."""
        return self.order.prefetch > 0 and self.keep.kind == "replicated" and self.keep.activations == "device"

    @property
    def divides_experts(self) -> bool:
        """Whether shards divide only the experts: they train different samples, each as a replica of all else."""
        return "expert" in self.cut.layouts

    @property
    def divides_sequence(self) -> bool:
        """Whether shards divide all activations, those between divided operators too."""
        return "sequence" in self.cut.layouts or self.divides_only_sequence

    @property
    def divides_only_sequence(self) -> bool:
        """Whether shards divide activations along the sequence, and each holds all parameters."""
        return "context" in self.cut.layouts

    @property
    def tensor_shards(self) -> int:
        """Workers that divide the operators of one replica; 1 if the shards are replicas with different experts."""
        return 1 if self.divides_experts else self.place.shards
