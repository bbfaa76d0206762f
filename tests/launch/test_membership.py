"""A parameter server outlives its workers: who dies and when is in the log, and the others train on."""

import copy
import json
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file
from torch.distributed import HashStore, PrefixStore

from pipedejavu.engine import Log
from pipedejavu.engine.wire import PeerLeftError
from pipedejavu.launch.membership import AllRanks, Obituary, members_of
from pipedejavu.run import RunFolder, TrainOptions
from pipedejavu.source.task import prepare
from pipedejavu.store import CheckpointDir
from tests.engine.conftest import make
from tests.launch.test_faults import FAULTY

STEPS, EVERY, WORKERS, SAMPLES = 20, 5, 3, 2
DEATHS = {0: 7, 1: 12}
"""By worker, the last of its updates that the server makes."""
SIZES = ("--workers", str(WORKERS), "--samples", str(SAMPLES), "--checkpoint-every", str(EVERY))
MODEL = ("zoo:mlp", "--data", "random:64", "--precision", "fp64", "--optimizer", "sgd", "--lr", "0.01")
RATE = ("--schedule", "linear")
RUN = ("train", *MODEL, *RATE, "--plan", "preset:parameter-server", *SIZES, "--steps", str(STEPS), "--run-dir", "run")
DIES = "if {{{}}}.get(rank) == n: os.kill(os.getpid(), signal.SIGKILL)"
__all__ = ["make"]
TRACED = """
import faulty, json
from pipedejavu.launch import trained
from pipedejavu.cli.main import main

judge = trained.judge

def judged(program, job, batches, outcome, uncut=None):
    events = [[e.replica, e.version, list(e.microbatches)] for e in outcome.logs[-1].events]
    open("events.json", "w").write(json.dumps(events))
    return judge(program, job, batches, outcome, uncut)

trained.judge = judged
main()
"""


def start(processes, folder: Path, deaths: dict[int, int], *more: str):
    """Starts a run whose workers are killed in the middle of a forward, after so many updates of theirs."""
    fatal = ", ".join(f"{worker}: {after * WORKERS + worker}" for worker, after in deaths.items())
    dies = DIES.format(fatal).replace("{{", "{").replace("}}", "}")
    (folder / "faulty.py").write_text(FAULTY.format(inputs="pass", targets=dies, send="pass"))
    return processes.start((sys.executable, "-c", TRACED, *RUN, *more), folder)


def test_the_others_train_on_as_the_log_says(processes, tmp_path) -> None:
    code, out, err = processes.finish(start(processes, tmp_path, DEATHS, "--audit"))
    assert code == 0, err
    assert "audit passed" in out
    for (worker, after), alive in zip(DEATHS.items(), (2, 1), strict=True):
        left = SAMPLES * (STEPS - after)
        going_on = "1 worker goes on" if alive == 1 else "2 workers go on"
        assert f"after update {after}; {going_on}, without the {left} samples that were left for it" in err
        assert f"worker {worker} was ended by SIGKILL at " in err
    rows = RunFolder(tmp_path / "run").rows()
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == [*range(1, STEPS + 1)]
    for row in steps:  # what a worker had not reported yet is lost with it
        alive = 1 + sum(after >= row["step"] for after in DEATHS.values())
        assert row["samples"] == row["count"]
        assert SAMPLES <= row["count"] <= SAMPLES * alive
    assert [(row["worker"], row["left"], row["alive"]) for row in rows if "left" in row] == [(0, 7, 2), (1, 12, 1)]
    manifest = CheckpointDir(tmp_path / "run" / "checkpoints").newest(pytest.fail).manifest
    assert manifest.facts["left"] == {"0": 7, "1": 12}
    events = json.loads((tmp_path / "events.json").read_text())
    assert [version for replica, version, _ in events if replica == 0] == [*range(1, 8)]
    expected = plain_server(events, RunFolder(tmp_path / "run").options())
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) < 1e-12
    code, out, err = processes.run(
        (sys.executable, "-m", "pipedejavu", "train", "zoo:mlp", "--run-dir", "run", "--resume", "--steps", "25"),
        tmp_path,
    )
    assert code == 0, err
    assert "had died when the checkpoint was saved (of replica 0 after update 7, of replica 1 after update 12)" in err
    rows = RunFolder(tmp_path / "run").rows()
    assert [row["count"] for row in rows if row.get("step", 0) > STEPS] == [SAMPLES * WORKERS] * 5
    manifest = CheckpointDir(tmp_path / "run" / "checkpoints").newest(pytest.fail).manifest
    assert "left" not in manifest.facts


