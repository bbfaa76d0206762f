"""Faults of real processes: a worker that raises, dies, reads what it should not, or is interrupted."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

SMALL = ("zoo:mlp", "--data", "random:64", "--samples", "3", "--optimizer", "sgd", "--lr", "0.01")
RUN = ("train", *SMALL, "--plan", "preset:1f1b", "--workers", "2", "--microbatches", "2", "--run-dir", "run")

# A worker that is patched before it starts, here and in each process that is spawned.
FAULTY = '''
import os, signal
import torch
from pipedejavu.engine.rank_wire import RankWire
from pipedejavu.launch import launch, worker
from pipedejavu.runtime.memory_group import MemoryGroup
from pipedejavu.source.task import SampleOrder

def patch(rank):
    """Changes what this rank does at microbatch 5, which is in step 3."""
    inputs, targets, send = SampleOrder.inputs, SampleOrder.targets, RankWire.send
    reduce_scatter = MemoryGroup.reduce_scatter
    def faulty_inputs(self, n):
        x = inputs(self, n)
        {inputs}
        return x
    def faulty_targets(self, n):
        {targets}
        return targets(self, n)
    def faulty_send(self, tensors, to, key):
        {send}
        return send(self, tensors, to, key)
    def faulty_sum(self, vector):
        self.count = getattr(self, "count", 0) + 1
        # a fault of a scattered sum
        return reduce_scatter(self, vector)
    SampleOrder.inputs, SampleOrder.targets, RankWire.send = faulty_inputs, faulty_targets, faulty_send
    MemoryGroup.reduce_scatter = faulty_sum

def work(rank, size, launched):
    patch(rank)
    worker.work(rank, size, launched)

launch.work = work
'''
MAIN = "import faulty; from pipedejavu.cli.main import main; main()"


def run_faulty(processes, folder: Path, *more: str, **places: str) -> tuple[int, str]:
    """Trains with a fault in its place; returns the exit code and what the user sees."""
    scatter = places.pop("scatter", "pass")
    code = FAULTY.format(**dict.fromkeys(("inputs", "targets", "send"), "pass") | places)
    code = code.replace("# a fault of a scattered sum", scatter)
    (folder / "faulty.py").write_text(code)
    steps = ("--steps", "1000")
    found, out, err = processes.run((sys.executable, "-c", MAIN, *RUN, *steps, *more), folder)
    assert out == ""
    return found, err


@pytest.mark.parametrize(
    ("place", "fault", "rank"),
    [
        ("targets", "if rank == 1 and n == 5: raise KeyError('the broken sample')", 1),
        pytest.param(
            "send", "if rank == 0 and key[1:] == (0, 3): raise KeyError('the broken sample')", 0, marks=pytest.mark.slow
        ),
    ],
    ids=["where it computes", "where it sends"],
)
def test_a_worker_that_raises_shows_its_traceback_and_stops_all(processes, tmp_path, place, fault, rank) -> None:
    code, err = run_faulty(processes, tmp_path, **{place: fault})
    assert code == 1
    assert "Traceback" in err
    assert "KeyError: 'the broken sample'" in err
    assert err.endswith(f"\npipedejavu: worker {rank} raised KeyError; all others were stopped\n")
    assert err.count("Traceback") == 1


@pytest.mark.slow  # with a checkpoint behind it, it is named in test_resume
def test_a_worker_that_is_killed_is_named_with_the_signal(processes, tmp_path) -> None:
    code, err = run_faulty(processes, tmp_path, targets="if rank == 1 and n == 5: os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 1
    assert err.endswith(
        "pipedejavu: worker 1 was ended by SIGKILL (the system may have run out of memory); all others were stopped\n"
    )
    assert "Traceback" not in err


def test_a_worker_that_dies_inside_a_collective_is_named_and_the_others_end(processes, tmp_path) -> None:
    """It is killed when the others have sent their parts of a scattered sum; what was saved before stays."""
    dies = "if rank == 1 and self.count == 40: os.kill(os.getpid(), signal.SIGKILL)"
    code, err = run_faulty(
        processes, tmp_path, "--plan", "preset:zero-3", "--microbatches", "1", "--checkpoint-every", "2", scatter=dies
    )
    assert code == 1
    assert "worker 1 was ended by SIGKILL" in err
    assert "all others were stopped" in err
    assert "Traceback" not in err
    assert any((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("fault", "form"),
    [
        ("x = x.repeat(1, 2) if n == 5 else x", "1568 float32 where those before it were 784 float32"),
        pytest.param(
            "x = x.double() if n == 5 else x",
            "784 float64 where those before it were 784 float32",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["shape", "dtype"],
)
def test_a_batch_of_another_form_is_refused(processes, tmp_path, fault, form) -> None:
    code, err = run_faulty(processes, tmp_path, inputs=fault)
    assert code == 2
    assert err.endswith(
        f"pipedejavu: the inputs of microbatch 5 are {form}; give all batches one shape and one dtype\n"
    )
    assert "Traceback" not in err


def test_a_loss_that_is_no_number_stops_with_step_and_worker(processes, tmp_path) -> None:
    code, err = run_faulty(processes, tmp_path, inputs="x = x * float('nan') if n == 5 else x")
    assert code == 2
    assert "pipedejavu: the loss is nan in step 3, microbatch 5, on worker 1; lower the learning rate" in err
    assert "Traceback" not in err


def test_a_loss_that_is_no_number_can_be_skipped(processes, tmp_path) -> None:
    (tmp_path / "faulty.py").write_text(
        FAULTY.format(inputs="x = x * float('nan') if n == 5 else x", targets="pass", send="pass")
    )
    more = ("--steps", "5", "--on-nan", "skip", "--json")
    code, out, err = processes.run((sys.executable, "-c", MAIN, *RUN, *more), tmp_path)
    assert code == 0, err
    assert (json.loads(out)["steps"], json.loads(out)["steps_skipped"]) == (5, 1)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert [loss is None for loss in losses] == [False, False, True, False, False]
    assert [row["skipped"] for row in rows if "skipped" in row] == [3]
    assert "the update of step 3 was left out: " in (tmp_path / "run" / "report.html").read_text()
    assert all(bool(w.isfinite().all()) for w in load_file(tmp_path / "run" / "model.safetensors").values())


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        ("1f1b", "1000000"),
        pytest.param("pipedream", "800", marks=pytest.mark.slow),  # one program over all steps, watched while it runs
    ],
)
def test_an_interrupt_stops_all_and_leaves_what_was_saved(processes, tmp_path, plan, steps) -> None:
    sizes = ("--workers", "2", "--run-dir", "run", "--steps", steps)
    command = (sys.executable, "-m", "pipedejavu", "train", *SMALL, "--plan", f"preset:{plan}", *sizes)
    process = processes.start(command, tmp_path, is_leader=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all at once
    code, _, err = processes.finish(process)
    assert code == 130
    assert err.endswith("stopped; the metrics so far are in run\n")
    assert "Traceback" not in err
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    assert next(row["step"] for row in rows if "step" in row) == 1
    wait_until_nobody_is_left(process.pid)


def wait_until_nobody_is_left(group: int) -> None:
    """Returns once a group has no process any more; whoever stays lets the test run into its timeout."""
    with suppress(ProcessLookupError):
        while True:
            os.killpg(group, 0)
            time.sleep(0.05)


def test_a_rank_of_torchrun_that_raises_stops_the_others(processes, tmp_path) -> None:
    code = FAULTY.format(
        inputs="pass", targets="if rank == 1 and n == 5: raise KeyError('the broken sample')", send="pass"
    )
    start = "\nfrom pipedejavu.cli.main import main\npatch(int(os.environ['RANK']))\nmain()\n"
    (tmp_path / "faulty.py").write_text(code + start)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    found, _, err = processes.run((*torchrun, "faulty.py", *RUN, "--steps", "1000"), tmp_path)
    assert found == 1
    assert "KeyError: 'the broken sample'" in err
    assert "pipedejavu: worker 1 raised KeyError" in err
