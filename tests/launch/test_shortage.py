"""Devices that run out of memory: what the user is told, and the plan that the run goes on with."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.engine.handlers import Handlers
from pipedejavu.facts import InputError, format_bytes
from pipedejavu.health import WorkerError
from pipedejavu.health.failure import ShortageError, is_shortage, read_failure, write_failure
from pipedejavu.launch import launch, plan_run, train, worker
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.replan import relieve
from pipedejavu.program import compile as compile_plan
from pipedejavu.run import RunFolder, TrainOptions
from pipedejavu.session import Trainer
from pipedejavu.simulate import simulate
from tests.planner.test_replan import OPTIONS, reference
from tests.search.case import machine, profile

SHORT = OPTIONS.replace(steps=6, checkpoint_every=2, replan=False)
MIB = 2**20


def program_of(workers: int, room: int):
    """Replicas of four units with 10 MiB of weights, 10 of gradients and 20 of optimizer state each."""
    model = profile([1e-3] * 4, weights=10 * MIB, saved=1.0, optimizer=2)
    plan = preset("ddp").at(workers=workers, microbatches=2, samples=4)
    return compile_plan(plan, model, machine(["fast"] * workers, room=room), fold=False)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_errors_that_say_that_memory_is_short_are_known(error: Exception) -> None:
    assert is_shortage(error)
    assert not is_shortage(RuntimeError("shapes differ"))


def test_a_worker_that_runs_out_of_memory_says_what_it_had() -> None:
    store = torch.distributed.HashStore()
    write_failure(store, 1, ShortageError(1, 7 * MIB))
    write_failure(store, 0, KeyError("a later one"))
    found = read_failure(store, [None, 1])
    assert isinstance(found, ShortageError)
    assert (found.worker, found.found_bytes) == (1, 7 * MIB)


def test_what_an_allocator_would_not_get_through_is_not_begun(tmp_path: Path) -> None:
    # Weights of 3 MiB with their gradient, two moments and an update's copies: 18 MiB, in a segment of 20.
    model = profile([1e-3], weights=3 * MIB, saved=0.0, boundary=0.0, update_s=1e-3)
    model = model.replace(units=(model.units[0].replace(parameter_parts=(3 * MIB,)),))
    plan = preset("ddp").at(workers=1, microbatches=1, samples=1)
    program = compile_plan(plan, model, machine(["fast"], room=19 * MIB), fold=False)
    said = r"device 'gpu0' would reserve 20\.0 MiB for tensors of 18\.0 MiB, and the device has 19\.0 MiB; use more"
    with pytest.raises(InputError, match=said):
        train(SHORT, program, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=said):
        Trainer.__new__(Trainer)._start(program, None)


def test_a_device_that_has_less_than_it_says_gets_less_to_hold() -> None:
    program = program_of(workers=2, room=300 * MIB)
    forecast = simulate(program).workers[1].peak_bytes
    found = relieve(program, ShortageError(1, 100 * MIB))
    assert forecast > 160 * MIB
    needs = {name: worker.peak_bytes for worker in simulate_switch(found) for name in (worker.device,)}
    assert needs.get("gpu1", 0.0) <= 100 * MIB
    assert [d.memory_bytes for d in found.machine.devices] == [300 * MIB, 100 * MIB]
    said = (
        r"worker 1 on gpu1 ran out of memory: \d+\.\d MiB were forecast of 300\.0 MiB, and 100\.0 MiB were found; plan "
    )
    assert re.match(said + r"'.+' would fit \(\d+\.\d MiB on gpu\d, \d+ ms a step instead of \d+ ms\)$", found.reason)


def test_what_a_gpu_got_is_compared_with_what_was_to_be_reserved() -> None:
    model = profile([1e-3] * 2, weights=2 * MIB, update_s=1e-3)
    model = model.replace(units=tuple(unit.replace(parameter_parts=(2 * MIB,)) for unit in model.units))
    plan = preset("ddp").at(workers=2, microbatches=1, samples=1)
    program = compile_plan(plan, model, machine(["fast"] * 2, room=300 * MIB), fold=False)
    worker = simulate(program).workers[1]
    between = int(worker.peak_bytes + worker.reserved_bytes) // 2
    found = relieve(program, ShortageError(1, between))
    assert found.machine.devices[0].memory_bytes == 300 * MIB  # forecasts were not too low
    assert f" {format_bytes(worker.reserved_bytes)} were forecast of 300.0 MiB, and " in found.reason


def simulate_switch(switch):
    return simulate(compile_plan(switch.plan, switch.profile, switch.machine, fold=False)).workers


def test_where_forecasts_are_too_low_all_devices_of_a_kind_get_less_to_hold() -> None:
    program = program_of(workers=2, room=300 * MIB)
    forecast = simulate(program).workers[1].peak_bytes
    found = relieve(program, ShortageError(1, 300 * MIB))
    assert [d.memory_bytes for d in found.machine.devices] == [round(0.9 * forecast)] * 2
    assert all(worker.peak_bytes <= 0.9 * forecast for worker in simulate_switch(found))


def test_where_no_plan_fits_the_smallest_change_is_told() -> None:
    program = program_of(workers=1, room=300 * MIB)
    with pytest.raises(WorkerError, match=r"10\.0 MiB were found; no plan for test .* this would fit: .* more memory"):
        relieve(program, ShortageError(0, 10 * MIB))


def work_capped(rank: int, size: int, launched: worker.WorkerLaunch) -> None:
    """A worker whose device has so many bytes, and notices in the fourth update whether its program fits them."""
    name, cap = json.loads(os.environ["CAP"])
    forward = Handlers.forward

    def capped(self, a):
        is_due = self.program.devices[self.index] == name and self.first_version == 3
        if is_due and simulate(self.program).workers[self.index].peak_bytes > cap:
            while not RunFolder(launched.run_dir).checkpoint_dir.steps():  # the test's timeout ends a wait in vain
                time.sleep(0.01)
            raise torch.OutOfMemoryError("the cap is reached")
        forward(self, a)

    Handlers.forward = capped
    worker.work(rank, size, launched)


def run_capped(folder: Path, monkeypatch, options: TrainOptions):
    options, program, _ = plan_run(options, preset("ddp").at(workers=2, microbatches=2, samples=3))
    forecast = simulate(program).workers[1].peak_bytes
    monkeypatch.setattr(launch, "work", work_capped)
    monkeypatch.setenv("CAP", json.dumps(["cpu1", 0.95 * forecast]))
    return train(options, program, str(folder))


def test_a_run_that_is_to_stop_says_which_plan_would_fit(tmp_path: Path, monkeypatch) -> None:
    said = (
        r"worker 1 on cpu1 ran out of memory: .+ were forecast of .+, and .+ were found; plan '.+' would fit \(.+\);"
        r" --resume --on-oom replan goes on with such a plan$"
    )
    with pytest.raises(WorkerError, match=said):
        run_capped(tmp_path / "run", monkeypatch, SHORT)


@pytest.mark.slow
def test_a_run_that_may_replan_continues_from_its_last_checkpoint(tmp_path: Path, monkeypatch, capfd) -> None:
    done = run_capped(tmp_path / "run", monkeypatch, SHORT.replace(on_oom="replan"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (switched,) = (row for row in rows if "switched" in row)
    assert (switched["switched"], switched["before"], switched["plan"]) == (2, "ddp", done.program.plan.name)
    assert "worker 1 on cpu1 ran out of memory" in switched["reason"]
    assert f"plan '{done.program.plan.name}' would fit" in capfd.readouterr().err
    assert [row["step"] for row in rows if "step" in row] == [1, 2, 3, 4, 5, 6]
    expected, found = reference(SHORT), load_file(tmp_path / "run" / "model.safetensors")
    # As for 40 updates, of which these are 6: an error grows by 1.1 in each, 1.8 times at most.
    assert max(float((found[n] - w).abs().max()) for n, w in expected.items()) < 6 * 0.01 * 12 * 2.3e-16 * 1.8


CAPPED = """
import os
from types import SimpleNamespace
import tests.launch.test_shortage as capped
from pipedejavu.cli.main import main
from pipedejavu.launch import worker

