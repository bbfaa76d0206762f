"""The plan: a value on each of the seven axes, and the reason for each choice that was made for the user."""

from typing import Literal

from pydantic import Field

from pipedejavu.facts import Bytes, Record
from pipedejavu.plan.axis import Cut, Feed, Keep, Order, Place, Reduce, Version

AXES = ("cut", "place", "feed", "order", "version", "reduce", "keep")


class Decision(Record):
    """A choice that was made automatically, and why."""

    axis: Literal["cut", "place", "feed", "order", "version", "reduce", "keep"]
    choice: str
    reason: str


class Plan(Record):
    """How a training run is spread over a machine; `compile` turns it into a program."""

    name: str = "plan"
    cut: Cut = Cut()
    place: Place = Place()
    feed: Feed = Feed()
    order: Order = Order()
    version: Version = Version()
    reduce: Reduce = Reduce()
    keep: Keep = Keep()
    steps: int = Field(default=1, ge=1)
    """Updates in one program; the run repeats the program."""
    bucket_bytes: Bytes = 25 * 2**20
    """Gradients reduced together in an eager order."""
    is_compiled: bool = False
    """Whether stages run under torch.compile."""
    decisions: tuple[Decision, ...] = ()

    def axes(self) -> dict[str, str]:
        """Returns the seven axes as short texts."""
        texts = {a: str(getattr(self, a)) for a in AXES}
        if self.order.has_recompute:
            texts["keep"] += ", checkpoint"
        return texts

    @property
    def pipeline_size(self) -> int:
        """Workers of one pipeline, replicated stages counted in."""
        return sum(self.place.stage_replicas) if self.place.stage_replicas else self.place.workers

    @property
    def num_workers(self) -> int:
        """All workers: those of every pipeline and shard, CPU replicas and servers."""
        place = self.place
        return self.pipeline_size * place.replicas * place.shards + place.cpu_replicas + place.servers

    @property
    def degrees(self) -> tuple[int, ...]:
        """Devices of each worker: several where it is a team that divides operators."""
        place = self.place
        shards = place.stage_shards or (1,) * len(place.stage_replicas or range(place.workers))
        each = zip(shards, place.stage_replicas or (1,) * len(shards), strict=False)  # a rule has them as long
        line = tuple(size for size, count in each for _ in range(count))
        return line * (place.replicas * place.shards) + (1,) * (place.cpu_replicas + place.servers)

    def zero_of(self, stage: int) -> int:
        """Returns how far a stage's state is divided over its replicas: its ZeRO stage, or 0."""
        if self.keep.zeros is not None:
            return self.keep.zeros[stage]
        return int(self.keep.kind[-1]) if self.keep.kind.startswith("zero") else 0

    @property
    def num_stages(self) -> int | None:
        """Stages that the place has room for; None where each unit is one."""
        if self.cut.kind != "chain":
            return 1
        if self.order.kind == "layer-major":
            return None
        if self.place.stage_replicas:
            return len(self.place.stage_replicas)
        return self.place.workers * {"v": 2, "loop": self.place.chunks}.get(self.place.kind, 1)

    @property
    def is_flush_free(self) -> bool:
        """Whether the pipeline goes on from one update to the next without draining."""
        return self.order.kind == "1f1b-async"

    @property
    def splits_backward(self) -> bool:
        """Whether the backward pass runs as two halves."""
        return self.order.kind in ("zb-h1", "zb-v", "dualpipe-v")

    @property
    def prefetches_data(self) -> bool:
        """Whether samples are brought to the device ahead of their use."""
        return self.order.prefetch > 0 and self.keep.kind == "replicated" and self.keep.activations == "device"

    @property
    def sums_over_shards(self) -> bool:
        """Whether shards train samples of their own, so that what they do not divide has gradients to sum."""
        return "expert" in self.cut.layouts and self.reduce.wire == "all-reduce"
