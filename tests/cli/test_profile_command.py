"""The command `profile`: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pipedejavu.facts import Profile
from pipedejavu.probe.machine_shape import num_cores
from tests.cli.test_main import refused, run

GPT = ("profile", "zoo:gpt-tiny", "--estimate")


def test_an_estimate_is_a_table_and_sentences() -> None:
    lines = run(*GPT, "--batch", "4").stdout.splitlines()
    assert lines[0] == "gpt-tiny  estimated at 2, 4 samples; a sample is 256 int64"
    assert lines[2].split("  ")[0] == "unit"
    assert [line.split("  ")[0] for line in lines[3:7]] == ["embedding", "4 × block", "head", "all"]
    text = "\n".join(lines[7:])
    # 16 bytes for each of 891648 parameters.
    assert "Weights, gradients and the state of AdamW take 13.6 MiB, in fp32 and in bf16" in text
    assert "In fp32, 4 samples keep 34.1 MiB of activations, 10.5 MiB with recompute." in text
    assert "In fp32 it needs 46.4 MiB and fits the " in text
    assert "Times are estimated from the rates of CPUs and efficiencies that were fitted to measured operators" in text


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        ("1 GiB", "needs 46.4 MiB (50.0 MiB reserved) and fits the 1.0 GiB of gpu0, which hold up to 108 samples, 317"),
        ("40 MiB", "and does not fit the 40.0 MiB of gpu0; with recompute it needs 23.9 MiB (40.0 MiB reserved) and"),
        (
            "39 MiB",
            "fit the 39.0 MiB of gpu0, with recompute 23.9 MiB (40.0 MiB reserved); they hold up to 2 samples, 3",
        ),
        ("10 MiB", "with recompute 23.9 MiB (40.0 MiB reserved), not even one sample; divide it over devices."),
    ],
)
def test_a_machine_is_said_to_fit_or_not(memory: str, verdict: str, tmp_path: Path) -> None:
    device = {"name": "gpu0", "kind": "g", "type": "gpu", "host": "h", "memory_bytes": memory}
    device |= {"flop_per_s": "1 TFLOP/s", "memory_bytes_per_s": "100 GB/s"}
    machine = {"name": "m", "hosts": [{"name": "h"}], "devices": [device]}
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    assert verdict in run(*GPT, "--batch", "4", "--machine", str(tmp_path / "machine.json")).stdout


def test_a_measured_profile_is_simulated(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    form = json.loads(run("profile", "zoo:mlp", "--batch", "4", "--out", str(out), "--json").stdout)
    assert form["sizes"] == [1, 2, 4]
    assert form["is_estimated"] is False
    assert form["files"] == [str(out)]
    assert Profile.load(out) == Profile.from_json(json.dumps(form["profile"]))
    assert form["needs"][0]["model_bytes"] == 16 * sum(unit["num_parameters"] for unit in form["profile"]["units"])
    assert form["profile"]["units"][0]["times"].keys() == {device["kind"] for device in form["devices"]}
    found = run("simulate", "preset:zb-h1", "--workers", "2", "--profile", str(out), "--json").stdout
    assert json.loads(found)["makespan_s"] > 0


@pytest.mark.skipif(num_cores() < 2, reason="needs two cores")
def test_parts_of_a_cpu_are_measured_where_asked(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    run("profile", "zoo:mlp", "--batch", "2", "--parts", "2", "--out", str(out))
    assert all({"cpu", "cpu/2"} <= unit.times.keys() for unit in Profile.load(out).units)
    found = run("simulate", "preset:1f1b", "--workers", "2", "--profile", str(out), "--json").stdout
    assert "profile: it has times on cpu/2, and these hold" in json.loads(found)["notes"]


def test_faults_are_one_sentence(monkeypatch) -> None:
    assert "give --machine together with --estimate" in refused("profile", "zoo:mlp", "--machine", "m.json")
    assert "'mlp' is not a model that can be trained; use zoo:NAME" in refused("profile", "mlp")
    assert "--batch is a number of samples, 1 or more, not 0" in refused("profile", "zoo:mlp", "--batch", "0")
    parts = ("profile", "zoo:mlp", "--parts")
    assert "parts of a CPU are measured; leave out --parts or --estimate" in refused(*parts, "2", "--estimate")
    for cores, count, sentence in (
        (4, "1", "the 4 cores of this CPU cannot be divided into 1 parts; give --parts from 2 to 4"),
        (4, "5", "the 4 cores of this CPU cannot be divided into 5 parts; give --parts from 2 to 4"),
        (1, "2", "this CPU has one core, which cannot be divided into 2 parts; leave out --parts"),
    ):
        monkeypatch.setattr("pipedejavu.planner.profiling.num_cores", lambda cores=cores: cores)
        assert sentence in refused(*parts, count)
    assert "--batch is a number of samples, 1 or more, not -1" in refused(*GPT, "--batch", "-1")


def test_forward_passes_are_timed_alone_on_data_that_lie_on_the_device() -> None:
    call = ("profile", "zoo:mlp", "--batch", "4", "--forward", "3")
    form = json.loads(run(*call, "--json").stdout)
    assert form["samples"] == 4
    assert len(form["passes_s"]["cpu"]) == 3
    assert all(time_s > 0 for time_s in form["passes_s"]["cpu"])
    lines = run(*call).stdout.splitlines()
    assert lines[0] == "mlp  3 forward passes with a batch size of 4, without gradients"
    assert [line.split()[0] for line in lines[2:7]] == ["pass", "1", "2", "3", "median"]


def test_forward_passes_need_a_number_and_no_units() -> None:
    assert "--forward is a number of passes, 1 or more, not 0" in refused("profile", "zoo:mlp", "--forward", "0")
    for other in (("--estimate",), ("--out", "x.json")):
        assert "leave out --estimate, --parts and --out" in refused("profile", "zoo:mlp", "--forward", "2", *other)
