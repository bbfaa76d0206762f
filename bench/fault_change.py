"""Runs that go on under another plan by themselves: a slow worker, a device without memory, hosts that come and go."""

import random
import time
from pathlib import Path
from typing import NamedTuple

import torch
from fault_hosts import Agents, kill_tree
from fault_run import Attempt, Fault
from fault_worker import CHANGES

STEPS = {"a worker becomes slow, `--replan`": 300, "out of memory, `--on-oom replan`": 30}
"""How many each run has."""
MORE = {"a worker becomes slow, `--replan`": ("--replan",), "out of memory, `--on-oom replan`": ("--on-oom", "replan")}
ELASTIC = ("one of two hosts is lost for good, `torchrun`", "a second host joins, `torchrun`")
ELASTIC_STEPS = 200

assert STEPS.keys() == MORE.keys() == CHANGES.keys()


class Changed(NamedTuple):
    """What became of a run."""

    has_all_steps: bool
    difference: float
    """The largest of any weight to the undisturbed run."""
    without_step_s: float


def change(name: str, folder: Path, luck: random.Random, expected: dict[str, torch.Tensor]) -> Changed:
    """Disturbs a run, which changes its plan."""
    run = Attempt(folder, Fault(name, 0, "ddp"), (name, "", luck.randrange(2), luck.randint(10, 20)))
    process = run.start("--steps", str(STEPS[name]), "--optimizer", "sgd", *MORE[name], is_faulty=True)
    while process.poll() is None and not any("switched" in row for row in run.rows()):
        time.sleep(0.02)
    begun_s = time.perf_counter()
    while process.poll() is None and not _is_training_again(run):
        time.sleep(0.02)
    again_s = time.perf_counter() - begun_s
    err = run.finish(process)
    assert process.returncode == 0, err
    steps = [row["step"] for row in run.rows() if "step" in row]
    has_all_steps = steps == list(range(1, STEPS[name] + 1)) and any("switched" in row for row in run.rows())
    return Changed(has_all_steps, _difference(run, expected), again_s)


def lose_and_return(folder: Path, luck: random.Random, expected: dict[str, torch.Tensor]) -> list[Changed]:
    """Lets a run of two agents lose one, go on alone, and get another; returns a result for both."""
    run = Attempt(folder, Fault("elastic", 0, "ddp"))
    (folder / "start.py").write_text("import fault_worker as w; w.run_faulty()")
    given = ("--data", "random:64", "--optimizer", "sgd", "--lr", "0.01", "--samples", "3", "--checkpoint-every", "10")
    more = ("--plan", "auto", "--no-replan", "--steps", str(ELASTIC_STEPS), "--run-dir", "run", "--resume")
    agents = Agents(folder, ("start.py", "train", "zoo:mlp", *given, *more), run.environment)
    times_s = []

    def wait_for(what: str, least: int) -> None:
        while not any(row.get(what, -1) >= least for row in run.rows()):
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)

    try:
        first = agents.start()
        time.sleep(2)  # so that the first keeps the meeting place
        second, at = agents.start(), luck.randint(10, 60)
        wait_for("saved", 10)
        wait_for("step", at)
        for disturb in (lambda: kill_tree(second.pid), agents.start):
            known = sum("switched" in row for row in run.rows())
            begun_s = time.perf_counter()
            disturb()
            while sum("switched" in row for row in run.rows()) == known or not _is_training_again(run):
                assert first.poll() is None, first.communicate()
                time.sleep(0.02)
            times_s.append(time.perf_counter() - begun_s)
            wait_for("saved", 1 + [row["switched"] for row in run.rows() if "switched" in row][-1])
        err = [agent.communicate(timeout=300)[1] for agent in (first, agents.started[-1])]
        assert [first.returncode, agents.started[-1].returncode] == [0, 0], err
    finally:
        agents.end()
    has_all_steps = [row["step"] for row in run.rows() if "step" in row] == [*range(1, ELASTIC_STEPS + 1)]
    return [Changed(has_all_steps, _difference(run, expected), time_s) for time_s in times_s]


def _is_training_again(run: Attempt) -> bool:
    """Whether a step was made under the plan that the run has switched to last."""
    kinds = [kind for row in run.rows() for kind in ("switched", "resumed", "step") if kind in row]
    later = kinds[len(kinds) - kinds[::-1].index("switched") :] if "switched" in kinds else []
    return "step" in later[later.index("resumed") :] if "resumed" in later else False


def _difference(run: Attempt, expected: dict[str, torch.Tensor]) -> float:
    weights = run.weights()
    return max(float((weights[name] - weight).abs().max()) for name, weight in expected.items())
