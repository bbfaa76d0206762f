"""Runs that change their plan while they train: when the planner is asked, what it is told, and what comes of it."""

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.engine import run_threads
from pipedejavu.engine.handlers import Handlers
from pipedejavu.facts import Cost, InputError
from pipedejavu.launch import PlannedRun, launch, plan_run, train, worker
from pipedejavu.plan import Place, Plan, preset
from pipedejavu.planner import replan as replan_module
from pipedejavu.planner.replan import Replanner, find_switch, switch_s, with_measured
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.run import TrainOptions
from pipedejavu.run import throughput as pace_module
from pipedejavu.run.run_folder import result_of
from pipedejavu.run.throughput import (
    LEAST_BAND,
    MOST_BAND,
    SPREADS,
    WINDOW,
    RoundTimes,
    ThroughputMonitor,
    band_of,
    times_of,
)
from pipedejavu.simulate import simulate
from pipedejavu.source.task import prepare
from tests.search.case import machine, profile

OPTIONS = TrainOptions(model="mlp", data="random:64", dtype="float64", optimizer="sgd", lr=0.01, steps=40, replan=True)


def program_of(name: str = "ddp", **sizes: int) -> Program:
    """Four units of 3 ms a sample, forward and backward, on two like devices."""
    plan = preset(name).at(**{"workers": 2, "microbatches": 2, "samples": 4, **sizes})
    return compile_plan(plan, profile([1e-3] * 4), machine(["fast", "fast"]), fold=False)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch) -> None:
    monkeypatch.setattr(pace_module, "WINDOW_S", 0.0)


def paced(pace: ThroughputMonitor, *slowdowns: float, rounds: int = WINDOW) -> ThroughputMonitor:
    for rank, slowdown in enumerate(slowdowns):
        pace.take(
            rank, [RoundTimes(0.1, {kind: slowdown * time_s for kind, time_s in pace.forecast[rank].items()})] * rounds
        )
    return pace


def test_passes_count_and_nothing_else_does() -> None:
    program = program_of()
    spans = [span for span in simulate(program).timeline().spans() if span.worker == 0]
    assert {span.action[0] for span in spans} > {"F", "B"}
    # Two microbatches of four samples on each replica: 4 ms forward and 8 ms backward for a sample.
    assert times_of(spans) == pytest.approx({"F": 0.032, "B": 0.064})


@pytest.mark.parametrize(
    ("spreads", "band"), [((0.0,) * 4, LEAST_BAND), ((0.1, 0.1, 0.3, 0.3), SPREADS * 0.2), ((0.5,) * 4, MOST_BAND)]
)
def test_the_band_is_the_profiles_spread_within_limits(spreads: tuple[float, ...], band: float) -> None:
    program = program_of()
    units = []
    for unit, spread in zip(program.profile.units, spreads, strict=True):
        own = unit.times["fast"]
        cost = {"forward": own.forward.replace(spread=spread), "backward": own.backward.replace(spread=spread)}
        units.append(unit.replace(times={"fast": own.replace(**cost)}))
    wide = replace(program, profile=program.profile.replace(units=tuple(units)))
    assert band_of(wide, 0) == pytest.approx(1 + band)


def test_one_slow_round_is_no_slowdown_and_the_planner_receives_each_slowdown_once() -> None:
    pace = ThroughputMonitor(program_of())
    assert paced(pace, 1.0, 9.0, rounds=WINDOW - 1).departure() is None  # too few
    assert paced(pace, 1.0, 1.1, rounds=3).departure() is None  # the median of five
    assert paced(pace, 1.1, 3.0).departure() == pytest.approx([1.1, 3.0])
    assert paced(pace, 1.2, 3.3).departure() is None  # as it was
    assert paced(pace, 1.1, 1.0).departure() == pytest.approx([1.1, 1.0])  # well again


