"""Starts the workers of a program: by HybridAdamW's machinery where that runs it, else by the engine's actions."""

import copy
from dataclasses import replace

import torch

from pipedejavu.engine import Batches, Job, Threads
from pipedejavu.engine.device import device_of
from pipedejavu.engine.rank_process import RankRun
from pipedejavu.one_device.device_handlers import DeviceHandlers
from pipedejavu.one_device.device_worker import DeviceWorker
from pipedejavu.one_device.suitability import holds_all, is_lowered, why_by_actions
from pipedejavu.program import Program


def start_threads(program: Program, job: Job, batches: Batches, *, in_place: bool = False) -> Threads:
    """Returns the workers of a program as threads of this process.

    They train copies of the job's units. With `in_place`, one GPU with its host trains the units themselves, if their
    weights rest on the GPU already in the format that it computes with, and need not be there twice.
    """
    if why_by_actions(program, job):
        return Threads(program, job, batches)
    has_window = program.plan.keep.kind == "host" or "window" in (program.plan.keep.places or ())
    if not in_place or has_window or not holds_all(job, _device(program)) or is_lowered(program, job):
        job = replace(job, units=copy.deepcopy(list(job.units)))
    return Threads(program, job, batches, [DeviceWorker(DeviceHandlers(program, job, batches))])


def start_rank(program: Program, job: Job, batches: Batches) -> RankRun:
    """Returns this rank's worker of a program; it trains the units of the job."""
    if why_by_actions(program, job):
        return RankRun(program, job, batches)
    return RankRun(program, job, batches, DeviceWorker(DeviceHandlers(program, job, batches)))


def _device(program: Program) -> torch.device:
    return device_of(program, 0)
