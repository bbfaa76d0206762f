"""A whole survey of the machine that the tests run on, as short as it can be."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.analysis import verify
from pipedejavu.facts import Machine
from pipedejavu.plan import preset
from pipedejavu.probe import series, survey
from pipedejavu.program import compile  # noqa: A004
from pipedejavu.simulate import simulate
from pipedejavu.zoo import estimate_profile


def test_a_survey_yields_a_machine_that_can_be_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "QUICK_TIME_S", 0.0)
    monkeypatch.setattr(series, "FEWEST_ROUNDS", 2)
    seen: list[tuple[str, float]] = []
    machine = survey.measure_machine(tmp_path, quick=True, report=lambda what, share: seen.append((what, share)))
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]  # what the disk was tried with is gone
    assert machine.survey
    assert {"python", "torch"} <= machine.survey.versions.keys()
    assert seen[0][0] == "looking around"
    gpus = [device for device in machine.devices if device.type == "gpu"]
    assert len(gpus) == torch.cuda.device_count()
    for device in machine.devices:
        assert device.flop_per_s > 0
        assert device.memory_bytes_per_s > 0
        assert device.parameters_per_s > 0
        assert 0 <= device.reserved_bytes < device.memory_bytes
    cores = machine.hosts[0].cores
    parts = machine.divided(min(2, cores) + len(gpus))
    plan = preset("ddp").at(workers=min(2, cores))
    program = compile(plan, estimate_profile("gpt-tiny", parts), parts)
    assert simulate(program, verify(program)).makespan_s > 0
    rows = json.loads(machine.to_json())["survey"]["measurements"]
    assert {row["what"] for row in rows} >= {"matrix", "block", "memory", "update", "gloo", "shared memory", "latency"}


def test_a_folder_that_cannot_be_written_is_noted() -> None:
    from contextlib import ExitStack

    unknown: list[str] = []
    with ExitStack() as stack:
        assert survey._on_disk(stack, Path("/nowhere"), unknown) == []
    assert unknown == ["disk: /nowhere cannot be written (No such file or directory)"]


def test_a_busy_machine_says_so() -> None:
    text = survey.describe_disturbance(1.34, 2)
    assert text.startswith("other processes kept 1.3 of its 2 cores busy during the survey, so times are too long")
    assert survey.describe_disturbance(0.19, 2) == survey.describe_disturbance(None, 2) == ""