def test_a_straggler_is_named_once_with_what_is_slow() -> None:
    pace = paced(ThroughputMonitor(program_of()), 1.1, 3.3)
    (found,) = pace.stragglers()
    assert str(found) == ("worker 1 on gpu1 is a straggler: F 3.3 and B 3.3 times as long as forecast, its peers 1.1")
    assert paced(pace, 1.1, 3.3).stragglers() == []
    assert paced(pace, 1.1, 1.0).stragglers() == []
    assert [straggler.worker for straggler in paced(pace, 5.0, 1.0).stragglers()] == [0]


def test_short_rounds_count_for_some_seconds(monkeypatch) -> None:
    monkeypatch.setattr(pace_module, "WINDOW_S", 5.0)
    pace = ThroughputMonitor(program_of())
    assert paced(pace, 1.0, 1.0, rounds=49).slowdowns() is None  # of 100 ms
    assert paced(pace, 1.0, 1.0, rounds=2).slowdowns() == pytest.approx([1.0, 1.0])
    for rank in range(2):
        pace.take(rank, [RoundTimes(2.0, {"F": 1.0})] * WINDOW)
    assert pace.slowdowns() == pytest.approx([1.0 / 0.096] * 2)  # ten seconds: the others are forgotten


def test_if_all_are_slower_than_forecast_there_is_no_straggler() -> None:
    pace = paced(ThroughputMonitor(program_of()), 3.0, 3.2)
    assert pace.stragglers() == []
    assert pace.departure() is not None


def test_a_moved_share_has_another_forecast() -> None:
    program = program_of()
    pace = paced(ThroughputMonitor(program), 1.0, 2.0)
    pace.expect(replace(program, parts=((3, 3), (5, 5))))
    assert pace.slowdowns() is None
    assert sum(pace.forecast[1].values()) == pytest.approx(0.12)


def test_each_device_is_as_many_times_slower_as_it_was_found_and_well_again_later() -> None:
    program = program_of()
    found, where = with_measured(program, [1.0, 3.0])
    assert [device.kind for device in where.devices] == ["fast", "fast@gpu1"]
    assert found.units[0].times["fast@gpu1"].backward.at(1) == pytest.approx(3 * 2e-3)
    slowed = replace(program, profile=found, machine=where)
    assert simulate(slowed).makespan_s == pytest.approx(3 * simulate(program).makespan_s)
    again, there = with_measured(slowed, [1.0, 1 / 3])
    assert [device.kind for device in there.devices] == ["fast", "fast@gpu1"]
    assert again.units[0].times["fast@gpu1"].backward.at(1) == pytest.approx(2e-3)


def test_a_switch_must_save_more_than_it_costs_and_more_than_forecasts_know() -> None:
    program = program_of()
    # 96 ms with equal shares; with one device three times slower 288 ms, and 12 + 4 samples take 144 ms.
    now_s, then_s = 0.288, 0.144
    enough = 1 + int(switch_s(program.profile) / (now_s - then_s))
    found = find_switch(program, [1.0, 3.0], enough)
    assert found is not None
    assert found.now_s == pytest.approx(now_s)
    assert found.then_s == pytest.approx(then_s)
    assert found.reason == (
        f"worker 1 on gpu1 takes 3.0 times its forecast: the run goes on under plan '{found.plan.name}', forecast"
        " 144 ms a step instead of 288 ms"
    )
    assert find_switch(program, [1.0, 3.0], enough - 2) is None
    assert find_switch(program, [1.0, 1.05], 10**6) is None
    assert find_switch(program, [2.0, 2.0], 10**6) is None  # slower, but nothing else is faster
    assert find_switch(program, [1.0, 3.0], 10**6, num_workers=3) is None


