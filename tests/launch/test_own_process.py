"""The only worker of a run in the process that planned it: the same run as in a process of its own."""

import gc
import json
import os
import re
import signal
import time
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch.distributed as dist
from safetensors.torch import load_file

from pipedejavu.engine.handlers import Handlers
from pipedejavu.facts import InputError
from pipedejavu.facts.start_phase import START
from pipedejavu.health import WorkerError
from pipedejavu.launch import audit_run, own_process, plan_run, train
from pipedejavu.launch.backend import RunSetup
from pipedejavu.launch.own_process import OwnProcessBackend, is_for_own_process
from pipedejavu.launch.run_session import RunSession
from pipedejavu.plan import preset
from pipedejavu.planner.replan import PlanSwitch
from pipedejavu.run import TrainOptions
from pipedejavu.run.run_folder import RunFolder
from pipedejavu.run.stop_signal import StoppedError
from pipedejavu.source import task as task_module
from pipedejavu.source.task import Prepared

OPTIONS = TrainOptions(
    model="mlp", data="random:64", dtype="float64", steps=4, checkpoint_every=2, lr=0.01, replan=False
)
PLAN = preset("ddp").at(workers=1, microbatches=2, samples=3)


def run(folder: Path, options: TrainOptions = OPTIONS):
    """Plans and trains with the only worker, a CPU, in this process."""
    prepared: list[Prepared] = []
    options, program, _ = plan_run(options, PLAN, prepared=prepared)
    assert not is_for_own_process(program)  # a CPU has a process of its own, for its number of threads
    backend = OwnProcessBackend(prepared[-1], is_forced=True)
    return RunSession(RunFolder(folder), backend, RunSetup(options, program, None)).train()


def rows_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_in_this_process_equals_one_in_its_own(tmp_path: Path, monkeypatch) -> None:
    state = torch.get_deterministic_debug_mode(), signal.getsignal(signal.SIGTERM)
    options = OPTIONS.replace(keeps_log=True)
    built: list[str] = []
    open_task = task_module.open_task
    monkeypatch.setattr(task_module, "open_task", lambda name, **more: built.append(name) or open_task(name, **more))
    here = run(tmp_path / "here", options)
    assert built == ["mlp"]  # once, for measuring, checking and training
    assert state == (torch.get_deterministic_debug_mode(), signal.getsignal(signal.SIGTERM))
    assert not dist.is_initialized()
    options, program, _ = plan_run(options, PLAN)
    there = train(options, program, str(tmp_path / "there"))
    weights, others = load_file(here.folder.model), load_file(there.folder.model)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in others)
    assert max(audit_run(here).values()) < 1e-12
    losses = [[row["loss"] for row in rows_of(tmp_path / name) if "loss" in row] for name in ("here", "there")]
    assert losses[0] == losses[1]


def test_the_metrics_of_a_run_say_where_the_time_before_the_first_update_went(tmp_path: Path) -> None:
    START.restart()
    run(tmp_path / "run", OPTIONS.replace(steps=2))
    (phases,) = (row["start"] for row in rows_of(tmp_path / "run") if "start" in row)
    assert isinstance(phases, dict)
    assert {"build", "cut", "check", "workers", "first update"} <= phases.keys()
    assert all(time_s >= 0 for time_s in phases.values())


def test_a_signal_saves_the_run_and_ends_it(tmp_path: Path, monkeypatch) -> None:
    forward = Handlers.forward

    def interrupted(self, action):
        if self.first_version == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        forward(self, action)

    monkeypatch.setattr(Handlers, "forward", interrupted)
    said = r"stopped by SIGTERM; the run is saved up to step (\d+), and --resume goes on from there"
    with pytest.raises(StoppedError, match=said) as raised:
        run(tmp_path / "run", OPTIONS.replace(steps=100))
    step = int(re.search(said, str(raised.value)).group(1))
    assert step < 100
    assert RunFolder(tmp_path / "run").checkpoint_dir.steps()[-1] == step
    assert not dist.is_initialized()


def test_a_shortage_of_memory_leads_to_a_smaller_plan_and_frees_what_the_worker_had(tmp_path, monkeypatch) -> None:
    forward, held = Handlers.forward, list[weakref.ref]()

    def short(self, action):
        if self.first_version == 3 and not held:
            held.append(weakref.ref(self))
            raise torch.OutOfMemoryError("the GPU is full")
        forward(self, action)

    def relieve(program, shortage, samples) -> PlanSwitch:
        plan = program.plan.replace(feed=program.plan.feed.replace(microbatches=6, samples=1))
        assert shortage.worker == 0
        return PlanSwitch(
            plan=plan, profile=program.profile, machine=program.machine, now_s=1, then_s=2, reason="short"
        )

    monkeypatch.setattr(Handlers, "forward", short)
    monkeypatch.setattr(own_process, "relieve", relieve)
    with pytest.raises(WorkerError, match=r"^short; --resume --on-oom replan goes on with such a plan$"):
        run(tmp_path / "stops")
    last_s = time.monotonic() + 30  # threads of lanes end by themselves
    while held[0]() is not None and time.monotonic() < last_s:
        time.sleep(0.05)
        gc.collect()
    assert held[0]() is None
    held.clear()
    done = run(tmp_path / "goes-on", OPTIONS.replace(on_oom="replan"))
    assert [row["step"] for row in rows_of(tmp_path / "goes-on") if "step" in row] == [1, 2, 3, 4]
    assert done.program.plan.feed.microbatches == 6


def test_an_error_of_the_worker_is_told_with_its_traceback(tmp_path: Path, monkeypatch) -> None:
    def broken(self, action):
        raise KeyError("a fault of ours")

    monkeypatch.setattr(Handlers, "forward", broken)
    with pytest.raises(WorkerError, match=r"(?s)Traceback.*a fault of ours.*\nworker 0 raised KeyError$"):
        run(tmp_path / "run")
    assert not dist.is_initialized()


def test_input_that_is_refused_stays_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"in step \d"):
        run(tmp_path / "run", OPTIONS.replace(lr=1e300, steps=30, optimizer="sgd", checkpoint_every=0))


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_algorithms_are_deterministic_unless_the_options_say_otherwise(tmp_path, monkeypatch, is_deterministic) -> None:
    forward, modes = Handlers.forward, set[str]()

    def noting(self, action):
        modes.add({0: "default", 1: "warn", 2: "error"}[torch.get_deterministic_debug_mode()])
        forward(self, action)

    monkeypatch.setattr(Handlers, "forward", noting)
    run(tmp_path / "run", OPTIONS.replace(steps=1, deterministic=is_deterministic))
    assert modes == {"warn" if is_deterministic else "default"}
