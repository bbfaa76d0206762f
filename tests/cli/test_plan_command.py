"""The command `plan`: what it prints, writes and refuses; and a plan that it wrote, which runs."""

import json
from pathlib import Path

import pytest

from pipedejavu.facts import Machine, Profile, Survey
from pipedejavu.plan import Plan, preset
from tests.cli.test_main import EXAMPLES, refused, run
from tests.search.case import machine, profile

GPUS = str(EXAMPLES / "four-gpus.json")


def files(folder: Path, model: Profile, where: Machine) -> tuple[str, ...]:
    model.save(folder / "profile.json")
    where.save(folder / "machine.json")
    return str(folder / "profile.json"), "--machine", str(folder / "machine.json")


def test_plans_are_a_table_with_reasons_and_advice(tmp_path: Path) -> None:
    asked = files(tmp_path, profile([1e-3] * 4), machine(["fast", "fast"]))
    lines = run("plan", *asked, "--batch", "8").stdout.splitlines()
    assert lines[0] == "test on test, a batch of 8"
    assert lines[2].split() == [
        "plan", "update", "samples/s", "bubble", "memory", "of", "each", "device", "bounded", "by",
    ]  # fmt: skip
    # Four units of 3 ms a sample, forward and backward; four samples on each of two devices.
    assert lines[3].startswith("2 replicas  ")
    assert "48 ms" in lines[3]
    text = "\n".join(lines)
    assert "'2 replicas' wins: the whole model on gpu0 computes for 48 ms of 48 ms (100%)." in text
    assert "To change first: with one more fast, " in text


def test_a_stale_plan_says_what_it_gives_up(tmp_path: Path) -> None:
    asked = files(tmp_path, profile([1e-3] * 8, weights=10**8, update_s=2e-3), machine(["fast"] * 4, within=1e9))
    words = (*asked, "--batch", "8", "--staleness", "3")
    text = run("plan", *words).stdout
    sentence = (
        "'4 stages, PipeDream, weight-prediction' is 1.09 times as fast as the fastest exact plan, '4 stages, inter"
    )
    assert sentence in text
    assert "'4 stages, PipeDream' takes 0.93× as long, but lost more accuracy in the study." in text
    assert "version: stash + weight-prediction: forms are compared by the accuracy they lost in the study" in text
    form = json.loads(run("plan", *words, "--correction", "none", "--json").stdout)
    assert (form["gives_up"]["plan"], form["gives_up"]["staleness"]) == ("4 stages, PipeDream", 3)
    assert form["gives_up"]["measured"][0]["correction"] == "none"
    assert json.loads(run("plan", *asked, "--batch", "8", "--json").stdout)["gives_up"] is None
    assert "correction 'rates' restores what stale weights cost" in refused("plan", *asked, "--correction", "rates")


def test_what_is_written_is_what_is_told(tmp_path: Path) -> None:
    asked = files(tmp_path, profile([1e-3] * 4), machine(["fast", "fast"]))
    out, html = str(tmp_path / "plan.json"), str(tmp_path / "plan.html")
    form = json.loads(run("plan", *asked, "--batch", "8", "--out", out, "--html", html, "--json").stdout)
    best = form["candidates"][0]
    saved, shown = Plan.load(out), Plan.from_json(json.dumps(best["plan"]))
    *decisions, origin = saved.decisions
    assert saved.replace(decisions=tuple(decisions)) == shown
    assert origin.axis == "place"
    assert origin.reason.startswith("what it was planned for: ")
    assert form["files"] == [out, html]
    page = Path(html).read_text("utf-8")
    assert "Plans that were considered" in page
    assert best["bound"] in page
    simulated = json.loads(run("simulate", out, "--profile", asked[0], *asked[1:], "--json").stdout)
    assert simulated["makespan_s"] == pytest.approx(best["time_s"])


