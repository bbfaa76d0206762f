"""Pipelines: the workers that train one stream of microbatches together, and their devices."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipedejavu.facts import InputError, Machine
from pipedejavu.plan import Plan
from pipedejavu.program.action import ActionKind
from pipedejavu.program.schedule import SCHEDULES, Slot, warmed_up


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Workers that pass microbatches along: a pipeline of stages, or one worker that holds a whole replica."""

    workers: tuple[int, ...]
    replica: int
    """The replica that it trains; the second direction of a bidirectional place trains the next one."""
    place: str
    chunks: int
    schedule: str
    count: int = 0
    """Microbatches per update."""
    offset: int = 0
    """The index of its first microbatch among all microbatches of an update."""
    stage_replicas: tuple[int, ...] = ()
    """Workers per stage, if a stage has several that take turns."""
    rows: tuple[str, ...] = ()
    """The slots of each worker as text, if the plan spells its schedule out."""

    def stage_of(self, rank: int, chunk: int) -> tuple[int, int]:
        """Returns the (replica, stage) of a worker's chunk."""
        p = len(self.workers)
        if self.stage_replicas:
            stage, turn = self._position(rank)
            return self.replica + turn, stage
        if self.place == "bidirectional" and chunk == 1:
            return self.replica + 1, p - 1 - rank
        if self.place == "v" and chunk == 1:
            return self.replica, 2 * p - 1 - rank
        return self.replica, chunk * p + rank

    def stage_workers(self) -> dict[tuple[int, int], int]:
        """Returns the worker of every (replica, stage)."""
        chunks = ((rank, c) for rank in range(len(self.workers)) for c in range(self.chunks))
        return {self.stage_of(rank, c): self.workers[rank] for rank, c in chunks}

    def slots(self, rank: int, count: int) -> Iterator[Slot]:
        """Yields the worker's schedule for `count` microbatches."""
        if self.rows:
            yield from (Slot(ActionKind(text[0]), 0, int(text[1:])) for text in self.rows[rank].split())
            return
        if not self.stage_replicas:
            yield from SCHEDULES[self.schedule](rank, len(self.workers), self.chunks, count)
            return
        stage, turn = self._position(rank)
        size = self.stage_replicas[stage]
        ahead = -(-sum(self.stage_replicas[stage + 1 :]) // size)
        for kind, chunk, k in warmed_up(ahead, len(range(turn, count, size))):
            yield Slot(kind, chunk, turn + k * size)

    def _position(self, rank: int) -> tuple[int, int]:
        """Returns a worker's stage and its index among the workers of that stage."""
        for stage, size in enumerate(self.stage_replicas):
            if rank < size:
                return stage, rank
            rank -= size
        raise AssertionError("rank beyond the pipeline")


def pipelines_of(plan: Plan) -> list[Pipeline]:
    """Returns the pipelines of a plan: for each replica one per shard, then the CPU replicas."""
    place, size = plan.place, plan.pipeline_size
    directions = 2 if place.kind == "bidirectional" else max(place.stage_replicas or (1,))
    shards = place.shards
    chunks = place.chunks if place.kind == "loop" else {"linear": 1}.get(place.kind, 2)
    pipelines = [
        Pipeline(
            # The shards of a stage are neighbours, so that they are on one host.
            workers=tuple(copy // shards * shards * size + n * shards + copy % shards for n in range(size)),
            replica=copy // plan.tensor_shards * directions,
            place=place.kind,
            chunks=chunks,
            schedule=plan.order.kind,
            stage_replicas=place.stage_replicas or (),
            rows=plan.order.rows or (),
        )
        for copy in range(place.replicas * place.shards)
    ]
    first, stages = len(pipelines) * size, plan.num_stages or 1
    for n in range(place.cpu_replicas):
        replica = place.replicas * directions + n
        pipelines.append(Pipeline(workers=(first + n,), replica=replica, place="loop", chunks=stages, schedule="step"))
    return pipelines


def with_counts(pipelines: list[Pipeline], counts: list[int], shards: int) -> list[Pipeline]:
    """Returns the pipelines with the microbatches that each runs per update; shards of a replica run the same ones."""
    counted, offset = [], 0
    for index, (pipeline, count) in enumerate(zip(pipelines, counts, strict=True)):
        counted.append(replace(pipeline, count=count, offset=offset))
        if (index + 1) % shards == 0:
            offset += count
    return counted


def assign_devices(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """Returns the devices of all workers in order, several for a worker that is a tensor-parallel group.

    Raises InputError if the machine has too few.
    """
    place, count = plan.place, sum(plan.degrees)
    num_trainers = count - place.cpu_replicas - place.servers
    if place.devices is not None:
        if len(place.devices) != count:
            what = "members of its tensor-parallel groups" if place.stage_shards else "workers"
            raise InputError(f"the plan names {len(place.devices)} devices for {count} {what}; name one for each")
        return tuple(machine.device(name).name for name in place.devices)
    gpus = [d.name for d in machine.devices if d.type == "gpu"]
    cpus = [d.name for d in machine.devices if d.type == "cpu"]
    order = gpus + cpus
    if len(order) < num_trainers:
        raise InputError(
            f"the plan needs {num_trainers} devices to train on, machine '{machine.name}' has {len(order)};"
            f" use {len(order)} workers or fewer, or a larger machine"
        )
    idle = order[max(num_trainers, len(gpus)) :]
    extra = place.cpu_replicas + place.servers
    if extra and not idle:
        raise InputError(
            f"the plan needs a CPU beside its {num_trainers} workers for {place.cpu_replicas} CPU replicas and"
            f" {place.servers} servers; machine '{machine.name}' has none to spare"
        )
    return (*order[:num_trainers], *(idle[n % len(idle)] for n in range(extra)))
