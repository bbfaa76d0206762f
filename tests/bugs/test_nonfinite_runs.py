"""Whole runs that meet numbers that are not finite: what they leave, what goes on from it, and what the files say."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from torch import nn
from torch.distributed import HashStore

from pipedejavu.cli import runs_command as runs_verb
from pipedejavu.engine import Log
from pipedejavu.facts import InputError, to_json_text
from pipedejavu.launch import plan_run
from pipedejavu.launch.init_trial import InitTrial, run_init_trials
from pipedejavu.launch.resume import reopen
from pipedejavu.plan import preset
from pipedejavu.report import Story
from pipedejavu.report.story import render_story
from pipedejavu.run import History, RunFolder
from pipedejavu.run.logbook import Logbooks
from pipedejavu.run.metrics import MetricsCollector, MetricsReporter
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.progress import Progress
from pipedejavu.session import Checkpoints, Trainer
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.store import Checkpoint, CheckpointDir, Saver
from tests.launch.test_faults import FAULTY, MAIN
from tests.processes import Processes

OWN_MODEL = """
import torch
from torch import nn

class Distance(nn.Module):
    def __init__(self):
        super().__init__()
        self.plane = nn.Linear(5, 5, bias=False)

    def forward(self, x):
        return (self.plane(x) ** 2).sqrt()  # of a sample of zeros the gradient is NaN

def loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum")

def make():
    data = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randint(0, 3, (64,)))
    return nn.Sequential(Distance(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)), loss, data
"""


def strict_rows(path: Path) -> list[dict[str, Any]]:
    """Reads JSON lines as a reader does that knows no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.fixture
def processes():
    found = Processes()
    yield found
    for process in found.started:
        process.kill()
        process.wait()


def test_a_nan_gradient_in_the_last_update_leaves_the_last_finite_checkpoint(processes, tmp_path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL)
    (tmp_path / "faulty.py").write_text(FAULTY.format(inputs="x = x * 0 if n == 9 else x", targets="pass", send="pass"))
    sizes = ("--workers", "2", "--microbatches", "2", "--samples", "3", "--steps", "5", "--checkpoint-every", "2")
    arguments = ("train", "own.py:make", "--plan", "preset:1f1b", *sizes, "--run-dir", "run")
    code, out, err = processes.run((sys.executable, "-c", MAIN, *arguments), tmp_path)
    assert (code, out) == (2, ""), err
    assert "pipedejavu: the gradient of '0.plane.weight' is nan in step 5 on worker 0; lower the learning rate" in err
    assert err.endswith("or skip such updates (--on-nan skip); --resume goes on after step 4\n")
    folder = RunFolder(tmp_path / "run")
    assert folder.checkpoint_dir.steps() == [2, 4]
    assert Checkpoint(folder.checkpoint_dir.folder(4)).nonfinite() is None
    assert not folder.model.exists()
    assert [row["step"] for row in strict_rows(folder.metrics) if "loss" in row][:4] == [1, 2, 3, 4]
    refuse_what_an_earlier_version_saved(folder)


def refuse_what_an_earlier_version_saved(folder: RunFolder) -> None:
    """Resumes from a checkpoint of NaNs, which versions that checked the loss alone have left."""
    before, saver = Checkpoint(folder.checkpoint_dir.folder(4)), Saver(folder.checkpoint_dir)
    tensors = before.tensors(before.names())
    tensors["state/exp_avg_sq/0.plane.weight"][0, 0] = math.inf
    saver.save(5, tensors, lambda: {"samples": 30})
    saver.wait()
    told: list[str] = []
    said = (
        r"cannot go on from .*step-5: 'state/exp_avg_sq/0\.plane\.weight' is not finite; remove that folder to go on"
        r" after step 4, the newest that is finite"
    )
    with pytest.raises(InputError, match=said):
        reopen(str(folder.path), RankGroup(), told.append)
    assert folder.checkpoint_dir.steps()[-2:] == [4, 5]
    assert told == []
    for step in folder.checkpoint_dir.steps()[:-1]:
        shutil.rmtree(folder.checkpoint_dir.folder(step))
    with pytest.raises(InputError, match="no checkpoint before it is finite, so begin again in another folder"):
        reopen(str(folder.path), RankGroup(), told.append)


def test_a_loop_saves_and_loads_no_checkpoint_of_nans(tmp_path) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    checkpoints.save(model, optimizer, step=1, loss=math.nan)
    assert checkpoints.load(model, optimizer) == (1, 0)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="'weight/weight' is not finite in step 2, and is not saved; go on from"):
        checkpoints.save(model, optimizer, step=2)
    saver = Saver(CheckpointDir(tmp_path))
    saver.save(2, {"weight/weight": model.weight.detach()}, lambda: {"samples": 0})
    saver.wait()
    with pytest.raises(InputError, match="'weight/weight' is not finite; remove that folder to go on after step 1,"):
        checkpoints.load(model, optimizer)


