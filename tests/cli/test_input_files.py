"""What a profile file says of parts of a CPU: times that were measured hold, others follow from the whole."""

import json
from pathlib import Path

import pytest

from pipedejavu.facts import Cost, Device, Host, Link, Machine, Measurement, Profile, Survey, Unit, UnitTime
from tests.cli.test_main import run

RATES = {("block", 1): 2.0, ("block", 2): 3.0, ("update", 1): 1.0, ("update", 2): 1.0}
"""Of one thread and of two."""


def save_profile(folder: Path, kinds: dict[str, float]) -> str:
    """Writes a model of two units, of which each takes 3 s times some factor on each kind."""
    times = {
        kind: UnitTime(forward=Cost(per_sample_s=t), backward=Cost(per_sample_s=2 * t)) for kind, t in kinds.items()
    }
    Profile(name="p", units=tuple(Unit(name=name, times=times) for name in "uv")).save(folder / "profile.json")
    return str(folder / "profile.json")


def save_machine(folder: Path) -> str:
    """Writes a machine with a CPU of two cores whose rates were surveyed."""
    rows = [
        Measurement(subject="cpu", what=what, setting=f"x, {threads} threads", unit="1/s", value=rate)
        for (what, threads), rate in RATES.items()
    ]
    survey = Survey(date="today", time_s=1.0, measurements=tuple(rows))
    cpu = Device(name="cpu", kind="cpu", type="cpu", host="h", memory_bytes=2**30, most_workers=2)
    links = (Link(bytes_per_s=1e9),)
    machine = Machine(name="m", hosts=(Host(name="h", cores=2),), devices=(cpu,), links=links, survey=survey)
    machine.save(folder / "machine.json")
    return str(folder / "machine.json")


@pytest.mark.parametrize(
    ("kinds", "workers", "passes", "note"),
    [
        ({"cpu": 1.0, "cpu/2": 1.25}, 2, 5 * 1.25, "profile: it has times on cpu/2, and these hold"),
        ({"cpu": 1.0}, 2, 5 * 2, "those on cpu are taken 2 times, the most that one part of 2 takes"),
        ({"cpu": 1.0, "cpu/2": 1.25}, 1, 4 * 2, ""),
    ],
)
def test_a_worker_on_a_part_of_this_cpu(kinds, workers: int, passes: float, note: str, tmp_path: Path) -> None:
    common = ("simulate", "preset:1f1b", "--microbatches", "4", "--samples", "1", "--json")
    asked = ("--workers", str(workers), "--profile", save_profile(tmp_path, kinds))
    found = json.loads(run(*common, *asked).stdout)
    assert found["makespan_s"] == pytest.approx(3 * passes, rel=1e-3)
    notes = [text for text in found["notes"] if text.startswith("profile: ")]
    assert len(notes) == (workers > 1)
    assert note in " ".join(notes)


def test_a_worker_on_a_part_of_a_cpu_that_was_surveyed(tmp_path: Path) -> None:
    files = ("--profile", save_profile(tmp_path, {"cpu": 1.0}), "--machine", save_machine(tmp_path))
    asked = ("simulate", "preset:1f1b", "--workers", "2", "--microbatches", "4", "--samples", "1", "--json")
    found = json.loads(run(*asked, *files).stdout)
    assert found["makespan_s"] == pytest.approx(3 * 5 * 1.5, rel=1e-3)
    sentence = (
        "those on cpu are taken 1.50 times, and of updates 1.00 times, as the machine's rates with 1 and 2 threads"
    )
    assert sentence in " ".join(found["notes"])


def test_the_planner_takes_parts_as_the_simulator_does(tmp_path: Path) -> None:
    profile, machine, out = save_profile(tmp_path, {"cpu": 1.0}), save_machine(tmp_path), str(tmp_path / "plan.json")
    found = json.loads(run("plan", profile, "--machine", machine, "--batch", "8", "--out", out, "--json").stdout)
    assert "those on cpu are taken 1.50 times" in " ".join(found["notes"])
    simulated = json.loads(run("simulate", out, "--profile", profile, "--machine", machine, "--json").stdout)
    assert simulated["makespan_s"] == pytest.approx(found["candidates"][0]["time_s"])
    assert simulated["makespan_s"] < 8 * 6  # two parts are faster than the whole