def test_a_stage_of_its_own_degree_is_told_written_and_only_costed(tmp_path: Path) -> None:
    # The first unit's state of 4 GiB fits on no GPU; halves of it do, and the others need not be divided.
    gib, out = 2**30, str(tmp_path / "plan.json")
    model = profile([1e-3] * 9, weights=[gib] + [gib // 40] * 8, boundary=1e6)
    asked = files(tmp_path, model, machine(["fast"] * 4, room=round(2.6 * gib), within=1e10))
    text = run("plan", *asked, "--costed", "--out", out).stdout
    assert "stages 1-2, operators over 2-1 devices (costed only)" in text
    reason = "the engine does not divide operators with tensor-parallel groups of different sizes (2-1)"
    assert f"\nIt is only costed: {reason}.\n" in text
    assert Plan.load(out).place.stage_shards == (2, 1)
    simulated = run("simulate", out, "--profile", asked[0], *asked[1:]).stdout
    assert "gpu0 +1" in simulated
    pytest.importorskip("torch")
    told = refused("train", "zoo:mlp", "--plan", out)
    assert "the engine does not run that with tensor-parallel groups of different sizes (2-1)" in told


def test_a_published_profile_is_planned_at_given_speeds(tmp_path: Path) -> None:
    # The convolution computes and the linear layer has the weights: three replicas of the one, the other on a slow GPU.
    text = "node{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size=1e6, parameter_size={}\n"
    graph = tmp_path / "small-graph.txt"
    graph.write_text(
        text.format(1, "Conv2d()", 10, 20, 4e3) + text.format(2, "Linear()", 1, 1, 4e9) + "\tnode1 -- node2\n"
    )
    machine(["fast"] * 3 + ["half"], within=1e10).save(tmp_path / "machine.json")
    asked = ("plan", str(graph), "--machine", str(tmp_path / "machine.json"), "--batch", "6", "--json")
    best = json.loads(run(*asked, "--speed", "half=0.5").stdout)["candidates"][0]
    assert best["plan"]["place"]["stage_replicas"] == [3, 1]
    assert "devices" not in best["plan"]["place"]  # the machine's own order
    simulated = ("simulate", "preset:1f1b", "--profile", str(graph), "--workers", "1", "--microbatches", "1", "--json")
    plain, slow = (
        json.loads(run(*simulated, "--machine", str(tmp_path / "machine.json"), *more).stdout)["makespan_s"]
        for more in ((), ("--speed", "fast=0.5"))
    )
    assert slow == pytest.approx(2 * plain)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--speed", "fast"), "--speed is KIND=FACTOR with a factor above 0, such as xeon=0.04, not 'fast'"),
        (("--speed", "fast=0"), "--speed is KIND=FACTOR with a factor above 0, such as xeon=0.04, not 'fast=0'"),
        (("--speed", "fast=2", "--speed", "fast=3"), "--speed gives 'fast' twice; give each kind once"),
    ],
)
def test_speeds_that_are_none_are_refused(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    assert sentence in refused("plan", *files(tmp_path, profile([1e-3]), machine(["fast"])), *arguments)


def test_a_speed_is_for_profiles() -> None:
    text = refused("plan", "gpt-small", "--machine", GPUS, "--speed", "a100=2")
    assert "--speed is for profiles; a model's times are measured, or estimated from each device's rate" in text
    text = refused("simulate", "preset:1f1b", "--model", "gpt-small", "--speed", "a100=2")
    assert "--speed is for --profile; a shape's times are estimated from each device's rate" in text


def test_a_disturbed_survey_is_said(tmp_path: Path) -> None:
    place = machine(["fast"])
    disturbed = place.replace(survey=Survey(date="2026-11-19", time_s=1.0, disturbance="other processes kept it busy"))
    asked = files(tmp_path, profile([1e-3]), disturbed)
    assert "machine: other processes kept it busy" in json.loads(run("plan", *asked, "--json").stdout)["notes"]
    simulated = run("simulate", "preset:1f1b", "--workers", "1", "--profile", *asked, "--json").stdout
    assert "machine: other processes kept it busy" in json.loads(simulated)["notes"]


def test_the_least_price_is_told_in_prices(tmp_path: Path) -> None:
    kinds = {"fast": 1.0, "half": 0.5}
    asked = files(tmp_path, profile([1e-3] * 4, kinds, update_s=1e-5), machine(["fast", "half"]))
    text = run("plan", *asked, "--batch", "8", "--objective", "price", "--price", "fast=1", "--price", "half=3").stdout
    assert "price of an update" in text
    # One pass of 96 ms on the faster one is the cheapest by far; the simplest of its equals comes first.
    assert "\none device " in text
    assert "× as much" in text
    assert "as long" not in text
    assert "faster" not in text


def test_nothing_fits_is_one_sentence_with_what_would(tmp_path: Path) -> None:
    gib = 2**30
    asked = files(tmp_path, profile([1e-3] * 4, weights=gib, saved=1.0), machine(["fast"], room=4 * gib))
    text = refused("plan", *asked, "--batch", "1")
    assert "no plan for test with a batch of 1 fits machine 'test'; this would fit: " in text
    assert " GiB more memory on the fast" in text


def test_faults_are_one_sentence(tmp_path: Path) -> None:
    asked = files(tmp_path, profile([1e-3]), machine(["fast"]))
    assert "--price is KIND=NUMBER, 0 or more, such as a100=2.5, not 'a100'" in refused(
        "plan", *asked, "--price", "a100"
    )
    assert "do not make up a batch of 8" in refused("plan", *asked, "--batch", "8", "--samples", "3")
    assert "searcher" in refused("plan", *asked, "--search", "magic")
    batch = refused("train", "zoo:mlp", "--plan", "preset:1f1b", "--batch", "8")
    assert "--batch is for --plan auto, which chooses the workers; give --microbatches and --samples" in batch
    assert "--plan auto chooses the microbatches; give --batch" in refused("train", "zoo:mlp", "--microbatches", "2")
    tries = refused("train", "zoo:mlp", "--plan", "preset:1f1b", "--try", "2")
    assert "--try is for --plan auto that chooses the workers itself; leave it out, or else --workers, other" in tries
    assert "--try is for --plan auto that" in refused("train", "zoo:mlp", "--workers", "2", "--try", "2")
    assert "--try is a number of plans, 1 or more, not 0" in refused("train", "zoo:mlp", "--try", "0")


def test_a_model_is_planned_for_a_machine_that_is_not_here() -> None:
    pytest.importorskip("torch")
    form = json.loads(run("plan", "zoo:mlp", "--machine", GPUS, "--batch", "8", "--json").stdout)
    assert form["machine"] == "four GPUs and a CPU"
    assert form["notes"][0].startswith("precision: bf16, split masters (a100 computes it at twice the rate")
    assert "times are estimated from what the model computes" in form["notes"][1]


def test_auto_trains_with_the_plan_that_it_found(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    where = str(tmp_path / "run")
    form = json.loads(
        run("train", "zoo:mlp", "--batch", "8", "--steps", "2", "--audit", "--run-dir", where, "--json").stdout
    )
    assert form["steps"] == 2
    assert form["audit"]["largest_difference"] < 1e-3
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.decisions
    assert {path.name.partition("-")[0] for path in (tmp_path / "cache" / "pipedejavu").iterdir()} == {
        "profile",
        "jobrecord",
    }
    # The plan runs unchanged from its file, too.
    run("train", "zoo:mlp", "--plan", f"{where}/plan.json", "--steps", "1", "--run-dir", str(tmp_path / "again"))


WIDE = """
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(4, 4) for _ in range(5))
        self.table = nn.Parameter(torch.randn(64, 4))

    def forward(self, x):
        x = self.b(self.a(x))
        table = self.table.tanh()
        x = self.d(self.c(x).relu() + table.mean())
        return self.e(x + table.mean())


def make():
    samples = [(torch.full((4,), n / 100), torch.zeros(4)) for n in range(100)]
    return Wide(), lambda output, target: ((output - target) ** 2).sum(), samples
"""


def test_a_cut_that_a_plan_carries_is_the_one_that_trains(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file, out, where = tmp_path / "wide.py", tmp_path / "plan.json", tmp_path / "run"
    file.write_text(WIDE)
    plans = ("plan", f"{file}:make", "--machine", "2xt4", "--batch", "256", "--samples", "256", "--out", str(out))
    run(*plans)
    begins = Plan.load(out).cut.begins
    assert len(begins) == 6  # six units beside many samples; beside one it has fewer
    pipeline = preset("1f1b").at(workers=2, microbatches=2, samples=1)
    pipeline.replace(cut=pipeline.cut.replace(bounds=(5,), begins=begins)).save(out)
    done = run("train", f"{file}:make", "--plan", str(out), "--steps", "1", "--audit", "--run-dir", str(where))
    assert "audit" in done.stdout
    assert len(Profile.load(where / "profile.json").units) == 6


def test_a_shape_is_written_out_and_its_forecast_has_an_interval():
    asked = ("plan", "gpt:2x64x2,seq=32,vocab=100", "--machine", "2xa100-80gb", "--batch", "4")
    assert "\nerror: in nine of ten such forecasts the first plan's update takes " in run(*asked).stdout
    best = json.loads(run(*asked, "--json").stdout)["candidates"][0]
    assert best["chance"]["low_s"] < best["time_s"] < best["chance"]["high_s"]
    told = refused("plan", "gpt:2x64x3", "--machine", "2xa100-80gb")
    assert "divides a width of 64 over 3 heads; give a number of heads that divides the width" in told
