"""Runs whose number of workers changes from one start to the next: the plan for those that are there, same batch."""

from collections.abc import Sequence

from pipedejavu.facts import InputError
from pipedejavu.launch.resume import Known
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.replan import first_runnable, question_of
from pipedejavu.planner.worker_host import DeviceChoice, WorkerHost, make_machine
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import search


def fit_plan(known: Known, asked: Plan | None, worker_hosts: Sequence[WorkerHost], devices: DeviceChoice) -> Plan:
    """Returns a plan with a worker on each site that keeps the run's batch; raises InputError where there is none.

    That is the plan that was asked for, at this size, if it keeps the batch; or the planner's, from what was measured
    when the run began; or, where these devices were not measured then, data parallel.
    """
    program = compile_plan(known.plan, known.profile, known.machine, fold=False)
    batch, samples, count = sum(program.sizes), known.plan.feed.samples, len(worker_hosts)
    if asked is not None and asked.num_workers == count and _batch_of(asked) == batch:
        return asked
    _, machine = make_machine(preset("ddp").at(workers=count), worker_hosts, devices)
    machine = machine.replace(links=known.machine.links)
    question = question_of(program, samples if batch % samples == 0 else None, count)
    try:
        found = first_runnable(search(known.profile, machine, question).candidates, count)
    except InputError:
        found = None
    if found is not None:
        return found.plan
    if batch % count:
        raise InputError(
            f"there are {count} processes where the run had {known.plan.num_workers}, and no plan for so many keeps its"
            f" batch of {batch} samples; start a number of processes that divides it"
        )
    size = max(n for n in range(1, samples + 1) if batch // count % n == 0)
    return preset("ddp").at(workers=count, microbatches=batch // count // size, samples=size)


def _batch_of(plan: Plan) -> int:
    """Returns the samples of an update over all replicas, which may share those of one."""
    copies = 1 if plan.feed.kind == "share" else plan.place.replicas + plan.place.cpu_replicas
    return plan.feed.microbatches * plan.feed.samples * copies
