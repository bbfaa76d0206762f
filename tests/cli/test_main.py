"""The command line: what it prints, writes and refuses."""

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from pipedejavu.cli.main import main
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Timeline, Unit, UnitTime
from pipedejavu.plan import preset, presets

EXAMPLES = Path(__file__).parents[2] / "examples"


class Said(NamedTuple):
    """What a command has printed, in this process; what its workers print is not among it."""

    code: int
    stdout: str
    stderr: str


def say(*arguments: str) -> Said:
    out, error, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
        patch.setattr(sys, "argv", ["pipedejavu", *arguments])
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Said(code, out.getvalue(), error.getvalue())


def run(*arguments: str) -> Said:
    """Returns what a command says that is carried out."""
    said = say(*arguments)
    assert said.code == 0, said.stderr
    return said


def refused(*arguments: str) -> str:
    """Returns what a command says that cannot be carried out."""
    said = say(*arguments)
    assert (said.code, said.stdout) == (2, ""), said.stderr
    assert said.stderr.startswith("pipedejavu: ")
    return said.stderr


def test_presets_lists_every_preset_with_its_axes() -> None:
    lines = run("presets").stdout.splitlines()
    assert lines[0].split() == ["preset", "cut", "place", "feed", "order", "version", "reduce", "keep"]
    assert [line.split()[0] for line in lines[1 : 1 + len(presets())]] == list(presets())
    assert "…" not in "".join(lines)


def test_presets_as_json_is_one_object() -> None:
    table = json.loads(run("presets", "--json").stdout)["presets"]
    assert list(table) == list(presets())
    assert table["1f1b"]["axes"]["order"] == "1f1b"


def test_a_preset_shows_its_axes_and_its_grid() -> None:
    text = run("presets", "1f1b", "--workers", "2", "--microbatches", "3").stdout
    assert "order    1f1b" in text
    assert text.splitlines()[-3:-1] == [
        "w0  F0 F1       B0 ·  F2 B1 ·     B2 ·",
        "w1     F0 B0 ·  F1 B1 ·  F2 B2 ·",
    ]


def test_every_preset_can_be_shown() -> None:
    for name in ("l2l", "hetpipe", "megatron", "coarse"):
        assert "at unit costs" in run("presets", name).stdout


def test_simulate_as_json_has_the_promised_keys() -> None:
    form = json.loads(run("simulate", "preset:1f1b", "--unit-costs", "F=1,B=2", "--json").stdout)
    assert form["makespan_s"] == 33
    assert form["bubble_fraction"] == pytest.approx(3 / 11)
    keys = {"busy_s", "peak_bytes", "peak_live_microbatches", "weight_versions"}
    assert all(keys <= worker.keys() for worker in form["workers"])
    assert [worker["peak_live_microbatches"] for worker in form["workers"]] == [4, 3, 2, 1]


def test_unit_costs_follow_what_is_given() -> None:
    form = json.loads(run("simulate", "preset:chimera", "--unit-costs", "F=1,B=1", "--json").stdout)
    assert form["makespan_s"] == 18


def test_recompute_is_an_option_of_every_plan() -> None:
    arguments = ("simulate", "preset:gpipe", "--unit-costs", "F=1,B=2", "--recompute", "1", "--json")
    assert json.loads(run(*arguments).stdout)["makespan_s"] == 44


def test_simulate_writes_report_trace_and_timeline(tmp_path: Path) -> None:
    html, trace, out = tmp_path / "r.html", tmp_path / "t.json", tmp_path / "timeline.json"
    machine = str(EXAMPLES / "four-gpus.json")
    files = ("--html", str(html), "--trace", str(trace), "--out", str(out))
    text = run("simulate", "preset:fine", "--model", "gpt-1.3b", "--machine", machine, *files).stdout
    assert "samples/s" in text
    assert html.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]
    timeline = Timeline.from_json(out.read_bytes())
    assert any(span.lane == "host" for span in timeline.spans())
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_simulate_reads_a_plan_file_and_can_resize_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    preset("1f1b").at(workers=4, microbatches=8).save(path)
    arguments = ("simulate", str(path), "--workers", "2", "--microbatches", "5", "--unit-costs", "F=1,B=2", "--json")
    assert json.loads(run(*arguments).stdout)["makespan_s"] == 18