def plain_server(events: list, options: TrainOptions) -> dict[str, torch.Tensor]:
    """Returns the weights of a server that applies such pushes, one after the other, as plain PyTorch."""
    _, batches = prepare(options, [SAMPLES] * WORKERS)
    server = batches.task.model
    optimizer = torch.optim.SGD(server.parameters(), lr=0.01)
    workers = [copy.deepcopy(server) for _ in range(WORKERS)]
    for replica, version, (microbatch,) in events:
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - (version - 1) / STEPS)  # each worker's own steps
        workers[replica].zero_grad()
        output = workers[replica](batches.own_inputs(microbatch))
        torch.nn.functional.cross_entropy(output, batches.targets(microbatch)).backward()
        for weight, pushed in zip(server.parameters(), workers[replica].parameters(), strict=True):
            weight.grad = pushed.grad.clone()
        optimizer.step()
        workers[replica].load_state_dict(server.state_dict())
    return server.state_dict()


@pytest.mark.slow
def test_the_death_of_the_last_worker_ends_the_run(processes, tmp_path) -> None:
    code, _, err = processes.finish(start(processes, tmp_path, {0: 7, 1: 12, 2: 17}))
    assert code == 1
    assert "worker 2 was ended by SIGKILL" in err.splitlines()[-1]
    assert err.endswith("all others were stopped; --resume goes on after step 15\n")


class Handlers:
    """What the members see of a worker."""

    def __init__(self) -> None:
        self.log = Log()


class Run:
    """A rank's run."""

    def __init__(self) -> None:
        self.handlers, self.wire = Handlers(), self
        self.outlives_peers = False


@pytest.fixture
def ranks(make):
    """The members of a server with three workers, and their launcher."""
    store, program = HashStore(), make("parameter-server", workers=3).program
    members = [members_of(PrefixStore("run", store), rank, program) for rank in range(4)]
    for rank, member in enumerate(members):
        run = Run()
        member.follow(run)
        assert run.outlives_peers == (rank == 3)
        assert member.lead == 3
    return members, Obituary(store)


def together(*calls) -> None:
    """Makes calls at once; one that never returns fails the test."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_nobody_waits_at_a_meeting_for_a_worker_that_has_died(ranks) -> None:
    members, obituary = ranks
    together(*(member.open for member in members))
    obituary.note([None, -signal.SIGKILL, None, None])
    before = time.time()
    together(*(lambda member=member: member.meet(5) for member in members if member.rank != 1))
    assert [member.left for member in members] == [{1: 5}, {}, {1: 5}, {1: 5}]
    assert {member.dead for member in members if member.rank != 1} == {frozenset({1})}
    (departure,) = members[3].departures(8)
    assert departure[:2] + departure[3:5] == (1, "SIGKILL", 5, 2)
    assert before - 60 < departure.at_s <= before
    assert [[*member.departures(8)] for member in members] == [[]] * 4  # it is told once
    tables = [torch.tensor([rank + 0.5, 1.0], dtype=torch.float64) for rank in range(4)]
    together(*(lambda n=n: members[n].add_up(tables[n]) for n in (0, 2, 3)))
    assert [table.tolist() for table in tables] == [[6.5, 3.0], [1.5, 1.0], [6.5, 3.0], [6.5, 3.0]]


def test_a_sum_during_which_a_worker_dies_is_made_again(ranks) -> None:
    members, obituary = ranks
    together(*(member.open for member in members))
    told = list[int]()

    def add_up(rank: int) -> None:
        with pytest.raises(PeerLeftError):
            members[rank].add_up(torch.ones(1))
        told.append(rank)
        table = torch.ones(1)
        members[rank].add_up(table)
        assert table.item() == 3
        told.append(rank)

    together(lambda: obituary.note([-signal.SIGSEGV, None, None, None]), *(lambda n=n: add_up(n) for n in (1, 2, 3)))
    assert sorted(told) == [1, 1, 2, 2, 3, 3]


def test_a_worker_is_outlived_from_the_first_round_to_the_last_while_another_lives(ranks) -> None:
    members, obituary = ranks
    killed, raised = -signal.SIGKILL, 1
    obituary.note([killed, None, None, None])
    assert obituary.workers == set()  # no round has begun
    together(*(member.open for member in members))
    for codes in ([None, None, None, killed], [raised, None, None, None], [-signal.SIGINT, None, None, None]):
        obituary.note(codes)
        assert obituary.workers == set()
    obituary.note([killed, None, None, None])
    obituary.note([killed, killed, None, None])
    obituary.note([killed, killed, killed, None])
    assert obituary.workers == {0, 1}  # the last one is not outlived
    together(*(lambda member=member: member.close(9) for member in members[2:]))
    obituary.workers.clear()
    obituary.note([killed, None, None, None])
    assert obituary.workers == set()


def test_meetings_leave_no_keys(ranks) -> None:
    members, obituary = ranks
    together(*(member.open for member in members))
    sizes = set()
    for update in range(20):
        together(*(lambda member=member, update=update: member.meet(update) for member in members))
        sizes.add(obituary.store.num_keys())
    assert len(sizes) == 1


def test_other_plans_end_with_their_first_worker(make) -> None:
    for name in ("ddp", "zeno", "easgd", "hogwild"):
        members = members_of(HashStore(), 1, make(name, workers=3).program)
        assert isinstance(members, AllRanks)
        assert members.lead == 0
        assert not members.is_dead(0)
        assert [*members.departures(5)] == []
        assert members.facts() == {}