def test_an_idle_replica_gets_samples_again_when_rates_change() -> None:
    plan = preset("hyscale").plan.replace(place=Place(cpu_replicas=1))
    plan = plan.replace(feed=plan.feed.replace(samples=32, microbatches=1))
    speeds = profile([1e-3] * 4, {"fast": 1.0, "cpu": 0.03})
    program = compile_plan(plan, speeds, machine(["fast"], host_room=2**60), fold=False)
    assert program.parts == ((32,), ())  # one sample takes the CPU longer than all of them the GPU
    found = find_switch(program, [10.0, 1.0], 10**6)
    assert found is not None
    assert "so replica 1, idle so far, gets samples again: 25 + 7, forecast" in found.reason
    again = compile_plan(found.plan, found.profile, found.machine, fold=False)
    assert [sum(part) for part in again.parts] == [25, 7]
    assert found.then_s == pytest.approx(25 / 32 * found.now_s)
    assert find_switch(program, [1.5, 1.0], 10**6, num_workers=2) is None  # still faster without it
    forced = replace(program, plan=program.plan.replace(feed=program.plan.feed.replace(is_controlled=False)))
    assert find_switch(forced, [10.0, 1.0], 10**6, num_workers=5) is None


def test_the_planner_is_asked_beside_the_run_and_turns_it_once() -> None:
    switch = find_switch(program_of(), [1.0, 3.0], 10**6)
    assert switch is not None
    asked, turned, done = [], [], threading.Event()
    answers = iter([None, switch])

    def ask(slowdowns):
        asked.append(slowdowns)
        return next(answers)

    def turn(found):
        turned.append(found)
        done.set()

    pace = ThroughputMonitor(program_of())
    replanner = Replanner(pace, ask, turn)
    replanner.look()
    assert asked == []
    for slowdown in (2.0, 4.0):
        paced(pace, 1.0, slowdown)
        while len(asked) < slowdown / 2:  # the first answer keeps it from asking for a moment
            replanner.look()
    assert done.wait(60)
    assert [slowdowns[1] for slowdowns in asked] == pytest.approx([2.0, 4.0])
    assert turned == [switch]
    paced(pace, 9.0, 9.0)
    replanner.look()
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("more", "text"),
    [({"keeps_log": True}, "--audit replays one plan from its beginning"), ({"checkpoint_every": 0}, "takes none")],
)
def test_what_does_not_go_with_replan_is_refused(more: dict[str, object], text: str) -> None:
    with pytest.raises(InputError, match=text):
        plan_run(OPTIONS.replace(**more), preset("ddp").at(workers=2))


def test_a_plan_without_a_common_moment_is_not_switched() -> None:
    with pytest.raises(InputError, match="'hogwild' has no common moment to switch to another plan; use --no-replan"):
        plan_run(OPTIONS, preset("hogwild").at(workers=2))


UNIT_S = 0.002
"""What a pass takes for each unit and sample on a device that sleeps instead of computing."""


def work_asleep(rank: int, size: int, launched: worker.WorkerLaunch) -> None:
    """A worker on such a device; one of them becomes four times slower at a step."""
    # Whatever else the machine does makes noise, which is not to pay; a search is not to be the last one.
    replan_module.ASSUMED_START_S, replan_module.SEARCH_SHARE, replan_module.MARGIN = 0.0, 1.0, 0.3
    pace_module.WINDOW_S = 0.0
    slow, step = json.loads(os.environ["SLOW"])
    do = Handlers.do

    def later(self, a):
        if a.kind in ("F", "B", "I", "W", "R"):
            is_slow = self.program.devices[self.index] == slow and self.first_version >= step
            units, samples = len(self.program.pieces[a.piece].units), self.program.sizes[a.microbatch]
            time.sleep(UNIT_S * units * samples * (4 if is_slow else 1))
        do(self, a)

    Handlers.do = later
    worker.work(rank, size, launched)


def plan_asleep(options: TrainOptions, name: str, **sizes: int) -> PlannedRun:
    """Plans for devices that sleep, whose times are known."""
    found = plan_run(options, preset(name).at(**sizes))
    cost = Cost(per_sample_s=UNIT_S)
    passes = dict.fromkeys(("forward", "backward", "input_backward", "weight_backward", "recompute"), cost)
    program = found.program
    units = (unit.replace(times={"cpu": unit.times["cpu"].replace(**passes)}) for unit in program.profile.units)
    profile = program.profile.replace(units=tuple(units))
    return plan_run(options, program.plan, program.machine, profile=profile)


