"""What a Trainer settles on its first batch: the reduction of the loss, the units, the plan and its program."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipedejavu.engine import Job, Optimizer
from pipedejavu.engine.device import device_of
from pipedejavu.facts import InputError, Machine
from pipedejavu.facts.printable import tell
from pipedejavu.model_check.check import Checked, Sample
from pipedejavu.model_check.check import check_model as check_units
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.measure import measure
from pipedejavu.planner.planning import MOST_SAMPLES, choose_plan, known_machine, measure_setups
from pipedejavu.planner.precision_choice import PrecisionRequest, with_precision
from pipedejavu.planner.profiling import choose_sizes, measure_with
from pipedejavu.planner.worker_host import devices_to_measure, make_machine, read_worker_hosts, torch_device
from pipedejavu.profile import ModelCut, UnitSample, cut_model, make_samples
from pipedejavu.profile.sequential import Units
from pipedejavu.profile.unit_time import Report
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.search import RankedPlan, SearchOptions
from pipedejavu.session.batch_split import BatchSplit, without_padding
from pipedejavu.source.loss_reduction import Loss, Reduction, find_reduction, own_loss
from pipedejavu.source.precision import trained_dtype
from pipedejavu.source.task import loss_of
from pipedejavu.source.user_batch import UserBatch

OptimizerOf = Callable[[Units], Optimizer]


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The choices of a Trainer that do not change the model, its loss or its updates."""

    plan: str | Plan
    workers: int
    seed: int
    machine: Machine | None
    replan: bool
    hang_after_s: float | None
    check_replicas: int
    check_model: bool
    precision: PrecisionRequest


class PreparedModel(NamedTuple):
    """A model that is ready to run."""

    cut: ModelCut
    job: Job
    program: Program
    batch: BatchSplit
    is_searched: bool
    """Whether the plan was searched for, and may be replaced."""


def read_sample(model: nn.Module, loss: Loss | None, sample: Any) -> tuple[UserBatch, Reduction]:
    """Returns a batch in the form of the engine, and how the loss is reduced over samples."""
    batch = UserBatch.of(sample, has_own_loss=loss is None)
    try:
        reduction, batch = find_reduction(model, loss or own_loss, batch.readings())
    except InputError:
        raise
    except Exception:
        cut_model(model, batch.inputs)  # raises an error with the line of the model that fails, if it is the model
        raise
    return batch, reduction


class TrainerPlan:
    """Plans the training of one model on batches like the first."""

    def __init__(self, model: nn.Module, loss: Loss | None, optimizer: OptimizerOf, options: TrainerOptions):
        self.model, self.loss, self.optimizer, self.options = model, loss or own_loss, optimizer, options

    def prepare(self, first: UserBatch, reduction: Reduction) -> PreparedModel:
        """Cuts the model, searches for a plan if none is given, compiles it and checks the units."""
        options = self.options
        summed = without_padding(reduction.summed(self.loss))
        best = self._search(summed, BatchSplit(first, (1,), reduction)) if options.plan == "auto" else None
        plan = _sized(best.plan if best else options.plan, options.workers)
        sizes = (1,) * (plan.feed.microbatches * _copies(plan) * plan.steps)
        batch = BatchSplit(first, sizes, reduction, pads=may_pad(plan))
        cut = batch.cut = cut_model(self.model, batch.own_inputs(0), plan.cut.begins)
        job = Job(units=cut.units, loss=loss_of(cut, summed), optimizer=self.optimizer(cut.units), seed=options.seed)
        if best is not None:
            program = compile_plan(plan, best.profile, best.machine, fold=False)
        else:
            dtype = trained_dtype(self.model)
            program = _measure_and_compile(job, plan, batch, options.machine, options.precision, dtype)
        if options.check_model:
            self._check(PreparedModel(cut, job, program, batch, best is not None), summed)
        return PreparedModel(cut, job, program, batch, best is not None)

    def _check(self, prepared: PreparedModel, summed: Callable[[Any, Any], Tensor]) -> None:
        """Raises InputError if the units compute something else than the model."""
        cut, job, program, batch, _ = prepared
        both = [Sample(batch.own_inputs(n), batch.targets(n)) for n in (0, len(batch.sizes) - 1)]
        if remark := check_units(Checked(self.model, cut, job, summed, program, both), device_of(program, 0)):
            tell(remark)

    def _search(self, loss: Callable[[Any, Any], Tensor], batch: BatchSplit) -> RankedPlan:
        """Measures the model on all devices of this machine; returns the best plan for batches like the sample."""
        machine = self.options.machine or known_machine()
        sizes = [size for size in choose_sizes(min(batch.size, MOST_SAMPLES)) if size <= batch.size]
        cut = batch.cut = cut_model(self.model, batch.own_head(sizes[-1]))
        job = Job(units=cut.units, loss=loss_of(cut, loss), optimizer=self.optimizer(cut.units))
        unit_samples = make_samples(lambda size: UnitSample(cut.units, *batch.head(size), job.loss), sizes)
        chosen = with_precision(Plan(), self.options.precision, machine.devices, dtype=trained_dtype(self.model))
        setups, clip = measure_setups(machine), chosen.reduce.clip
        quiet: Report = lambda _: None  # noqa: E731
        profile = measure_with("model", unit_samples, job, setups, quiet, precision=chosen.precision)
        options = SearchOptions(
            batch=batch.size, precision=chosen.precision, clip="global" if clip == "global" else "none"
        )
        return choose_plan(profile.replace(begins=cut.begins), machine, options)


def may_pad(plan: Plan) -> bool:
    """Whether a batch may have fewer samples than the plan has microbatches: if all add up to one update."""
    return plan.version.kind == "sync" and plan.feed.kind != "own" and plan.reduce.combiner == "sum"


def _sized(plan: str | Plan, workers: int) -> Plan:
    """Returns a plan, or a preset by name with that many workers; a synchronous plan makes one update per step."""
    if isinstance(plan, str):
        plan = preset(plan.removeprefix("preset:")).at(workers=workers, microbatches=4)
    return plan if plan.version.kind != "sync" else plan.replace(steps=1)


def _measure_and_compile(
    job: Job, plan: Plan, batch: BatchSplit, machine: Machine | None, asked: PrecisionRequest, dtype: torch.dtype
) -> Program:
    """Measures a job at the microbatch size of a batch, and compiles the plan for it."""
    plan = plan.replace(feed=plan.feed.replace(samples=batch.length(0)))
    plan, machine = _place(plan, machine)
    devices = [machine.device(name) for name in assign_devices(plan, machine)]
    plan = with_precision(plan, asked, devices, dtype=dtype)
    kinds = _kinds(plan, machine)
    profile = measure("model", job, plan, batch.head, lambda numbers: batch.head(len(numbers)), kinds)
    return compile_plan(plan, profile, machine, fold=False)


def _place(plan: Plan, machine: Machine | None) -> tuple[Plan, Machine]:
    """Returns a plan, and a machine with a device for each of its workers."""
    if machine is None:
        return make_machine(plan, read_worker_hosts(plan.num_workers), "auto")
    return plan, machine.divided(plan.num_workers) if plan.place.devices is None else machine


def _kinds(plan: Plan, machine: Machine) -> dict[str, torch.device]:
    """Returns the torch device on which each kind of device of a plan is measured."""
    devices = devices_to_measure(plan, machine, assign_devices(plan, machine))
    return {kind: torch_device(machine, name) for kind, (_, name) in devices.items()}


def _copies(plan: Plan) -> int:
    return 1 if plan.feed.kind == "share" else plan.place.replicas
