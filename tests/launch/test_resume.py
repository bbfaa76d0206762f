"""Runs that stop, in whatever way, and go on: to the weights of the run that was never stopped."""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from hypothesis import given as given_values
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pipedejavu.engine import run_threads
from pipedejavu.facts import InputError
from pipedejavu.launch import RankGroup, is_same_plan, plan_run, reopen, train
from pipedejavu.plan import preset
from pipedejavu.run import RunFolder, RunStart, TrainOptions
from pipedejavu.run.run_folder import result_of
from pipedejavu.source.task import prepare
from pipedejavu.store import Checkpoint, CheckpointDir
from tests.launch.test_faults import FAULTY, MAIN, wait_until_nobody_is_left

OPTIONS = TrainOptions(model="mlp", data="random:64", dtype="float64", lr=0.01, steps=6)


def begin(folder: Path, name: str, options: TrainOptions = OPTIONS, *, workers: int = 2, microbatches: int | None = 4):
    plan = preset(name).at(workers=workers, samples=3, microbatches=microbatches)
    options, program, note = plan_run(options, plan)
    return train(options, program, str(folder)), note


def go_on(folder: Path, name: str | None = None, *, steps: int = 6, workers: int = 2, microbatches: int | None = 4):
    """Goes on as the command line does; under the run's own plan, or another."""
    resumed = reopen(str(folder), RankGroup(), lambda _: None)
    assert resumed is not None
    known = resumed.known
    assert known is not None
    plan = preset(name).at(workers=workers, samples=3, microbatches=microbatches) if name else known.plan
    is_same = is_same_plan(plan, known.plan)
    assert is_same == (name is None)
    options = resumed.options(known.options.replace(steps=steps), {"steps"})
    measured = {"machine": known.machine, "profile": known.profile} if is_same else {}
    options, program, _ = plan_run(options, plan, start=resumed.start, **measured)
    return train(options, program, str(folder), resumed.start)


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(first, second) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def steps_in(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "step" in row]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run of six steps, and one of four that is to go on."""
    folder = tmp_path_factory.mktemp("runs")
    begin(folder / "whole", "1f1b", OPTIONS.replace(checkpoint_every=2))
    shutil.copytree(folder / "whole", folder / "half")
    shutil.rmtree(folder / "half" / "checkpoints" / "step-6")
    (folder / "half" / "model.safetensors").unlink()
    torch.set_default_dtype(torch.float32)
    return folder


@pytest.fixture
def half(runs: Path, tmp_path: Path) -> Path:
    """A run that was ended after step 4, as a kill leaves it."""
    return Path(shutil.copytree(runs / "half", tmp_path / "half"))


def test_a_run_continues_to_the_same_bits(runs: Path, half: Path) -> None:
    done = go_on(half)
    assert equal(model_of(half), model_of(runs / "whole"))
    assert steps_in(half) == [1, 2, 3, 4, 5, 6]
    assert (
        CheckpointDir(half / "checkpoints").steps() == CheckpointDir(runs / "whole" / "checkpoints").steps() == [4, 6]
    )
    first, second = (Checkpoint(folder / "checkpoints" / "step-6") for folder in (half, runs / "whole"))
    names = [name for name in first.names() if not name.startswith("rng/")]
    assert all(torch.equal(first.tensor(name), second.tensor(name)) for name in names)
    assert done.measured.makespan_s > 0
    rows = [json.loads(line) for line in (half / "metrics.jsonl").read_text().splitlines()]
    assert {"resumed": 4} in rows
    elapsed = [row["elapsed_s"] for row in rows if "elapsed_s" in row]
    assert elapsed == sorted(elapsed)


def test_it_continues_with_other_workers_and_another_plan_within_rounding(runs: Path, half: Path) -> None:
    go_on(half, "ddp", workers=2, microbatches=2)
    expected, found = model_of(runs / "whole"), model_of(half)
    # Two updates of AdamW in float64: a gradient g is known to an ulp of the 12 that it sums, and lr·g/(√v+ε) moves a
    # weight by no more than lr/ε of that.
    assert max(float((found[n] - w).abs().max()) for n, w in expected.items()) < 2 * 12 * 2.3e-16 * 0.01 / 1e-8
    manifest = Checkpoint(half / "checkpoints" / "step-6").manifest
    assert (manifest.plan["name"], manifest.samples) == ("ddp", 72)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gpipe", "interleaved", "zb-h1", "chimera", "ddp", "coarse", "fine", "byteps", "axonn", "zero-1", "zero-3"],
)
def test_every_kind_of_run_continues_to_the_same_bits(tmp_path: Path, name: str) -> None:
    options = OPTIONS.replace(checkpoint_every=2)
    begin(tmp_path / "whole", name, options)
    begin(tmp_path / "half", name, options.replace(steps=4))
    found = go_on(tmp_path / "half")
    assert equal(model_of(tmp_path / "half"), model_of(tmp_path / "whole")) or found.moves
    expected = model_of(tmp_path / "whole")
    assert max(float((w - expected[n]).abs().max()) for n, w in model_of(tmp_path / "half").items()) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw", "easgd", "easgd-sync", "hetpipe"])
def test_a_plan_without_a_flush_is_drained_where_it_is_saved(tmp_path: Path, name: str) -> None:
    options, count = OPTIONS.replace(checkpoint_every=2), 2 if name == "pipedream-2bw" else None
    done, note = begin(tmp_path / "whole", name, options, microbatches=count)
    assert done.program.plan.steps == 2
    assert "checkpoints every 2 steps: each one drains the pipeline" in note
    begin(tmp_path / "half", name, options.replace(steps=4), microbatches=count)
    go_on(tmp_path / "half", microbatches=count)
    assert equal(model_of(tmp_path / "half"), model_of(tmp_path / "whole"))


def test_flushed_updates_are_counted_through_the_run() -> None:
    plan = preset("pipedream").at(workers=2, samples=3)
    flushed, options = plan.replace(version=plan.version.replace(flushed_updates=4)), OPTIONS.replace(steps=8)
    for start, left in ((0, 4), (3, 1), (4, 0)):
        program = plan_run(options, flushed, start=RunStart(step=start)).program
        assert (program.plan.num_flushed, program.plan.steps) == (left, 8 - start)
        assert is_same_plan(flushed, program.plan)
    with pytest.raises(InputError, match="holds together with all others; leave --checkpoint-every 2 out"):
        plan_run(options.replace(checkpoint_every=2), flushed)


def test_a_run_that_is_whole_has_nothing_left_to_do(runs: Path) -> None:
    resumed = reopen(str(runs / "whole"), RankGroup(), lambda _: None)
    assert resumed is not None
    assert resumed.is_done(resumed.options(OPTIONS, set()))
    assert not resumed.is_done(resumed.options(OPTIONS.replace(steps=9), {"steps"}))


def test_a_run_that_was_ended_before_it_left_its_weights_takes_them_from_its_checkpoint(
    runs: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(runs / "whole", tmp_path / "late"))
    (folder / "model.safetensors").unlink()
    resumed = reopen(str(folder), RankGroup(), lambda _: None)
    assert resumed is not None
    assert (resumed.start.step, resumed.start.samples) == (6, 72)
    assert resumed.is_done(resumed.options(OPTIONS, set()))
    assert equal(model_of(folder), model_of(runs / "whole"))
    assert CheckpointDir(folder / "checkpoints").steps() == [4, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 3}, "was started with seed 0, not 3; leave it as it was"),
        ({"model": "vgg-tiny"}, "was started with model mlp, not vgg-tiny"),
        ({"optimizer": "sgd"}, "was started with optimizer adamw, not sgd"),
        ({"keeps_log": True}, "--audit replays a run from its beginning; leave it out with --resume"),
    ],
)
def test_what_cannot_change_is_refused(half: Path, changes, message) -> None:
    resumed = reopen(str(half), RankGroup(), lambda _: None)
    assert resumed is not None
    with pytest.raises(InputError, match=message):
        resumed.options(OPTIONS.replace(**changes), set(changes))


def test_a_launcher_that_repeats_its_command_continues_without_an_audit(half: Path) -> None:
    resumed = reopen(str(half), RankGroup(), lambda _: None)
    assert resumed is not None
    asked = OPTIONS.replace(keeps_log=True)
    with pytest.raises(InputError, match="--audit replays a run from its beginning; leave it out with --resume"):
        resumed.options(asked, {"audit"})  # the name of the option, as the command line passes it
    assert not resumed.options(asked, {"audit"}, is_launched=True).keeps_log


def test_what_may_change_changes_and_all_else_stays(half: Path) -> None:
    resumed = reopen(str(half), RankGroup(), lambda _: None)
    assert resumed is not None
    assert resumed.known is not None
    asked = TrainOptions(model="mlp", steps=20, lr=0.5, seed=7)
    found = resumed.options(asked, {"steps", "lr", "plan", "workers"})
    assert found == resumed.known.options.replace(steps=20, lr=0.5)


def test_a_folder_without_a_run_begins_one(tmp_path: Path) -> None:
    told: list[str] = []
    assert reopen(str(tmp_path / "none"), RankGroup(), told.append) is None
    assert told == [f"{tmp_path / 'none'} holds no run: training begins"]


def test_a_run_without_a_checkpoint_begins_again(half: Path) -> None:
    shutil.rmtree(half / "checkpoints")
    told: list[str] = []
    resumed = reopen(str(half), RankGroup(), told.append)
    assert resumed is not None
    assert resumed.start == RunStart()
    assert (str(resumed), told) == (f"{half} holds no checkpoint: training begins", [])


def test_a_broken_checkpoint_is_named_and_the_one_before_it_continues(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "whole", tmp_path / "broken"))
    part = folder / "checkpoints" / "step-6" / "part-00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-5] ^= 4
    part.write_bytes(data)
    told: list[str] = []
    resumed = reopen(str(folder), RankGroup(), told.append)
    assert resumed is not None
    assert (resumed.start.step, resumed.start.samples) == (4, 48)
    assert told[0].startswith("checkpoint step-6 cannot be used and is set aside as step-6.bad: tensor '")
    assert (str(resumed), told[1:]) == ("training goes on after step 4", [])
    assert CheckpointDir(folder / "checkpoints").steps() == [4]


@pytest.mark.parametrize(
    ("name", "steps", "every", "near"), [("pipedream", 100, 30, 25), ("parameter-server", 7, 3, 1)]
)
def test_an_interval_that_does_not_divide_a_run_without_a_flush_is_refused(name, steps, every, near) -> None:
    options = OPTIONS.replace(steps=steps, checkpoint_every=every)
    with pytest.raises(InputError, match=f"cannot be divided by --checkpoint-every {every}; use {near}, or change"):
        plan_run(options, preset(name).at(workers=2, samples=3))


@pytest.mark.slow
def test_a_long_run_is_saved_as_often_as_pays() -> None:
    options, _, note = plan_run(OPTIONS.replace(steps=10**7), preset("1f1b").at(workers=2, samples=3, microbatches=2))
    assert options.checkpoint_every is not None
    assert 1 < options.checkpoint_every < 10**7
    assert note.startswith(f"checkpoints every {options.checkpoint_every} steps, about ")
    assert "(Young and Daly, for a failure a day and " in note


# The order of samples.


@given_values(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_no_sample_is_repeated_or_left_out_however_often_the_plan_changes(plans) -> None:
    """Each (microbatches, samples, updates) trains a while; the samples of all are those of the data, in its order."""
    update, seen = 0, []
    for microbatches, samples, updates in plans:
        _, order = prepare(OPTIONS, (samples,) * microbatches)
        order.start(update, len(seen))
        for number in range(update * microbatches, (update + updates) * microbatches):
            seen += order.numbers(number)
        update += updates
        assert order.samples(update) == len(seen)
    torch.set_default_dtype(torch.float32)
    assert seen == list(range(len(seen)))


# Real processes and real signals.

SMALL = ("zoo:mlp", "--data", "random:64", "--samples", "3", "--lr", "0.01", "--plan", "preset:1f1b")
RUN = ("train", *SMALL, "--workers", "2", "--microbatches", "2", "--run-dir", "run", "--steps", "40")
RESUME = ("train", "zoo:mlp", "--run-dir", "run", "--resume", "--json")
COMMAND = (sys.executable, "-m", "pipedejavu")


def wait_for_step(process, folder: Path, step: int) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        time.sleep(0.02)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    """The weights of the run that nothing happens to, whose workers are threads."""
    options = TrainOptions(model="mlp", data="random:64", lr=0.01, steps=40)
    options, program, _ = plan_run(options, preset("1f1b").at(workers=2, samples=3, microbatches=2))
    torch.set_num_threads(1)
    outcome = run_threads(program, *prepare(options, program.sizes), rounds=options.steps)
    return result_of(program, outcome.weights)


def test_sigterm_saves_and_stops_and_the_run_continues(processes, tmp_path: Path, undisturbed) -> None:
    slow = "time.sleep(0.05)"  # so that there is a middle
    (tmp_path / "faulty.py").write_text("import time\n" + FAULTY.format(inputs=slow, targets="pass", send="pass"))
    command = (sys.executable, "-c", MAIN, *RUN, "--checkpoint-every", "1000")
    process = processes.start(command, tmp_path, is_leader=True)
    wait_for_step(process, tmp_path, 3)
    process.send_signal(signal.SIGTERM)
    code, _, err = processes.finish(process)
    assert code == 143, err
    (step,) = CheckpointDir(tmp_path / "run" / "checkpoints").steps()
    assert 3 <= step < 40
    said = f"pipedejavu: stopped by SIGTERM; the run is saved up to step {step}, and --resume goes on from there\n"
    assert err.endswith(said)
    assert "Traceback" not in err
    wait_until_nobody_is_left(process.pid)
    code, out, err = processes.run((*COMMAND, *RESUME), tmp_path)
    assert code == 0, err
    assert json.loads(out)["steps"] == 40
    assert f"pipedejavu: training goes on after step {step}\n" in err
    assert steps_in(tmp_path / "run") == [*range(1, 41)]
    assert equal(model_of(tmp_path / "run"), undisturbed)


KILLS = {
    "forward": ("targets", "if rank == 1 and n == 31: os.kill(os.getpid(), signal.SIGKILL)"),
    "load": ("inputs", "if rank == 0 and n == 31: os.kill(os.getpid(), signal.SIGKILL)"),
    "send": ("send", "if rank == 1 and key[0] == 'g' and os.path.exists('run/checkpoints/step-10'):"
             " os.kill(os.getpid(), signal.SIGKILL)"),
}  # fmt: skip


@pytest.mark.parametrize("phase", ["forward", *(pytest.param(p, marks=pytest.mark.slow) for p in ("load", "send"))])
def test_a_worker_that_is_killed_loses_no_more_than_an_interval(processes, tmp_path: Path, undisturbed, phase) -> None:
    place, fault = KILLS[phase]
    places = {"inputs": "pass", "targets": "pass", "send": "pass", place: fault}
    (tmp_path / "faulty.py").write_text(FAULTY.format(**places))
    command = (sys.executable, "-c", MAIN, *RUN, "--checkpoint-every", "5")
    code, _, err = processes.run(command, tmp_path)
    assert code == 1
    died = 0 if phase == "load" else 1
    said = f"worker {died} was ended by SIGKILL (the system may have run out of memory); all others were stopped"
    assert "Traceback" not in err
    last = CheckpointDir(tmp_path / "run" / "checkpoints").steps()[-1]
    done = steps_in(tmp_path / "run")
    assert err.endswith(f"pipedejavu: {said}; --resume goes on after step {last}\n")
    code, _, err = processes.run((*COMMAND, *RESUME), tmp_path)
    assert code == 0, err
    assert max(done) - last < 10  # an interval, and what was trained while its checkpoint was being written
    assert steps_in(tmp_path / "run") == [*range(1, 41)]
    assert equal(model_of(tmp_path / "run"), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_everything_killed_at_any_time_continues_to_the_same_weights(processes, tmp_path, undisturbed, seed) -> None:
    """The launcher or all at once, at a moment that nobody chose, again and again, until the run is whole."""
    luck = random.Random(seed)
    for attempt in range(20):
        command = (*COMMAND, *RUN, "--checkpoint-every", "3", "--resume", "--json")
        process = processes.start(command, tmp_path, is_leader=True)
        try:
            code = process.wait(timeout=luck.uniform(1.0, 8.0) if attempt < 4 else 120)
        except Exception:
            if luck.random() < 0.5:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            process.wait()
            wait_until_nobody_is_left(process.pid)
            continue
        assert code == 0, process.stderr.read()
        break
    assert steps_in(tmp_path / "run") == [*range(1, 41)]
    assert equal(model_of(tmp_path / "run"), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["0", "1"])
def test_under_torchrun_a_run_continues_by_itself(processes, tmp_path: Path, undisturbed, killed: str) -> None:
    fault = "if n == 31 and not int(os.environ['TORCHELASTIC_RESTART_COUNT']): os.kill(os.getpid(), signal.SIGKILL)"
    places = {"inputs": "pass", "send": "pass", "targets": "pass"}
    places["inputs" if killed == "0" else "targets"] = fault
    start = "\nfrom pipedejavu.cli.main import main\npatch(int(os.environ['RANK']))\nmain()\n"
    (tmp_path / "faulty.py").write_text(FAULTY.format(**places) + start)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2")
    more = ("--checkpoint-every", "5", "--resume", "--json")
    command = (*torchrun, "--nproc-per-node", "2", "faulty.py", *RUN, *more)
    code, out, err = processes.run(command, tmp_path)
    assert code == 0, err
    assert json.loads(out)["steps"] == 40
    assert "pipedejavu: training goes on after step " in err
    assert steps_in(tmp_path / "run") == [*range(1, 41)]
    assert equal(model_of(tmp_path / "run"), undisturbed)


def test_a_full_disk_does_not_stop_a_run(processes, tmp_path: Path, undisturbed) -> None:
    full = "\nimport errno\n" + FAULTY
    full = full.replace(
        "def patch(rank):\n",
        "def patch(rank):\n    write = os.write\n    def refuse(file, data):\n        if len(data) > 100_000 and"
        " not os.path.exists('run/checkpoints/step-30.tmp'): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "        return write(file, data)\n    os.write = refuse\n",
    )
    (tmp_path / "faulty.py").write_text(full.format(inputs="pass", targets="pass", send="pass"))
    command = (sys.executable, "-c", MAIN, *RUN, "--checkpoint-every", "10")
    code, _, err = processes.run(command, tmp_path)
    assert code == 0, err
    said = [line for line in err.splitlines() if line.startswith("pipedejavu: the checkpoint of step")]
    assert [line.split(" was not saved: ")[0].rpartition(" ")[2] for line in said] == ["10", "20", "40", "40"]
    assert said[2].endswith("; trying for 10 s")  # the last one has no next one
    assert all("No space left on device (worker " in line for line in said)
    assert said[0].endswith("training goes on, and there is none yet")
    assert said[3].endswith("; the last one is of step 30")
    folder = RunFolder(tmp_path / "run")
    assert folder.checkpoint_dir.steps() == [30]
    assert not list(folder.checkpoint_dir.path.glob("*.tmp"))
    assert equal(model_of(tmp_path / "run"), undisturbed)
