"""Trials: the best plans of a search each run some updates, and the fastest one is taken.

Forecasts cannot rank plans whose times differ by less than the forecast error. A trial can, at the cost of starting the
workers of each plan.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pipedejavu.facts import InputError, format_seconds
from pipedejavu.health.failure import WorkerError
from pipedejavu.launch.planned_run import plan_run
from pipedejavu.launch.run_session import train
from pipedejavu.plan import Decision
from pipedejavu.planner.worker_host import DeviceChoice
from pipedejavu.run.options import TrainOptions
from pipedejavu.search import RankedPlan

STEPS, WARM_UP = 14, 4
"""Updates per trial, and how many of them are warm-up."""


def find_fastest(
    options: TrainOptions, candidates: Sequence[RankedPlan], devices: DeviceChoice, report: Callable[[str], None]
) -> RankedPlan:
    """Runs every plan in a temporary folder; returns the fastest, with the measured times among its decisions.

    If all fail, raises the error of the last one.
    """
    times: list[tuple[float, int]] = []
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
        times.append((time_s, n))
    if not times:
        assert failure is not None
        raise failure
    fastest = candidates[min(times)[1]]
    told = [f"{candidates[n].plan.name} took {format_seconds(time_s)} an update" for time_s, n in sorted(times)]
    decision = Decision(axis="place", choice=f"the fastest of {len(candidates)} plans", reason="; ".join(told))
    return fastest.replace(plan=fastest.plan.replace(decisions=(*fastest.plan.decisions, decision)))


def time_update(options: TrainOptions, candidate: RankedPlan, devices: DeviceChoice) -> float:
    """Returns the time per update under a plan, measured in a run whose result is thrown away."""
    options = options.replace(
        steps=STEPS, init_candidates=1, checkpoint_every=0, on_oom="stop", replan=False, keeps_log=False, log=()
    )
    planned = plan_run(options, candidate.plan, candidate.machine, devices=devices, profile=candidate.profile)
    with tempfile.TemporaryDirectory() as folder:
        return train(planned.options, planned.program, str(Path(folder) / "trial")).step_s(WARM_UP)
