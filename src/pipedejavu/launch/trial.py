"""Trials: the best plans of a search run some updates each, and the one that proves to be the fastest is taken.

A forecast tells plans apart that differ by more than it is off. Of those that lie closer together some updates know
better, at the price of starting the workers of each.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pipedejavu.facts import InputError, format_seconds
from pipedejavu.health.failure import WorkerError
from pipedejavu.launch.launch import plan_run, train
from pipedejavu.plan import Decision
from pipedejavu.planner.worker_host import DeviceChoice
from pipedejavu.run.options import TrainOptions
from pipedejavu.search import RankedPlan

STEPS, WARM_UP = 14, 4
"""Updates of a trial, and the first of them, which do not count."""


def find_fastest(
    options: TrainOptions, candidates: Sequence[RankedPlan], devices: DeviceChoice, report: Callable[[str], None]
) -> RankedPlan:
    """Runs every plan in a folder that goes, and returns the fastest, which says so among its decisions.

    Raises what the last raised where all fail.
    """
    found: list[tuple[float, int]] = []
    failure: Exception | None = None
    for n, candidate in enumerate(candidates):
        name = f"plan {n + 1} of {len(candidates)}, {candidate.plan.name}"
        report(f"trial of {name}: forecast {format_seconds(candidate.time_s)} an update")
        try:
            time_s = time_update(options, candidate, devices)
        except (InputError, WorkerError) as error:
            report(f"trial of {name}: {str(error).splitlines()[-1]}")
            failure = error
            continue
        report(f"trial of {name}: {format_seconds(time_s)} an update")
        found.append((time_s, n))
    if not found:
        assert failure is not None
        raise failure
    fastest = candidates[min(found)[1]]
    told = [f"{candidates[n].plan.name} took {format_seconds(time_s)} an update" for time_s, n in sorted(found)]
    decision = Decision(axis="place", choice=f"the fastest of {len(candidates)} plans", reason="; ".join(told))
    return fastest.replace(plan=fastest.plan.replace(decisions=(*fastest.plan.decisions, decision)))


def time_update(options: TrainOptions, candidate: RankedPlan, devices: DeviceChoice) -> float:
    """Returns what an update takes under a plan, from some that are made and forgotten."""
    options = options.replace(
        steps=STEPS, init_candidates=1, checkpoint_every=0, on_oom="stop", replan=False, keeps_log=False, log=()
    )
    planned = plan_run(options, candidate.plan, candidate.machine, devices=devices, profile=candidate.profile)
    with tempfile.TemporaryDirectory() as folder:
        return train(planned.options, planned.program, str(Path(folder) / "trial")).step_s(WARM_UP)
