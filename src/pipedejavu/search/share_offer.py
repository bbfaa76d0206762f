"""Shares: replicas on devices of unequal speed, each with the part of the batch that it can train in time.

Those are whole models on single devices, or pipelines of GPUs with whole models on the CPUs beside them.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from pipedejavu.program.limit import MOST_SAMPLES
from pipedejavu.search.candidate_plan import CandidatePlan, PlanningProblem, Stage
from pipedejavu.search.plan_pool import SLACK, Pool
from pipedejavu.search.plan_writer import MOST_SLOTS
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.search.subspace import MOST_FREE, microbatch_sizes

MOST_DEVICES = 16
"""Beyond which the devices of one kind are taken all together."""


def offer_shares(pool: Pool, problems: list[PlanningProblem], options: SearchOptions) -> None:
    """Offers shares over the fastest devices, so many as may be worth it, of each scene whose devices differ."""
    if options.batch > MOST_SAMPLES:
        return
    for problem in problems:
        units, kind_of = (
            len(problem.profile.units),
            {name: problem.machine.device(name).kind for name in problem.devices},
        )
        if len({*kind_of.values()}) < 2 or len(problem.degrees) > 1:
            continue
        for samples in microbatch_sizes(options, 1):
            costs = pool.costs(problem, samples)
            work = {kind: _work(costs, kind) for kind in {*kind_of.values()}}
            order = sorted(problem.devices, key=lambda name: (work[kind_of[name]], kind_of[name]))
            kinds = [kind_of[name] for name in order]
            ends = [n for n in range(2, len(order) + 1) if n == len(order) or kinds[n] != kinds[n - 1]]
            counts = range(2, len(order) + 1) if len(order) <= MOST_DEVICES else ends
            for count in (n for n in counts if n <= options.batch and len({*kinds[:n]}) > 1):
                if pool.is_over:
                    return
                stage = Stage(0, units, tuple(order[:count]))
                pool.offer(CandidatePlan(problem, (stage,), samples, options.batch // samples, is_shared=True))


def offer_beside(pool: Pool, problems: list[PlanningProblem], options: SearchOptions, run: Callable[..., bool]) -> None:
    """Offers the best pipelines of a scene's GPUs with its CPUs as replicas beside them, the first, and so on.

    Where CPUs could add much, pipelines that are slow without them count, and `run` searches for them.
    """
    for problem in problems:
        cpus = tuple(name for name in problem.devices if problem.machine.device(name).type == "cpu")
        gpus = tuple(name for name in problem.devices if name not in cpus)
        if len(gpus) < 2 or not cpus or options.batch > MOST_SAMPLES or len(problem.degrees) > 1:
            continue
        alone, costs = pool, pool.costs(problem, 1)
        if len(problem.devices) <= MOST_FREE and _rate(costs, cpus) > (SLACK - 1) * _rate(costs, gpus):
            alone = Pool(options)
            alone.started_s = pool.started_s
            run(alone, [replace(problem, devices=gpus)], options)
            pool.num_estimated += alone.num_estimated
        pipelines = [found.candidate for found in alone.ranked() if _has_room_beside(found.candidate, gpus)]
        counts = range(1, len(cpus) + 1) if len(cpus) <= options.candidates else [len(cpus)]
        for candidate in pipelines[: options.candidates]:
            for count in counts:
                pool.offer(replace(candidate, problem=problem, cpus=cpus[:count], is_shared=True))


def _rate(costs: StageCosts, names: tuple[str, ...]) -> float:
    """Returns the samples a second that devices train, each for itself."""
    works = (_work(costs, costs.problem.machine.device(name).kind) for name in names)
    return sum(1 / work if work else inf for work in works)


def _work(costs: StageCosts, kind: str) -> float:
    """Returns what a microbatch takes on a kind of device."""
    return sum(float(row[-1]) for row in costs.times(kind)[:2])


def _has_room_beside(candidate: CandidatePlan, gpus: tuple[str, ...]) -> bool:
    """Whether whole models may train beside pipelines: these are alike, drain, and leave the host alone."""
    is_plain = not (candidate.is_shared or candidate.is_stale or candidate.mode.uses_host or candidate.mode.zero)
    is_small = len(candidate.stages) * candidate.microbatches <= MOST_SLOTS
    is_alike = len(candidate.stages) > 1 and candidate.is_even and max(candidate.degrees) == 1
    return is_plain and is_small and is_alike and {*candidate.devices} <= {*gpus}
