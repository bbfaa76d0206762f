"""`train --eval-data`: what it prints and records, and that it changes no weight."""

import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file

from pipedejavu.launch.planned_run import _count_steps
from pipedejavu.run import History
from pipedejavu.run.options import MOST_STEPS, TrainOptions
from tests.cli.test_main import refused, run

PLAN = ("--data", "digits", "--plan", "preset:gpipe", "--workers", "2", "--microbatches", "2", "--samples", "64")


def test_evaluation_is_recorded_and_changes_no_weight(tmp_path):
    evaluated, plain = tmp_path / "evaluated", tmp_path / "plain"
    said = run(
        "train", "zoo:mlp", *PLAN, "--epochs", "1", "--eval-data", "digits", "--eval-every", "5", "--json",
        "--run-dir", str(evaluated),
    )  # fmt: skip
    run("train", "zoo:mlp", *PLAN, "--steps", "12", "--run-dir", str(plain))
    summary, history = json.loads(said.stdout), History.read(evaluated)
    assert summary["steps"] == 12  # 1,500 samples, 128 per update
    assert [done.step for done in history.evaluations] == [5, 10, 12]
    assert history.evaluations[-1].accuracy == summary["accuracy"]
    assert 0.2 < summary["accuracy"] <= 1
    assert history.evaluations[0].elapsed_s < history.evaluations[-1].elapsed_s
    assert history.evaluations[-1].epoch == pytest.approx(12 * 128 / 1500)
    assert [event.kind for event in history.events if "evaluat" in event.kind] == []
    report = (evaluated / "report.html").read_text()
    assert "evaluation after step 12" in report
    assert str(MOST_STEPS) not in report  # what an update costs to compile is weighed against the updates of the epochs
    first, second = load_file(evaluated / "model.safetensors"), load_file(plain / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_options_that_exclude_each_other_are_refused():
    said = refused("train", "zoo:mlp", "--epochs", "2", "--steps", "5")
    assert "--epochs 2 and --steps 5 both say how long to train; give one" in said
    said = refused("train", "zoo:mlp", "--accumulate", "2", "--microbatches", "4")
    assert "--accumulate and --microbatches are two names of one number" in said
    assert "there is nothing to; add --eval or --eval-data" in refused("train", "zoo:mlp", "--eval-every", "2")
    said = refused("train", "zoo:mlp", "--lora", "2", "--plan", "preset:ddp", "--workers", "1", "--steps", "1")
    assert "--lora is for hf: models, and 'mlp' is none; name what to train with --train" in said


def test_epochs_of_fewer_samples_than_an_update_takes_are_told():
    ranks = SimpleNamespace(is_first=True, broadcast=lambda body: body)
    start, program = SimpleNamespace(step=0, samples=0), SimpleNamespace(sizes=(16, 16))
    batches = SimpleNamespace(task=SimpleNamespace(data=range(20)))
    options, said = _count_steps(
        TrainOptions(model="mlp", epochs=3), program, ranks, start, [SimpleNamespace(batches=batches)]
    )
    assert options.steps == 2
    assert said == (
        "3 epochs of 20 samples: 2 updates of 32; the last update has 4 samples of the next; an update takes more"
        " samples than an epoch has, and a smaller --batch makes more updates"
    )
