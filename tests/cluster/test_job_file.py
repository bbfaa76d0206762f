"""Queues and lists of servers as files: the forms that are read, and the sentence for each fault."""

import json
from pathlib import Path

import pytest

from pipedejavu.cluster.job_file import read_jobs, read_rates, read_servers
from pipedejavu.facts import InputError
from tests.cluster.case import GIB

OPENB = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_jobs_are_read_from_json_and_csv_alike(tmp_path: Path) -> None:
    fields = {"name": "a", "model": "gpt-small", "batch": 8, "steps": 20.5, "arrival_s": 3.0, "gpus": 2.0}
    fields |= {"kinds": ["v100", "t4"], "memory_bytes": "2 GiB"}
    after = {"name": "b", "model": "gpt-small", "epochs": 2.0, "samples": 100, "after": ["a"]}
    told = read_jobs(written(tmp_path, "j.json", json.dumps({"jobs": [fields, after]})))
    rows = [
        "name,model,batch,steps,epochs,samples,arrival_s,gpus,kinds,memory_bytes,after",
        "a,gpt-small,8,20.5,,,3,2,v100 t4,2 GiB,",
        "b,gpt-small,,,2,100,,,,,a",
    ]
    assert read_jobs(written(tmp_path, "j.csv", "\n".join(rows))) == told
    assert told[0].memory_bytes == 2 * GIB
    assert told[1].work == 2 * 4  # four batches of 32 hold 100 samples


def test_tasks_of_a_production_trace_are_read(tmp_path: Path) -> None:
    text = OPENB + "p0,6000,12288,1,460,V100|T4,LS,Running,100,900,150\np1,8000,1024,2,1000,,LS,Pending,20,50,\n"
    first, second = read_jobs(written(tmp_path, "pods.csv", text))
    assert (first.gpus, first.cores, first.memory_bytes, first.kinds) == (0.46, 6, 12 * GIB, ("V100", "T4"))
    assert (first.arrival_s, first.duration_s, second.gpus, second.duration_s) == (100, 750, 2, 30)
    nodes = "sn,cpu_milli,memory_mib,gpu,model\nn0,32000,1024,0,\nn1,96000,2048,8,G2\n"
    servers = read_servers(written(tmp_path, "nodes.csv", nodes))
    assert servers is not None
    assert [(s.name, s.kind, s.gpus, s.cores_milli, s.memory_bytes) for s in servers] == [
        ("n0", "cpu", 0, 32000, GIB),
        ("n1", "G2", 8, 96000, 2 * GIB),
    ]


def test_a_trace_without_a_header_is_read(tmp_path: Path) -> None:
    first, second = read_jobs(written(tmp_path, "t.csv", "0,alexnet,0.0,3349,1\n1,gnmt,0.001,26435,2\n"))
    assert (first.name, first.model, first.work, first.gpus) == ("0-alexnet", "alexnet", 3349, 1)
    assert (second.arrival_s, second.gpus) == (0.001, 2)


def test_a_table_of_throughput_is_read_by_model(tmp_path: Path) -> None:
    text = "model,kind,gpus,cores,memory_bytes,steps_per_s\na,*,1,2,1000,0.5\na,t4,1,4,1000,0.75\nb,*,1,1,0,3\n"
    rates = read_rates(written(tmp_path, "r.csv", text))
    assert [len(rows) for rows in rates.values()] == [2, 1]
    assert (rates["a"][1].kind, rates["a"][1].cores, rates["a"][1].steps_per_s) == ("t4", 4, 0.75)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "column 'name' is missing"),
        ("name,stepps\na,3\n", "column 'stepps' is not known; did you mean 'steps'?"),
        ("name,steps,arrival_s\na,3,-1\n", "line 2: arrival_s: -1.0 s is not possible; it must be zero or more"),
        ("name,steps\na,three\n", "line 2: steps"),
        ("name,steps\na,3\nb\n", "line 3: it has 1 fields, and the header has 2"),
        ("name,steps\na,3\na,4\n", "two jobs are called 'a'; give each its own name"),
        ("name,steps,arrival_s,deadline_s\na,3,10,9\n", "job 'a' has its deadline at 9 s, before it arrives at 10 s"),
        ("name,steps,duration_s\na,3,4\n", "job 'a' gives steps and duration_s; give one of"),
        ("name,model\na,gpt-small\n", "job 'a' gives none of them; give one of steps, epochs with samples"),
        ("name,epochs\na,3\n", "job 'a' counts epochs without samples"),
        ("name,steps,gpus\na,3,1.5\n", "job 'a' asks for 1.5 GPUs; ask for a whole number, or a part below 1"),
        ("name,steps,gpus,most_gpus\na,3,4,2\n", "job 'a' uses at most 2 GPUs but asks for 4"),
        (OPENB + "p0,6000,12288,1,460,,LS,Running,100,90,\n", "line 2: the task is deleted at 90 s, before it begins"),
        (OPENB + "p0,6000,12288,one,460,,LS,Running,100,190,\n", "line 2: invalid literal"),
        ("0,alexnet,0.0,many,1\n", "line 1: could not convert"),
    ],
)
def test_a_broken_file_is_told_in_one_sentence(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        read_jobs(written(tmp_path, "jobs.csv", text))
    assert fault in str(refused.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a list of servers; its columns are cpu_milli"):
        read_servers(written(tmp_path, "x.csv", "a,b\n1,2\n"))
    with pytest.raises(InputError, match=r"is not a table of throughput; its columns are model, kind"):
        read_rates(written(tmp_path, "x.csv", "a,b\n1,2\n"))
    with pytest.raises(InputError, match=r"jobs\[0\]\.gpu.*gpus"):
        read_jobs(written(tmp_path, "x.json", '{"jobs": [{"name": "a", "steps": 1, "gpu": 2}]}'))