def test_simulate_without_a_machine_takes_this_ones_shape() -> None:
    text = run("simulate", "preset:ddp", "--workers", "2", "--model", "gpt-tiny").stdout
    assert "its rates are assumed, not measured" in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("preset:1f2b",), "there is no preset '1f2b'; did you mean '1f1b'?"),
        (("preset:1f1b", "--workers", "0"), "--workers is a number of workers, 1 or more, not 0"),
        (("preset:1f1b", "--workers", "x"), "Invalid value for '--workers'"),
        (("preset:chimera", "--workers", "3"), "3 is odd; use an even number of workers"),
        (("preset:l2l", "--workers", "2"), "preset 'l2l' trains on one worker, not 2"),
        (("preset:gems-mast", "--microbatches", "3"), "3 is not a multiple of 2"),
        (("preset:1f1b", "--unit-costs", "F=1,Q=2"), "'Q=2' is not a unit cost; write F=1,B=2"),
        (("preset:1f1b", "--unit-costs", "F=one"), "'one' is not a number for unit cost F"),
        (("preset:zb-h1", "--unit-costs", "B=3,I=1,W=1"), "B must be I + W, and 3 is not 1 + 1"),
        (("preset:1f1b", "--unit-costs", "F=1", "--model", "gpt-tiny"), "leave out --model"),
        (("preset:1f1b", "--recompute", "2"), "--recompute is a share between 0 and 1, not 2"),
        (("preset:1f1b", "--model", "gpt-tyni"), "there is no model shape 'gpt-tyni'; did you mean 'gpt-tiny'?"),
        (("preset:1f1b", "--model", "gpt-tiny", "--workers", "9"), "has 6 units; use at most 6 stages"),
        (("1f1b",), "did you mean 'preset:1f1b'?"),
        (("missing.json",), "cannot read missing.json: No such file or directory"),
        (("preset:1f1b", "--machine", "missing.json"), "cannot read missing.json"),
        (("preset:ddp", "--model", "gpt-175b", "--workers", "2"), "device 'cpu0' would need"),
        (("preset:1f1b", "--html", "missing/r.html"), "cannot write missing/r.html: No such file or directory"),
    ],
)
def test_bad_input_exits_2_with_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused("simulate", *arguments)


def test_a_machine_that_is_too_small_is_refused() -> None:
    text = refused("simulate", "preset:1f1b", "--workers", "9", "--machine", str(EXAMPLES / "four-gpus.json"))
    assert "the plan needs 9 devices to train on, machine 'four GPUs and a CPU' has 5" in text


def test_a_gpu_whose_allocator_would_run_out_is_refused(tmp_path: Path) -> None:
    # Weights of 3 MiB with their gradient, two moments and an update's copies: 18 MiB, in a segment of 20.
    size, time = 3 * 2**20, UnitTime(forward=Cost(per_sample_s=1.0), backward=Cost(per_sample_s=2.0), update_s=1.0)
    state = {"parameter_bytes": size, "gradient_bytes": size, "optimizer_bytes": 2 * size, "parameter_parts": (size,)}
    profile = Profile(name="p", units=(Unit(name="u", times={"g": time}, **state),))
    (tmp_path / "profile.json").write_text(profile.to_json())
    asked = ("simulate", "preset:ddp", "--workers", "1", "--microbatches", "1")
    for room in (19, 20):
        gpu = Device(name="gpu0", kind="g", type="gpu", host="h", memory_bytes=room * 2**20)
        machine = Machine(name="m", hosts=(Host(name="h"),), devices=(gpu,), links=(Link(bytes_per_s=1e9),))
        (tmp_path / f"{room}.json").write_text(machine.to_json())
    files = [("--profile", str(tmp_path / "profile.json"), "--machine", str(tmp_path / f"{n}.json")) for n in (19, 20)]
    sentence = "would reserve 20.0 MiB for tensors of 18.0 MiB, and the device has 19.0 MiB; use more workers, smaller"
    assert sentence in refused(*asked, *files[0])
    assert "20.0 MiB" in run(*asked, *files[1]).stdout