def reference(options: TrainOptions) -> dict[str, torch.Tensor]:
    """What one worker computes with the whole batch."""
    _, program, _ = plan_run(options, preset("ddp").at(workers=1, microbatches=1, samples=12))
    outcome = run_threads(program, *prepare(options, program.sizes), rounds=options.steps)
    return result_of(program, outcome.weights)


@pytest.mark.slow
def test_a_run_whose_worker_becomes_slow_continues_under_another_plan(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(launch, "work", work_asleep)
    monkeypatch.setenv("SLOW", json.dumps(["cpu1", 10]))
    options, program, _ = plan_asleep(OPTIONS, "ddp", workers=2, microbatches=2, samples=3)
    done = train(options, program, str(tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    switched = [row for row in rows if "switched" in row]
    assert switched[0]["before"] == "ddp"
    assert 10 < switched[-1]["switched"] < OPTIONS.steps
    assert switched[-1]["plan"] == done.program.plan.name
    assert switched[-1]["then_s"] < switched[-1]["before_s"]
    assert [row["step"] for row in rows if "step" in row] == list(range(1, OPTIONS.steps + 1))
    assert 1 in [row["straggler"] for row in rows if "straggler" in row]
    said = capfd.readouterr().err
    assert f"times its forecast: the run goes on under plan '{done.program.plan.name}', forecast " in said
    assert "pipedejavu: worker 1 on cpu1 is a straggler: F " in said
    assert sum(done.program.sizes) == 12
    expected, found = reference(OPTIONS), load_file(tmp_path / "run" / "model.safetensors")
    # An update adds 12 gradients below 1, in any order: lr times an ulp of each; a curvature of 10 makes an error grow
    # by (1 + 10 lr) in each of the 40 updates behind it, 46 times at most.
    assert max(float((found[n] - w).abs().max()) for n, w in expected.items()) < 40 * 0.01 * 12 * 2.3e-16 * 46


ASLEEP = """
import os, tests.planner.test_replan as asleep
from pipedejavu.cli.main import main
from pipedejavu.launch import worker

worker.work = lambda *_: None
asleep.work_asleep(int(os.environ["RANK"]), 2, "")
main()
"""


@pytest.mark.slow
def test_ranks_of_torchrun_switch_without_being_started_again(tmp_path: Path, processes) -> None:
    (tmp_path / "asleep.py").write_text(ASLEEP)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "asleep.py", "train", "zoo:mlp")
    given = (
        "--data",
        "random:64",
        "--optimizer",
        "sgd",
        "--lr",
        "0.01",
        "--steps",
        "40",
        "--run-dir",
        "run",
        "--replan",
    )
    sizes = ("--plan", "preset:ddp", "--microbatches", "2", "--samples", "3")
    root = Path(__file__).parents[2]
    paths = os.pathsep.join((str(root / "src"), str(root)))
    slow = {"SLOW": json.dumps(["cpu1", 15]), "PYTHONPATH": paths}
    code, _, err = processes.run((*torchrun, *given, *sizes), tmp_path, **slow)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    switched = [row for row in rows if "switched" in row]
    assert switched[0]["before"] == "ddp"
    assert [row["step"] for row in rows if "step" in row] == list(range(1, 41))
    assert Plan.load(tmp_path / "run" / "plan.json").num_workers == 2
    expected, found = reference(OPTIONS.replace(dtype="float32")), load_file(tmp_path / "run" / "model.safetensors")
    # As above, with the ulp of float32.
    assert max(float((found[n] - w).abs().max()) for n, w in expected.items()) < 40 * 0.01 * 12 * 1.2e-7 * 46
