"""Measurements before a run starts: messages between workers, and the model on each kind of device of the plan."""

from collections.abc import Sequence
from functools import partial

import torch

from pipedejavu.facts import Link, Machine, Profile
from pipedejavu.launch.rank_group import RankGroup
from pipedejavu.plan import Plan
from pipedejavu.planner.measure import measure
from pipedejavu.planner.worker_host import devices_to_measure, num_threads, num_threads_beside, torch_device
from pipedejavu.probe.gloo import measure_link
from pipedejavu.profile import background_load, merge_profiles
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.run.options import TrainOptions
from pipedejavu.source.task import Prepared, draw, prepare


def measure_messages(plan: Plan, machine: Machine) -> Link:
    """Measures messages between workers of this host; for a pipeline while the other workers compute."""
    names = assign_devices(plan, machine)
    with background_load(num_threads_beside(machine, names, 0) if plan.pipeline_size > 1 else 0):
        return measure_link()


def open_model(options: TrainOptions, plan: Plan) -> Prepared:
    """Opens the model that is measured: cut for the plan's microbatches, with random weights."""
    return prepare(options.replace(weights=None), (plan.feed.samples,), plan.cut.begins)


def measure_plan(
    options: TrainOptions,
    plan: Plan,
    machine: Machine,
    names: Sequence[str],
    ranks: RankGroup,
    prepared: list[Prepared],
) -> Profile:
    """Measures the model on each kind of device that the plan uses, on the rank of the first worker of that kind.

    Opens the model if `prepared` does not have it, and appends it there.
    """
    profiles = []
    for kind, (worker, name) in sorted(devices_to_measure(plan, machine, names).items(), key=lambda item: item[1]):
        source, profile_json = worker if ranks.is_launched else 0, b""
        if ranks.rank == source:
            torch.set_num_threads(num_threads(machine, names, worker))
            with background_load(num_threads_beside(machine, names, worker)):
                if not prepared:
                    prepared.append(open_model(options, plan))
                profile = _measure_here(options, plan, {kind: torch_device(machine, name)}, *prepared)
            profile_json = profile.to_json().encode()
        profiles.append(Profile.from_json(ranks.broadcast(profile_json, source)))
    return merge_profiles(profiles)


def _measure_here(options: TrainOptions, plan: Plan, kinds: dict[str, torch.device], prepared: Prepared) -> Profile:
    job, batches = prepared
    # Planning again needs costs at several microbatch sizes; only a chain has the same units at all of them.
    return measure(
        options.model,
        job,
        plan,
        batches.first,
        partial(draw, batches.task.data, options.seed),
        kinds,
        at_more=options.can_switch and batches.cut.way == "chain",
    )
