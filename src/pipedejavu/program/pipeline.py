"""Crews: the workers that train one stream of microbatches together, and the devices they are on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipedejavu.facts import InputError, Machine
from pipedejavu.plan import Plan
from pipedejavu.program.schedule import SCHEDULES, Slot, warmed_up


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One pipeline, one CPU replica, or one whole replica."""

    workers: tuple[int, ...]
    replica: int
    """Of its first direction; the second of a bidirectional place is the next."""
    place: str
    chunks: int
    schedule: str
    count: int = 0
    """Microbatches of one update."""
    offset: int = 0
    """Of its first microbatch among all of an update."""
    stage_replicas: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    """Of a schedule that the plan writes out."""

    def home(self, rank: int, chunk: int) -> tuple[int, int]:
        """Returns the (replica, stage) of a worker's chunk."""
        p = len(self.workers)
        if self.stage_replicas:
            stage, lane = self._seat(rank)
            return self.replica + lane, stage
        if self.place == "bidirectional" and chunk == 1:
            return self.replica + 1, p - 1 - rank
        if self.place == "v" and chunk == 1:
            return self.replica, 2 * p - 1 - rank
        return self.replica, chunk * p + rank

    def homes(self) -> dict[tuple[int, int], int]:
        """Returns the worker of every (replica, stage)."""
        places = ((rank, c) for rank in range(len(self.workers)) for c in range(self.chunks))
        return {self.home(rank, c): self.workers[rank] for rank, c in places}

    def slots(self, rank: int, count: int) -> Iterator[Slot]:
        """Yields the worker's schedule for `count` microbatches."""
        if self.rows:
            yield from (Slot(text[0], 0, int(text[1:])) for text in self.rows[rank].split())
            return
        if not self.stage_replicas:
            yield from SCHEDULES[self.schedule](rank, len(self.workers), self.chunks, count)
            return
        stage, lane = self._seat(rank)
        seats = self.stage_replicas[stage]
        ahead = -(-sum(self.stage_replicas[stage + 1 :]) // seats)
        for kind, chunk, k in warmed_up(ahead, len(range(lane, count, seats))):
            yield Slot(kind, chunk, lane + k * seats)

    def _seat(self, rank: int) -> tuple[int, int]:
        for stage, seats in enumerate(self.stage_replicas):
            if rank < seats:
                return stage, rank
            rank -= seats
        raise AssertionError("rank beyond the crew")


def pipelines_of(plan: Plan) -> list[Pipeline]:
    """Returns the crews of a plan: pipelines copy by copy, shard by shard, then CPU replicas."""
    place, size = plan.place, plan.pipeline_size
    ways = 2 if place.kind == "bidirectional" else max(place.stage_replicas or (1,))
    chunks = place.chunks if place.kind == "loop" else {"linear": 1}.get(place.kind, 2)
    pipelines = [
        Pipeline(
            workers=tuple(range(copy * size, (copy + 1) * size)),
            replica=copy // place.shards * ways,
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
        replica = place.replicas * ways + n
        pipelines.append(Pipeline(workers=(first + n,), replica=replica, place="loop", chunks=stages, schedule="step"))
    return pipelines


def with_counts(pipelines: list[Pipeline], counts: list[int], shards: int) -> list[Pipeline]:
    """Returns the crews with their part of an update's microbatches; shards of one crew share theirs."""
    done, offset = [], 0
    for index, (pipeline, count) in enumerate(zip(pipelines, counts, strict=True)):
        done.append(replace(pipeline, count=count, offset=offset))
        if (index + 1) % shards == 0:
            offset += count
    return done


def assign_devices(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """Returns the device of every worker, of a team all; raises InputError where the machine has too few."""
    place, count = plan.place, sum(plan.degrees)
    num_trainers = count - place.cpu_replicas - place.servers
    if place.devices is not None:
        if len(place.devices) != count:
            what = "members of its teams" if place.stage_shards else "workers"
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
    spare = order[max(num_trainers, len(gpus)) :]
    extra = place.cpu_replicas + place.servers
    if extra and not spare:
        raise InputError(
            f"the plan needs a CPU beside its {num_trainers} workers for {place.cpu_replicas} CPU replicas and"
            f" {place.servers} servers; machine '{machine.name}' has none to spare"
        )
    return (*order[:num_trainers], *(spare[n % len(spare)] for n in range(extra)))