worker.work = lambda *_: None
capped.work_capped(int(os.environ["RANK"]), 2, SimpleNamespace(run_dir="run"))
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("on_oom", ["stop", "replan"])
def test_ranks_of_torchrun_take_a_plan_that_fits_when_they_are_started_again(tmp_path, processes, on_oom) -> None:
    (tmp_path / "capped.py").write_text(CAPPED)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1")
    given = ("--data", "random:64", "--optimizer", "sgd", "--lr", "0.01", "--steps", "6", "--checkpoint-every", "2")
    sizes = ("--plan", "preset:ddp", "--microbatches", "2", "--samples", "3", "--on-oom", on_oom)
    root = Path(__file__).parents[2]
    _, program, _ = plan_run(SHORT, preset("ddp").at(workers=2, microbatches=2, samples=3))
    cap = 0.95 * simulate(program).workers[1].peak_bytes / 2  # of float32
    more = {"CAP": json.dumps(["cpu1", cap]), "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    command = (*torchrun, "capped.py", "train", "zoo:mlp", *given, *sizes, "--run-dir", "run", "--resume")
    code, _, err = processes.run(command, tmp_path, **more)
    assert "pipedejavu: worker 1 on cpu1 ran out of memory: " in err
    assert (code == 0) == (on_oom == "replan"), err
    if on_oom == "stop":
        assert err.count("would fit") == 2  # it was started again with the same plan
        return
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (switched,) = (row for row in rows if "switched" in row)
    assert switched["switched"] == 2
    assert Plan.load(tmp_path / "run" / "plan.json").name == switched["plan"] != "ddp"
    assert [row["step"] for row in rows if "step" in row] == [1, 2, 3, 4, 5, 6]
