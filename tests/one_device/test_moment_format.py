"""One GPU and its host with moments of fewer bits: the bits of a plain loop, of the actions, and of a resume."""

from typing import Any

import pytest
import torch

from pipedejavu.engine.engine_state import put_all, take_all
from pipedejavu.engine.threads import Threads
from pipedejavu.engine.verdict import judge
from pipedejavu.plan import Keep, Precision
from tests.one_device.lab import SPLIT, Run, check_equal, plan_of

PLACES: dict[str, dict[str, Any]] = {
    "all on the device": {},
    "device, visit, host, lean": {"places": ("device", "visit", "host", "lean")},
    "window of one": {"places": ("device", "window", "window", "host")},
    "all through a window": {"keep": Keep(kind="host", window=1), "prefetch": 1},
}
NARROW = ("bf16", "int8")


@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("precision", [SPLIT, Precision()], ids=["bf16", "fp32"])
@pytest.mark.parametrize("moments", NARROW)
@pytest.mark.parametrize("name", PLACES)
def test_every_place_has_the_bits_of_a_plain_loop_and_of_the_actions(
    name: str, moments: str, precision: Precision, clip_norm: float | None
) -> None:
    plan = plan_of(**PLACES[name], clip=clip_norm is not None, precision=precision.replace(moments=moments))
    run = Run(plan, clip_norm=clip_norm)
    check_equal(run.weights, run.trained_by("hybrid", moments=moments))
    if clip_norm is None:  # the actions take norms in float64
        check_equal(run.weights, run.by_actions())
    verdict = judge(run.program, run.job, run.batches, run.outcome)
    assert verdict.is_passed, verdict


@pytest.mark.parametrize("moments", NARROW)
def test_a_state_goes_on_here_and_by_actions(moments: str) -> None:
    run = Run(plan_of(("device", "visit", "host", "lean"), precision=SPLIT.replace(moments=moments)))

    def end(threads: Threads, rounds: int) -> dict[str, torch.Tensor]:
        for _ in range(rounds):
            threads.run()
        state = take_all(threads)
        threads.close()
        return state

    saved, expected = end(run.start(), 2), end(run.start(), 4)
    for resumed in (run.start(), Threads(run.program, run.job, run.batches)):
        put_all(resumed, 2, saved.get)
        state = end(resumed, 2)
        assert state.keys() == expected.keys()
        assert all(state[name].equal(expected[name]) for name in state)
