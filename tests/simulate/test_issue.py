"""Hosts issue what GPUs compute: ahead of them where they may, and no action ends before it is issued."""

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import Cost, Profile
from pipedejavu.plan import Reduce, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import Prediction, simulate, unit_costs


def run(name: str, workers: int, forward: Cost, backward: Cost, clip: str = "none", **sizes: int) -> Prediction:
    plan, profile, machine = unit_costs(preset(name).at(workers=workers, **sizes), {"U": 0.5})
    program = compile_plan(plan.replace(reduce=Reduce(clip=clip)), with_costs(profile, forward, backward), machine)
    return simulate(program, verify(program))


def with_costs(profile: Profile, forward: Cost, backward: Cost) -> Profile:
    units = (
        u.replace(times={k: t.replace(forward=forward, backward=backward) for k, t in u.times.items()})
        for u in profile.units
    )
    return profile.replace(units=tuple(units))


def ends(prediction: Prediction) -> list[float]:
    return sorted(s.end_s for s in prediction.timeline().spans() if s.action[0] in "FB")


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        # The host is always ahead, but for the first.
        ((2.0, 1.0), (4.0, 1.0), [2.0, 4.0, 8.0, 12.0]),
        # The GPU always waits.
        ((1.0, 2.0), (1.0, 3.0), [2.0, 4.0, 7.0, 10.0]),
        # The GPU waits in forwards, and the host gets ahead in backwards.
        ((1.0, 3.0), (5.0, 1.0), [3.0, 6.0, 11.0, 16.0]),
        # The host is ahead by what forwards took longer than it, and backwards end as they would without it.
        ((4.0, 1.0), (2.0, 4.0), [4.0, 8.0, 10.0, 12.0]),
    ],
)
def test_the_later_of_both_counts(
    forward: tuple[float, float], backward: tuple[float, float], expected: list[float]
) -> None:
    costs = [Cost(fixed_s=work_s, issue_s=issue_s) for work_s, issue_s in (forward, backward)]
    assert ends(run("gpipe", 1, *costs, microbatches=2)) == expected


def test_a_host_that_has_waited_for_another_worker_is_not_ahead() -> None:
    slow, free = Cost(fixed_s=1.0, issue_s=3.0), Cost(fixed_s=1.0)
    prediction = run("gpipe", 2, slow, free, microbatches=1)
    assert ends(prediction) == [3.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize(("clip", "expected"), [("none", 14.0), ("global", 15.0)])
def test_a_host_that_reads_the_norm_begins_a_step_after_the_gpu(clip: str, expected: float) -> None:
    forward, backward = Cost(fixed_s=1.0, issue_s=2.5), Cost(fixed_s=5.0, issue_s=1.0)
    prediction = run("gpipe", 1, forward, backward, clip, microbatches=1, steps=2)
    # Forward 2.5, backward 5, update 0.5; then a forward of 1, or one that is issued 2.5 after the backward.
    assert ends(prediction)[-1] == expected
