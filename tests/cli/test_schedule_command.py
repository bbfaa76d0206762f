"""The command `schedule`: what it prints, writes and refuses."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipedejavu.cluster import ClusterJob
from pipedejavu.job_queue import JobEntry, QueueState, lock_queue
from tests.cli.test_main import refused, run

MACHINE = "2x(2xv100-32gb + 2xepyc-7763), 100Gb/s"
RATES = "model,kind,gpus,cores,memory_bytes,steps_per_s\nm,*,1,1,1000,2\n"


def jobs(folder: Path, *rows: str, header: str = "name,model,steps,arrival_s,gpus") -> str:
    (folder / "jobs.csv").write_text("\n".join((header, *rows)) + "\n")
    (folder / "rates.csv").write_text(RATES)
    return str(folder / "jobs.csv")


def test_policies_are_compared_in_a_table(tmp_path: Path) -> None:
    path = jobs(tmp_path, *(f"j{n},m,{100 * (9 - n)},0,1" for n in range(8)))
    asked = ("--rates", str(tmp_path / "rates.csv"), "--machine", MACHINE, "--policy", "fifo", "--policy", "srtf")
    lines = run("schedule", path, *asked, "--start", "0").stdout.splitlines()
    assert lines[0] == "8 jobs on 2 servers, proportional, packing best"
    assert lines[2].split()[:4] == ["policy", "mean", "median", "99"]
    # Of four GPUs the first jobs take 450, 400, 350 and 300 s, the shorter ones after them 100 to 250 s.
    assert lines[3].split()[:2] == ["fifo", "462"]
    assert lines[4].split()[:2] == ["srtf", "362"]


def test_the_form_and_the_page_have_every_job(tmp_path: Path) -> None:
    path, page = jobs(tmp_path, "a,gpt-small,50,0,1", "b,gpt-small,20,5,2"), tmp_path / "page.html"
    done = run(
        "schedule",
        path,
        "--machine",
        MACHINE,
        "--json",
        "--plan-budget",
        "0.3",
        "--html",
        str(page),
        "--price",
        "v100-32gb=3",
    )
    (form,) = json.loads(done.stdout)["schedules"]
    assert [job["name"] for job in form["jobs"]] == ["a", "b"]
    assert form["cost"] == pytest.approx(4 * 3 * form["makespan_s"] / 3600)
    text = page.read_text()
    assert "2 jobs of jobs.csv, fifo, proportional" in text
    assert '"group-0","gpt-small"' in text


def test_servers_are_rented(tmp_path: Path) -> None:
    path = jobs(tmp_path, "a,m,2000,0,1", "b,m,2000,0,1")
    asked = ("--rates", str(tmp_path / "rates.csv"), "--machine", "v100-32gb + epyc-7763", "--json", "--start", "0")
    (alone,) = json.loads(run("schedule", path, *asked).stdout)["schedules"]
    (more,) = json.loads(run("schedule", path, *asked, "--rent", "t4 + epyc-7763@36").stdout)["schedules"]
    assert (alone["makespan_s"], alone["cost"]) == (2000, 0)
    assert (more["makespan_s"], more["cost"]) == (1120, pytest.approx(1120 * 36 / 3600))


@pytest.mark.parametrize(
    ("row", "options", "fault"),
    [
        ("a,gpt-smal,10,0,1", (), "there is no model shape 'gpt-smal'; did you mean 'gpt-small'?"),
        (
            "a,gpt-small,10,0,8",
            (),
            "job 'a': model 'gpt-small' with a batch of 32 fits on no server of the cluster with 8",
        ),
        ("a,,10,0,1", (), "job 'a' has neither a model, nor rates, nor a duration_s; give one of them"),
        ("a,n,10,0,1", ("--rates", "rates.csv"), "rates.csv has no model 'n'"),
        ("a,gpt-small,10,0,1", ("--policy", "lifo"), "there is no policy 'lifo'; did you mean 'fifo'?"),
        ("a,gpt-small,10,0,1", ("--rent", "a100-80gb"), "--rent is HOSTS@PRICE with the price of an hour of each"),
        ("a,gpt-small,10,0,1", ("--price", "3"), "--price is KIND=PRICE, such as a100=2.5, not '3'"),
        ("a,gpt-small,10,0,1", ("--round", "0"), "--round is a number of seconds, above 0, not 0"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, options: tuple[str, ...], fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fault in refused("schedule", jobs(tmp_path, row), "--machine", MACHINE, *options)


def test_a_list_of_servers_cannot_be_planned_for(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("sn,cpu_milli,memory_mib,gpu,model\nn,8000,1024,2,T4\n")
    text = refused("schedule", jobs(tmp_path, "a,gpt-small,10,0,1"), "--machine", str(tmp_path / "nodes.csv"))
    assert "needs a plan for model 'gpt-small'" in text
    assert "only lists servers; give --rates, or a machine with known devices" in text


@pytest.mark.parametrize(
    ("row", "options", "fault"),
    [
        ("a,zoo:mlp,5,1,16,", ("--machine", MACHINE), "--run uses this host's devices, and --machine concerns a"),
        ("a,zoo:mlp,5,1,16,", ("--policy", "fifo", "--policy", "las"), "--run follows one policy, not 2"),
        ("a,,5,1,16,", (), "job 'a' has no model to train; give one, such as zoo:mlp"),
        ("a,zoo:mlp,,1,16,", (), "job 'a' gives none of them; give one of steps, epochs with samples, or duration_s"),
        ("a,zoo:mlpp,5,1,16,", (), "job 'a': there is no model 'zoo:mlpp'; did you mean"),
        ("../a,zoo:mlp,5,1,16,", (), "job '../a' is not named as a folder can be"),
        ("a,zoo:mlp,5,0,16,", (), "job 'a' asks for 0 devices; a job that is run holds whole ones"),
        ("a,zoo:mlp,5,3,16,", (), "job 'a' has a batch of 16, which 3 workers with 1 microbatches each cannot share"),
        ("a,zoo:mlp,5,1,16,workers=2", (), "job 'a' gives the option 'workers', which the queue sets from its steps"),
        ("a,zoo:mlp,5,1,16,sed=2", (), "job 'a': there is no option 'sed'; did you mean 'seed'?"),
        ("a,zoo:mlp,5,1,16,lr=-1", (), "job 'a': --lr is a number, above 0, not -1"),
        ("a,zoo:mlp,5,4096,4096,", (), "job 'a' asks for 4096 devices, and this host does not have them for it: it"),
        ("a,zoo:mlp,5,1,16,seed", (), "options are NAME=VALUE, separated by spaces, not 'seed'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    tmp_path: Path, row: str, options: tuple[str, ...], fault: str
) -> None:
    path = jobs(tmp_path, row, header="name,model,steps,gpus,batch,options")
    assert fault in refused("schedule", path, "--run", "--out", str(tmp_path / "q"), *options)
    assert not (tmp_path / "q").exists()


def test_a_queue_goes_on_with_the_same_jobs_only(tmp_path: Path) -> None:
    path = jobs(tmp_path, "a,zoo:mlp,5,1,16", header="name,model,steps,gpus,batch")
    other = ClusterJob(name="a", model="zoo:mlp", steps=6, gpus=1)
    (tmp_path / "q").mkdir()
    QueueState(began_at=0.0, entries=(JobEntry(job=other),)).write(tmp_path / "q")
    text = refused("schedule", path, "--run", "--out", str(tmp_path / "q"))
    assert "has 1 jobs, and job 'a' is not the same there; put the file back as it was" in text
    with lock_queue(tmp_path / "q"):
        text = refused("schedule", path, "--run", "--out", str(tmp_path / "q"))
    assert "another scheduler runs the queue in" in text


def test_a_cluster_or_a_run_is_needed(tmp_path: Path) -> None:
    path = jobs(tmp_path, "a,m,5,0,1")
    assert "schedule needs a cluster with --machine; or --run, to train the jobs" in refused("schedule", path)
    text = refused("schedule", path, "--machine", MACHINE, "--out", "q")
    assert "--out is the folder of a queue that is run; add --run" in text


def test_a_queue_on_ray_needs_ray(tmp_path: Path) -> None:
    path = jobs(tmp_path, "a,zoo:mlp,5,1,16", header="name,model,steps,gpus,batch")
    assert "--ray says on which nodes a queue is run; add --run" in refused("schedule", path, "--ray", "auto")
    text = refused("schedule", path, "--run", "--ray", "127.0.0.1:9", "--out", str(tmp_path / "q"))
    if find_spec("ray") is None:
        assert "--ray needs ray, which is not installed: pip install 'pipedejavu[ray]'" in text
    else:
        assert "no Ray answers at '127.0.0.1:9' ([Errno 111] Connection refused); start one with 'ray start" in text
        text = refused("schedule", path, "--run", "--ray", "ray://a:1", "--out", str(tmp_path / "q"))
        assert "--ray is the HOST:PORT of a Ray cluster, or auto, not 'ray://a:1'" in text
    assert not (tmp_path / "q").exists()