def test_broken_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"name": ')
    assert "machine.json: not valid JSON" in refused("simulate", "preset:1f1b", "--machine", str(path))


def test_all_faults_of_a_file_come_together(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"oder": {"kind": "1f1b"}, "place": {"workers": -1}}')
    text = refused("simulate", str(path))
    assert "unknown key 'oder'; did you mean 'order'?" in text
    assert "place.workers" in text


def test_simulate_on_a_machine_that_is_not_at_hand() -> None:
    line = "2x(4xa100-80gb + epyc-7763), 100Gb/s"
    form = json.loads(run("simulate", "preset:1f1b", "--workers", "8", "--machine", line, "--json").stdout)
    assert [w["device"] for w in form["workers"]] == [f"h{h}/a100-80gb-{n}" for h in range(2) for n in range(4)]
    assert form["notes"] == ["model: gpt-small from its shape; times are estimated from each device's stated rates"]


def test_simulate_divides_the_cpu_of_a_machine_over_the_workers() -> None:
    form = json.loads(run("simulate", "preset:1f1b", "--workers", "3", "--machine", "t4 + xeon-6248", "--json").stdout)
    assert [w["device"] for w in form["workers"]] == ["t4-0", "cpu.0", "cpu.1"]
    text = refused("simulate", "preset:1f1b", "--workers", "12", "--machine", "t4 + core-i7-9700k")
    assert "the plan needs 12 devices to train on, machine 't4 + core-i7-9700k' has 9" in text


def test_probe_refuses_a_folder_that_is_not_there() -> None:
    assert "cannot write missing/m.json: its folder does not exist" in refused("probe", "--out", "missing/m.json")


@pytest.mark.slow
def test_probe_measures_and_simulate_and_train_use_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "machine.json"
    done = run("probe", "--quick", "--json", "--out", str(out))
    machine = Machine.load(out)
    assert Machine.from_json(done.stdout) == machine
    assert machine.survey is not None
    arguments = ("--workers", "2", "--microbatches", "2", "--samples", "2", "--machine", str(out))
    notes = json.loads(run("simulate", "preset:1f1b", *arguments, "--json").stdout)["notes"]
    assert notes[0] == f"machine: {machine.name}, measured {machine.survey.date}"
    where = ("--run-dir", str(tmp_path / "run"), "--data", "random:32", "--steps", "1", "--optimizer", "sgd")
    assert (
        json.loads(run("train", "zoo:mlp", "--plan", "preset:1f1b", *arguments, *where, "--json").stdout)["steps"] == 1
    )


def test_usage_faults_exit_2_too() -> None:
    assert "Missing argument 'PLAN'" in refused("simulate")
    assert "No such command 'simulat'" in refused("simulat")


def test_the_example_machine_is_valid() -> None:
    assert len(Machine.load(EXAMPLES / "four-gpus.json").devices) == 5


