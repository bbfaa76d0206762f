"""Candidates that share a batch between unequal replicas in proportion to their speed.

Replicas are whole models on single devices, or pipelines of GPUs beside whole models on CPUs.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from pipedejavu.program.limit import MOST_SAMPLES
from pipedejavu.search.candidate_plan import CandidatePlan, PlanningProblem, Stage
from pipedejavu.search.plan_pool import SLACK, Pool
from pipedejavu.search.plan_writer import MOST_WORK_ITEMS
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.search.subspace import MOST_FREE, microbatch_sizes

MOST_DEVICES = 16
"""Devices up to which any number of them is tried; above it all devices of a kind are used or none."""


def offer_shares(pool: Pool, problems: list[PlanningProblem], options: SearchOptions) -> None:
    """Offers shares over the 2, 3, … fastest devices of each problem with unequal devices."""
    if options.batch > MOST_SAMPLES:
        return
    for problem in problems:
        units = len(problem.profile.units)
        kind_of = {name: problem.machine.device(name).kind for name in problem.devices}
        is_run = not (options.is_runnable and problem.tp_groups)  # the engine runs no groups with shares
        if len({*kind_of.values()}) < 2 or len(problem.degrees) > 1 or not is_run:
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
    """Offers the best pipelines of GPUs with 1, 2, … CPUs as further replicas.

    If CPUs could add much, a pipeline that is slow without them may win, so `run` searches the GPUs by themselves.
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
        pipelines = [pooled.candidate for pooled in alone.ranked() if _can_add_cpus(pooled.candidate, gpus)]
        counts = range(1, len(cpus) + 1) if len(cpus) <= options.candidates else [len(cpus)]
        for candidate in pipelines[: options.candidates]:
            for count in counts:
                pool.offer(replace(candidate, problem=problem, cpus=cpus[:count], is_shared=True))


def _rate(costs: StageCosts, names: tuple[str, ...]) -> float:
    """Returns the samples per second of devices that each train a whole model."""
    works = (_work(costs, costs.problem.machine.device(name).kind) for name in names)
    return sum(1 / work if work else inf for work in works)


def _work(costs: StageCosts, kind: str) -> float:
    """Returns the time of a microbatch on a kind of device."""
    return sum(float(totals[-1]) for totals in costs.times(kind)[:2])


def _can_add_cpus(candidate: CandidatePlan, gpus: tuple[str, ...]) -> bool:
    """Whether CPUs may train beside a candidate: equal pipelines of GPUs that drain and do not use the host."""
    is_plain = not (candidate.is_shared or candidate.is_stale or candidate.mode.uses_host or candidate.mode.zero)
    is_small = len(candidate.stages) * candidate.microbatches <= MOST_WORK_ITEMS
    is_even = len(candidate.stages) > 1 and candidate.is_even and max(candidate.degrees) == 1
    return is_plain and is_small and is_even and {*candidate.devices} <= {*gpus}
