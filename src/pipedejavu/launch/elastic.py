"""Runs whose number of workers changes between starts: a plan for the current workers that keeps the batch size."""

from collections.abc import Sequence

from pipedejavu.facts import InputError
from pipedejavu.launch.resume import Known
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.replan import first_runnable, search_options_for
from pipedejavu.planner.worker_host import DeviceChoice, WorkerHost, make_machine
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import search


def fit_plan(known: Known, requested: Plan | None, worker_hosts: Sequence[WorkerHost], devices: DeviceChoice) -> Plan:
    """Returns a plan with one worker per host entry that keeps the run's batch size; raises InputError if none does.

    Takes the requested plan if it keeps the batch; else the planner's choice, from the profile that was measured when
    the run began; else, if these devices have no profile, data parallelism.
    """
    program = compile_plan(known.plan, known.profile, known.machine, fold=False)
    batch, samples, count = sum(program.sizes), known.plan.feed.samples, len(worker_hosts)
    if requested is not None and requested.num_workers == count and _batch_of(requested) == batch:
        return requested
    _, machine = make_machine(preset("ddp").at(workers=count), worker_hosts, devices)
    machine = machine.replace(links=known.machine.links)
    question = search_options_for(program, samples if batch % samples == 0 else None, count)
    try:
        best = first_runnable(search(known.profile, machine, question).candidates, count)
    except InputError:
        best = None
    if best is not None:
        return best.plan
    if batch % count:
        raise InputError(
            f"there are {count} processes where the run had {known.plan.num_workers}, and no plan for so many keeps its"
            f" batch of {batch} samples; start a number of processes that divides it"
        )
    size = max(n for n in range(1, samples + 1) if batch // count % n == 0)
    return preset("ddp").at(workers=count, microbatches=batch // count // size, samples=size)


def _batch_of(plan: Plan) -> int:
    """Returns the samples per update over all replicas; replicas may divide one batch among them."""
    copies = 1 if plan.feed.kind == "share" else plan.data_replicas + plan.place.cpu_replicas
    return plan.feed.microbatches * plan.feed.samples * copies