def test_train_trains_and_compare_joins_the_timelines(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run_dir = str(tmp_path / "run")
    sizes = ("--workers", "2", "--microbatches", "2", "--samples", "2", "--steps", "2", "--optimizer", "sgd")
    text = run(
        "train",
        "zoo:mlp",
        "--data",
        "random:32",
        "--plan",
        "preset:1f1b",
        *sizes,
        "--audit",
        "--dtype",
        "float64",
        "--json",
        "--run-dir",
        run_dir,
    )
    form = json.loads(text.stdout)
    assert form["steps"] == 2
    assert form["audit"]["largest_difference"] < 1e-15  # weights below 1 in float64
    assert form["audit"]["verdict"] == "passed"
    assert form["audit"]["largest_difference"] <= form["audit"]["tolerance"] < 1e-12
    rows = json.loads(run("compare", run_dir, "--json").stdout)["rows"]
    assert {(row["worker"], row["kind"]) for row in rows} >= {(0, "F"), (0, "B"), (1, "F"), (1, "UPDATE")}
    shown = run("compare", run_dir).stdout
    assert "makespan" in shown


def test_train_continues_from_the_best_of_several_initialisations(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    sizes = ("--plan", "preset:ddp", "--workers", "1", "--microbatches", "1", "--samples", "2", "--steps", "6")
    selection = ("--init-candidates", "3", "--init-steps", "4", "--checkpoint-every", "0")
    found = run(
        "train", "zoo:mlp", "--data", "random:32", *sizes, *selection, "--json", "--run-dir", str(tmp_path / "run")
    )
    said = re.search(r"candidate (\d) of 3 goes on after step (\d); together they made (\d+) updates", found.stderr)
    assert said
    winner, behind, together = map(int, said.groups())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row.get("candidate") for row in steps] == [winner] * behind + [None] * (6 - behind)
    (told,) = (row["candidates"] for row in rows if "candidates" in row)
    assert (told["winner"], sum(told["updates"]), told["samples"]) == (winner, together, together * 2)
    assert json.loads(found.stdout)["last_loss"] == steps[-1]["loss"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("gpt-tiny",), "'gpt-tiny' is not a model that can be trained; use zoo:NAME"),
        (("zoo:gpt-tyni",), "there is no model 'zoo:gpt-tyni'; did you mean 'gpt-tiny'?"),
        (("zoo:mlp", "--plan", "preset:distreal"), "the model has no convolution whose filters can be left out"),
        (
            ("zoo:mlp", "--plan", "preset:zero-3", "--workers", "1"),
            "keep 'zero-3' divides state over replicas, and the plan has one; use more replicas, or keep 'replicated'",
        ),
        (("zoo:mlp", "--plan", "preset:1f1b", "--workers", "99"), "the plan has 99 stages but profile 'mlp' has"),
        (("zoo:mlp", "--dtype", "int8", "--optimizer", "adam"), "the options of train has 2 faults"),
        (
            ("zoo:mlp", "--plan", "preset:easgd", "--byzantine", "1:scale"),
            "hand no gradients over",
        ),
        (
            ("zoo:mlp", "--plan", "preset:gems-mast", "--microbatches", "4"),
            "plan 'gems-mast' makes each update of 2 microbatches, not 4; leave --microbatches out and give larger ones"
            " with --samples, or use preset:gems-master, whose updates have any number",
        ),
        (
            ("zoo:mlp", "--plan", "preset:pipedream", "--microbatches", "4"),
            "plan 'pipedream' makes each update of 1 microbatch, not 4; leave --microbatches out and give larger ones",
        ),
        (
            ("zoo:mlp", "--plan", "preset:hogwild", "--audit"),
            "version 'torn' of plan 'hogwild' records no versions, so there is nothing to replay; leave --audit out",
        ),
        (("zoo:mlp", "--plan", "preset:ddp", "--trim", "1"), "plan 'ddp' scores no contributions, so it drops none"),
        (("zoo:mlp", "--trim", "1"), "--trim is for plans that score contributions; use --plan preset:zeno"),
        (("zoo:mlp", "--devices", "tpu"), "--devices is auto, cpu, gpu or shared-gpu, not 'tpu'"),
        (("zoo:mlp", "--machine", "missing.json"), "cannot read missing.json"),
        (
            ("zoo:mlp", "--plan", "preset:1f1b", "--workers", "9", "--machine", str(EXAMPLES / "four-gpus.json")),
            "the plan needs 9 devices to train on, machine 'four GPUs and a CPU' has 5",
        ),
    ],
)
def test_train_refuses_what_cannot_run(arguments: tuple[str, ...], sentence: str) -> None:
    pytest.importorskip("torch")
    assert sentence in refused("train", *arguments)


