"""Trials of the plans that a search finds: the fastest goes on, whatever the forecast said, and failures are told."""

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pipedejavu.facts import InputError
from pipedejavu.health import WorkerError
from pipedejavu.launch import find_fastest, trial
from pipedejavu.planner.planning import choose_plan, choose_plans, measure_setups
from pipedejavu.planner.profiling import choose_sizes, measure_task, this_machine
from pipedejavu.run import TrainOptions
from pipedejavu.search import RankedPlan, SearchOptions
from tests.search.case import machine, profile

OPTIONS = TrainOptions(model="mlp", steps=1000, replan=True, log=("tensorboard",))


def plans(count: int) -> list[RankedPlan]:
    model, place = profile([1e-3, 3e-3], weights=10**3), machine(["fast"] * 2)
    return choose_plans(model, place, SearchOptions(batch=4, samples=1), count)


def fastest(times: list[float | Exception], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Returns which of as many plans is taken, and what is told; the last line is the plan's own reason."""
    candidates, told = plans(len(times)), list[str]()
    left = iter(times)

    def run(options: TrainOptions, candidate: RankedPlan, devices: str) -> float:
        assert (options, devices) == (OPTIONS, "cpu")
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(trial, "time_update", run)
    found = find_fastest(OPTIONS, candidates, "cpu", told.append)
    *decisions, last = found.plan.decisions
    assert last.choice == f"the fastest of {len(times)} plans"
    return candidates.index(found.replace(plan=found.plan.replace(decisions=tuple(decisions)))), [*told, last.reason]


def test_plans_come_as_they_are_forecast() -> None:
    found = plans(3)
    times = [plan.time_s for plan in found]
    assert times == pytest.approx(sorted(times), rel=1e-9)  # of equal ones the simplest is first
    assert len(found) == 3
    assert plans(1) == found[:1]


def test_the_one_that_proves_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, told = fastest([0.3, 0.1, 0.2], monkeypatch)
    assert taken == 1
    assert [line.split(": ")[1] for line in told[1:6:2]] == ["300 ms an update", "100 ms an update", "200 ms an update"]
    assert [part.rpartition(" took ")[2] for part in told[-1].split("; ")] == [
        "100 ms an update",
        "200 ms an update",
        "300 ms an update",
    ]


def test_one_that_fails_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, told = fastest([WorkerError("Traceback\nworker 1 died"), 0.2], monkeypatch)
    assert taken == 1
    assert told[1].endswith(": worker 1 died")


def test_where_all_fail_so_does_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no room either"):
        fastest([WorkerError("worker 1 died"), InputError("no room either")], monkeypatch)


def test_a_trial_makes_updates_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(trial, "STEPS", 6)
    here = this_machine()
    here = here.replace(
        devices=tuple(device.replace(most_workers=2) for device in here.devices if device.type == "cpu")
    )
    found = measure_task("mlp", None, choose_sizes(4), measure_setups(here), lambda _: None)
    candidate = choose_plan(found, here, SearchOptions(batch=4, samples=2))
    assert trial.time_update(OPTIONS, candidate, "cpu") > 0
    assert [*tmp_path.iterdir()] == []
