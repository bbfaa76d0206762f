"""`runs`: a table of runs, and runs side by side."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.cli import runs_command
from pipedejavu.plan import preset
from pipedejavu.run import JobRecord, RunFolder, TrainOptions
from pipedejavu.simulate import JobChance


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    for name, lr, last in (("slow", 0.1, 3), ("fast", 0.2, 5)):
        path = tmp_path / name
        path.mkdir()
        TrainOptions(model="mlp", steps=5, lr=lr).save(path / "options.json")
        preset("ddp" if name == "fast" else "gpipe").at(workers=2).save(path / "plan.json")
        for step in range(1, last + 1):
            row = {
                "step": step,
                "loss": lr / step,
                "count": 4,
                "samples": 4,
                "elapsed_s": step * lr,
                "peak_bytes": 2**20,
            }
            RunFolder(path).add_metrics(row)
        if name == "slow":
            RunFolder(path).add_metrics({"failed": "worker 1 was ended by SIGKILL"})
        else:
            (path / "model.safetensors").touch()
            chance = JobChance(time_s=7.0, low_s=5.0, high_s=9.0, deviation_s=1.0)
            JobRecord(
                model="mlp", plan="ddp", batch=4, devices="cpu", steps=5, step_s=1.0, scale=0.2, chance=chance,
                measured_s=7.0,
            ).save(path / "forecast.json")  # fmt: skip
    return str(tmp_path / "slow"), str(tmp_path / "fast")


def test_all_runs_of_a_folder_are_listed(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(Path(two[0]).parent)
    runs_command.run([folder], as_json=False)
    head, *lines = capsys.readouterr().out.splitlines()
    columns = ["run", "model", "plan", "state", "steps", "last", "loss", "samples/s", "whole", "job", "changed"]
    assert head.split() == columns
    by_name = {line.split()[0]: line.split()[1:-2] for line in lines[:2]}
    assert by_name["slow"] == ["mlp", "gpipe", "failed", "3/5", "0.0333", "40.0", "–"]
    assert by_name["fast"][:6] == ["mlp", "ddp", "finished", "5/5", "0.0400", "20.0"]
    assert by_name["fast"][6:] == ["7", "s", "(forecast", "5", "to", "9", "s)"]
    assert lines[-1] == "slow failed: worker 1 was ended by SIGKILL"
    runs_command.run([folder], as_json=True)
    found = json.loads(capsys.readouterr().out)["runs"]
    assert {run["plan"]: run["state"] for run in found} == {"gpipe": "failed", "ddp": "finished"}
    assert {run["plan"]: run["job"] and run["job"]["measured_s"] for run in found} == {"gpipe": None, "ddp": 7.0}


def test_runs_are_set_side_by_side(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    runs_command.run(two, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["common_step"] == 3
    assert found["losses_at_common_step"] == pytest.approx([0.1 / 3, 0.2 / 3])
    assert found["differences"]["lr"] == [0.1, 0.2]
    assert "seed" not in found["differences"]
    assert found["runs"][0]["reason"] == "worker 1 was ended by SIGKILL"
    runs_command.run(two, as_json=False)
    lines = {line[:15].strip(): line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert lines["loss at step 3"] == ["0.0333", "0.0667"]
    assert lines["lr"] == ["0.1", "0.2"]