@pytest.mark.slow
def test_a_machine_of_gpus_and_a_cpu_trains_with_stand_ins(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this host has GPUs, so nothing stands in for them")
    where = ("--machine", str(EXAMPLES / "four-gpus.json"), "--run-dir", str(tmp_path / "run"))
    sizes = ("--workers", "2", "--microbatches", "4", "--samples", "2", "--steps", "2", "--optimizer", "sgd")
    done = run("train", "zoo:mlp", "--data", "random:32", "--plan", "preset:coarse", *sizes, *where, "--audit")
    assert "workers on gpu0 (a100), gpu1 (a100), cpu (cpu)" in done.stderr
    assert "the plan has workers on 2 GPUs of one host, and 0 are there: CPU workers stand in for them" in done.stderr
    assert "audit passed: largest difference" in done.stdout
    profile = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert all(unit["times"].keys() == {"a100", "cpu"} for unit in profile["units"])


@pytest.mark.parametrize(
    ("plan", "share", "sentence"),
    [
        ("ddp", "0.5", "plan 'ddp' shares no batch with CPU replicas; leave --cpu-share out, or use preset:coarse"),
        ("coarse", "1.5", "--cpu-share is a part of the batch between 0 and 1, not 1.5"),
    ],
)
def test_a_cpu_share_needs_somebody_to_take_it(plan: str, share: str, sentence: str) -> None:
    pytest.importorskip("torch")
    assert sentence in refused("train", "zoo:mlp", "--plan", f"preset:{plan}", "--cpu-share", share)


def test_gpus_that_are_not_there_are_not_taken_for_granted() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this host has GPUs")
    text = refused("train", "zoo:mlp", "--plan", "preset:1f1b", "--workers", "2", "--devices", "gpu")
    assert "which has 0 GPUs; use as many workers as there are GPUs, or --devices auto" in text


def test_compare_takes_a_recording_of_a_hybrid_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.hybrid_report.test_recording import train

    optimizer, recorded = train(gpu_units=2, clip_norm=0.1, speculate=False)
    optimizer.close()
    path = tmp_path / "run.json"
    path.write_text(recorded.to_json())
    found = json.loads(run("compare", str(path), "--json").stdout)
    assert {(row["lane"], row["kind"]) for row in found["rows"]} == {
        ("compute", "F"), ("compute", "B"), ("compute", "UPDATE"), ("copy-out", "OFFLOAD"), ("host", "UPDATE"),
        ("copy-in", "FETCH"),
    }  # fmt: skip
    assert found["measured_s"] == pytest.approx(recorded.step_s)
    assert sum(found["bounds"].values()) == pytest.approx(1.0)
    text = run("compare", str(path)).stdout
    assert "predicted/measured" in text
    assert "of a step of" in text


def test_compare_refuses_a_file_that_is_no_recording(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "run.json"
    path.write_text("{}")
    assert "units" in refused("compare", str(path))


def test_compare_needs_a_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert "has no predicted timeline" in refused("compare", str(tmp_path))


def test_published_profiles_are_simulated(tmp_path: Path) -> None:
    table, graph = tmp_path / "two.csv", tmp_path / "two.txt"
    table.write_text("unit,forward_s,backward_s,boundary_bytes\nu,1,2,8\nv,1,2,8\n")
    figures = "forward_compute_time=1000, backward_compute_time=2000, activation_size=8, parameter_size=0"
    rows = [f"node{n} -- ReLU() -- {figures}" for n in (1, 2)]
    graph.write_text("\n".join([*rows, "\tnode1 -- node2", ""]))
    common = ("simulate", "preset:1f1b", "--workers", "2", "--microbatches", "4", "--samples", "1", "--json")
    found = [json.loads(run(*common, "--profile", str(path)).stdout) for path in (table, graph)]
    assert found[0]["makespan_s"] == pytest.approx(found[1]["makespan_s"])
    assert found[0]["makespan_s"] == pytest.approx((4 + 2 - 1) * 3, rel=1e-3)
    graph.write_text("node1 -- ReLU()\n")
    assert "line 1: 'node1 -- ReLU()' is neither" in refused(*common, "--profile", str(graph))