def rows_of(folder: RunFolder, *reports: dict[str, Any]) -> list[dict[str, Any]]:
    """Lets a rank tell the desk of one round after the other; returns the metrics."""
    store, log = HashStore(), Log()

    class Ones:
        def count(self, _: int) -> int:
            return 1

    with Progress(3, "samples", 1.0) as progress:
        collector = MetricsCollector(folder, progress, Logbooks({}, print), num_ranks=1, update_size=1, num_samples=1)
        watch = MetricsReporter(store, 0, Ones(), torch.device("cpu"), None)  # type: ignore[arg-type]
        for report in reports:
            watch.follow(log)
            log.losses.update(report["losses"])
            log.skipped.update(report.get("skipped", {}))
            watch.settle()
            watch.send()
            collector.take_all(store)
        assert progress.num_skipped == sum(len(report.get("skipped", {})) for report in reports)
        assert ("1 skipped" in progress.view.facts) == bool(progress.num_skipped)
        assert all(map(math.isfinite, progress.view.losses))
    return strict_rows(folder.metrics)


def test_a_skipped_update_is_an_event_of_the_run_and_its_loss_is_null(tmp_path, capsys) -> None:
    folder = RunFolder(tmp_path / "run")
    planned = plan_run_here()
    folder.create(planned.options, planned.program)
    reason = "the loss is nan in step 2, microbatch 1, on worker 0"
    rows = rows_of(
        folder, {"losses": {0: 2.0}}, {"losses": {1: math.nan}, "skipped": {2: reason}}, {"losses": {2: 1.0}}
    )
    assert [row["loss"] for row in rows if "loss" in row] == [2.0, None, 1.0]
    assert [row for row in rows if "skipped" in row] == [{"skipped": 2, "reason": reason}]
    run = History.read(folder.path)
    assert [step.loss for step in run.steps] == [2.0, None, 1.0]
    capsys.readouterr()
    runs_verb.run([str(folder.path)], as_json=True)
    form = json.loads(capsys.readouterr().out)["runs"][0]
    assert (form["steps_skipped"], form["last_loss"]) == (1, 1.0)
    for paths in ([str(tmp_path)], [str(folder.path), str(folder.path)]):
        runs_verb.run(paths, as_json=False)
        assert "(1 skipped)" in capsys.readouterr().out
    page = render_story(Story([(1, 2.0), (3, 1.0)], [], None, run.events))
    assert f"the update of step 2 was left out: {reason}" in page
    assert "no update left out" not in page
    folder._forget(1)
    assert [row for row in folder.rows() if "skipped" in row] == []


def test_metrics_of_earlier_versions_with_a_bare_nan_are_read_and_mended(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    planned = plan_run_here()
    folder.create(planned.options, planned.program)
    folder.metrics.write_text('{"step": 1, "loss": NaN, "elapsed_s": 1.0}\n{"step": 2, "loss": Infinity}\n')
    assert [step.loss for step in History.read(folder.path).steps] == [None, None]
    folder._forget(2)
    assert [row["loss"] for row in strict_rows(folder.metrics) if "loss" in row] == [None, None]
    assert to_json_text({"a": [1.5, math.nan, (-math.inf,)]}) == '{"a": [1.5, null, [null]]}'


def plan_run_here(**changes: Any) -> Any:
    options = TrainOptions(model="mlp", data="random:64", steps=3, lr=0.01, **changes)
    return plan_run(options, preset("ddp").at(workers=1, microbatches=1, samples=2))


def test_an_initialisation_whose_update_cannot_be_made_loses(monkeypatch) -> None:
    """The first update of candidate 0 gives NaN gradients with a finite loss, which is the lowest of all."""
    planned = plan_run_here(init_candidates=2, init_steps=1, optimizer="sgd")
    made = InitTrial.__init__

    def spoilt(self: InitTrial, options: TrainOptions, program: Any, worker: int, number: int, batches: Any) -> None:
        made(self, options, program, worker, number, batches)
        if number == 0:
            own = self.threads.handlers[0].job
            own.__dict__["loss"] = lambda output, _: (output.sum() * 0) ** 0.5

    monkeypatch.setattr(InitTrial, "__init__", spoilt)
    selection, winner = run_init_trials(planned.options, planned.program, 0, 1, lambda _: None)
    assert selection.winner == 1
    assert winner is not None
    assert all(bool(t.isfinite().all()) for t in winner.state().values() if t.is_floating_point())
    assert math.isinf(selection.losses[0][0])


def test_a_trainer_loads_no_checkpoint_of_nans(tmp_path) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).sum()

    batch = (torch.randn(8, 3), torch.randn(8, 2))
    trainer = Trainer(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), loss, sample=batch, workers=1, plan="ddp")
    trainer.step(batch)
    trainer.save(tmp_path)
    trainer.wait()
    known = Checkpoint(CheckpointDir(tmp_path).folder(1))
    tensors = known.tensors(known.names())
    tensors["weight/0.weight"][0] = math.nan
    saver = Saver(CheckpointDir(tmp_path))
    saver.save(2, tensors, lambda: {"samples": 16})
    saver.wait()
    with pytest.raises(InputError, match=r"step-2: 'weight/0\.weight' is not finite; remove that folder to go on"):
        trainer.load(tmp_path)
