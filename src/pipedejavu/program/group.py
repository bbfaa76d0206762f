"""The groups of a program: which workers take part in which collectives."""

from collections.abc import Iterator, Sequence

from pipedejavu.facts import Profile
from pipedejavu.plan import Plan
from pipedejavu.program.pipeline import Pipeline
from pipedejavu.program.program import (
    NORM_GROUP,
    Group,
    GroupRole,
    Piece,
    expert_group,
    shard_group,
    stage_group,
    tie_group,
)

Holders = dict[tuple[int, int], list[int]]
"""The workers that hold each (stage, replica)."""


def make_groups(
    plan: Plan, profile: Profile, pieces: Sequence[Piece], pipelines: Sequence[Pipeline]
) -> dict[str, Group]:
    """Returns the groups of a plan by name."""
    holders: Holders = {}
    for pipeline in pipelines:
        for (replica, stage), worker in pipeline.stage_workers().items():
            holders.setdefault((stage, replica), []).append(worker)
    groups = {
        **dict(_stage_groups(plan, holders)),
        **dict(_shard_groups(plan, holders)),
        **dict(_tie_groups(profile, pieces, holders)),
    }
    if plan.reduce.clip != "none":
        holding = tuple(sorted({worker for workers in holders.values() for worker in workers}))
        groups[NORM_GROUP] = Group(workers=holding, role=GroupRole.NORM)
    return groups


def _stage_groups(plan: Plan, holders: Holders) -> Iterator[tuple[str, Group]]:
    if plan.reduce.wire not in ("all-reduce", "reduce-scatter", "summation-service"):
        return
    helpers: tuple[int, ...] = ()
    if plan.reduce.wire == "summation-service":
        helpers = tuple(range(plan.num_workers - plan.place.servers, plan.num_workers))
    for stage in sorted({stage for stage, _ in holders}):
        # The workers of a sharded stage reduce with the same shard of the other replicas.
        rows = [workers for (s, _), workers in sorted(holders.items()) if s == stage]
        for shard, workers in enumerate(zip(*rows, strict=True) if len(rows) > 1 else ()):
            yield (
                stage_group(stage, shard),
                Group(workers=workers, role=GroupRole.STAGE, number=stage, helpers=helpers),
            )


def _shard_groups(plan: Plan, holders: Holders) -> Iterator[tuple[str, Group]]:
    if plan.place.shards == 1:
        return
    if plan.divides_experts:
        yield from _expert_groups(plan, holders)
        return
    for (stage, replica), workers in holders.items():
        yield shard_group(stage, replica), Group(workers=tuple(workers), role=GroupRole.SHARDS, number=stage)


def _expert_groups(plan: Plan, holders: Holders) -> Iterator[tuple[str, Group]]:
    """Yields the groups of replicas with all experts together, and of those with the same experts."""
    size = plan.place.shards
    for stage in sorted({stage for stage, _ in holders}):
        workers = [workers[0] for (s, _), workers in sorted(holders.items()) if s == stage]
        for first in range(0, len(workers), size):
            mesh = tuple(workers[first : first + size])
            yield shard_group(stage, first), Group(workers=mesh, role=GroupRole.SHARDS, number=stage)
        for shard in range(size) if len(workers) > size else ():
            same = tuple(workers[shard::size])
            yield expert_group(stage, shard), Group(workers=same, role=GroupRole.EXPERTS, number=stage)


def _tie_groups(profile: Profile, pieces: Sequence[Piece], holders: Holders) -> Iterator[tuple[str, Group]]:
    """Yields a group per replica for each tie that spans several pieces."""
    piece_of = {unit: index for index, piece in enumerate(pieces) for unit in piece.units}
    for number, tie in enumerate(profile.ties):
        tied = {piece_of[profile.position[unit]] for unit in tie.units}
        if len(tied) < 2:
            continue
        stages = {pieces[index].stage for index in tied}
        for replica in sorted({replica for _, replica in holders}):
            held = [holders[stage, replica] for stage in stages if (stage, replica) in holders]
            for shard, row in enumerate(zip(*held, strict=True)):
                workers = tuple(sorted({*row}))
                yield tie_group(number, replica, shard), Group(workers=workers, role=GroupRole.TIE, number=number)
