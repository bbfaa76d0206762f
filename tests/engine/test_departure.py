"""Replicas that leave a server: which plans allow it, and what the log must say."""

import copy
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.engine import Applied, audit
from pipedejavu.engine.departure import log_of_dead, outlives_workers
from pipedejavu.engine.job import Read
from pipedejavu.engine.log_check import check_log
from pipedejavu.facts import InputError
from pipedejavu.plan import preset, presets


def test_a_server_that_applies_each_push_by_itself_outlives_its_workers(make) -> None:
    names = ["parameter-server", "dc-asgd", "easgd", "easgd-sync", "zeno", "hogwild", "ddp", "byteps", "1f1b"]
    assert [name for name in names if outlives_workers(make(name, workers=3).program)] == [
        "parameter-server",
        "dc-asgd",
    ]
    assert {name for name in presets() if preset(name).plan.reduce.gate == "lock"} == {"parameter-server", "dc-asgd"}


def test_a_server_in_a_gpus_memory_or_divided_ends_with_its_workers(make) -> None:
    program = make("parameter-server", workers=3, units=4).program
    *workers, server = program.machine.devices
    machine = program.machine.replace(devices=(*workers, server.replace(type="gpu")))
    assert outlives_workers(program)
    assert not outlives_workers(replace(program, machine=machine))
    assert not outlives_workers(replace(program, pieces=program.pieces * 2))
    place = program.plan.place.replace(servers=2)
    assert not outlives_workers(replace(program, plan=program.plan.replace(place=place)))


def test_the_reads_of_a_dead_worker_are_those_that_it_made(make) -> None:
    """They follow from the server's log, so an audit is as strict as with the worker's own."""
    case = make("parameter-server", workers=3, microbatches=4)
    logs = case.outcome.logs
    for replica in range(3):
        assert log_of_dead(logs[-1], replica).events == logs[replica].events
        assert all(isinstance(event, Read) for event in logs[replica].events)


def test_a_replica_that_left_has_its_updates_up_to_its_last_and_no_other(make) -> None:
    case = make("parameter-server", workers=3, microbatches=4)
    whole = copy.deepcopy(case.outcome.logs)

    def left(last: int | None, made: int) -> None:
        logs = copy.deepcopy(whole)
        logs[-1].events = [e for e in logs[-1].events if e.replica != 1 or e.version <= made]
        logs[-1].left = {} if last is None else {1: last}
        check_log(case.program, case.batches, (logs[0], log_of_dead(logs[-1], 1), *logs[2:]))

    for last in range(5):
        left(last, last)
    with pytest.raises(InputError, match=r"piece 0 of replica 1 had updates \[1, 2, 3\], not 1 to 2 in order"):
        left(2, 3)
    with pytest.raises(InputError, match=r"piece 0 of replica 1 had updates \[1, 2\], not 1 to 3 in order"):
        left(3, 2)
    with pytest.raises(InputError, match=r"piece 0 of replica 1 had updates \[1, 2\], not 1 to 4 in order"):
        left(None, 2)


def test_no_replica_leaves_another_plan(make) -> None:
    case = make("ddp", workers=2, microbatches=2)
    logs = copy.deepcopy(case.outcome.logs)
    logs[0].left = {1: 1}
    with pytest.raises(InputError, match="replica 1 left the run, and plan 'ddp' goes on without none"):
        check_log(case.program, case.batches, logs)


def test_an_audit_notices_a_push_that_was_applied_after_its_worker_had_left(make) -> None:
    case = make("parameter-server", workers=2, microbatches=3)
    outcome = copy.deepcopy(case.outcome)
    last = max(n for n, event in enumerate(outcome.logs[-1].events) if event.replica == 1)
    assert isinstance(outcome.logs[-1].events.pop(last), Applied)
    outcome.logs[-1].left = {1: 2}
    logs = (outcome.logs[0], log_of_dead(outcome.logs[-1], 1), outcome.logs[-1])
    differences = audit(case.program, case.job, case.batches, replace(outcome, logs=logs))
    assert max(differences.values()) > 1e-6
