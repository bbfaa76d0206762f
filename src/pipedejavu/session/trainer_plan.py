"""What a Trainer settles on its first batch: the reduction of the loss, the units, the plan and its program."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pipedejavu.engine import Job, Optimizer
from pipedejavu.engine.device import device_of
from pipedejavu.engine.padding import without_padding
from pipedejavu.facts import InputError, Machine, Profile, format_seconds
from pipedejavu.facts.measurement import MEASURE_S
from pipedejavu.facts.printable import tell
from pipedejavu.model_check.check import Checked, Sample
from pipedejavu.model_check.check import check_model as check_units
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.compile_choice import CompileMode, settle_compile
from pipedejavu.planner.measure import explain_estimates, measure
from pipedejavu.planner.planning import choose_plan, kept_profile, known_machine, measure_setups, most_samples
from pipedejavu.planner.precision_choice import with_precision
from pipedejavu.planner.profiling import choose_sizes, divisible, measure_with
from pipedejavu.planner.worker_host import WorkerHost, devices_to_measure, make_machine, read_worker_hosts, torch_device
from pipedejavu.profile import ModelCut, TimeBudget, UnitSample, cut_model, make_samples
from pipedejavu.profile.sequential import Units
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.program.tp_group import written_out
from pipedejavu.run.measure_bar import show_measuring
from pipedejavu.runtime.compiled_unit import UnitCompiler
from pipedejavu.search import RankedPlan, SearchOptions
from pipedejavu.session.batch_split import BatchSplit
from pipedejavu.session.torch_optimizer import check_whole_state, kinds_of_whole
from pipedejavu.session.trainer_ranks import TrainerRanks
from pipedejavu.simulate import check_fit, simulate
from pipedejavu.source.loss_reduction import Loss, Reduction, find_reduction, own_loss
from pipedejavu.source.precision import trained_dtype
from pipedejavu.source.task import loss_of
from pipedejavu.source.user_batch import UserBatch

OptimizerOf = Callable[[Units], Optimizer]
_SUM = (
    "the loss is a sum over samples, and a step divides it by their number, which a plain loop does not: the learning"
    " rate and the clip norm are those of a mean"
)


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
    precision: str = "auto"
    compile: CompileMode = "auto"
    head_chunks: int | None = None
    clip_norm: float | None = None
    measure_budget_s: float = MEASURE_S
    ranks: TrainerRanks | None = None
    """The ranks that are the workers; None if they are threads."""


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
        self.compiler = UnitCompiler()
        """Compiles alike units once, for the measurement and for the workers."""
        self.budget = TimeBudget(options.measure_budget_s)
        self._known: ModelCut | None = None
        """The first cut; the units of all later ones that begin alike are the same modules."""

    def prepare(self, first: UserBatch, reduction: Reduction) -> PreparedModel:
        """Cuts the model, searches for a plan if none is given, compiles it and checks the units.

        On several ranks the first plans, and the others take its plan.
        """
        ranks = self.options.ranks
        if reduction.kind == "sum" and (ranks is None or ranks.rank == 0):
            tell(_SUM)
        if ranks is None:
            return self._prepare(first, reduction)
        hosts = ranks.group.worker_hosts()
        prepared, failed, handed = None, "", ""
        if ranks.rank == 0:
            try:
                prepared = self._prepare(first, reduction, hosts)
                program = prepared.program
                handed = json.dumps([part.to_json() for part in (program.plan, program.profile, program.machine)])
            except InputError as error:
                failed = str(error)
        if failed := ranks.broadcast_text(failed):
            raise InputError(failed)
        parts = json.loads(ranks.broadcast_text(handed))
        return prepared or self._prepare_as(first, reduction, parts)

    def _prepare_as(self, first: UserBatch, reduction: Reduction, parts: Sequence[str]) -> PreparedModel:
        """Cuts the model and compiles the plan as the first rank has, given its plan, profile and machine."""
        plan, profile, machine = Plan.from_json(parts[0]), Profile.from_json(parts[1]), Machine.from_json(parts[2])
        batch = BatchSplit(first, _sizes(plan), reduction, pads=may_pad(plan))
        cut = batch.cut = self._cut(batch.own_inputs(0), plan.cut.begins)
        summed = without_padding(reduction.summed(self.loss))
        job = self._job(cut, summed)
        program = compile_plan(plan, profile, machine, fold=False)
        return PreparedModel(cut, job, program, batch, is_searched=False)

    def _prepare(self, first: UserBatch, reduction: Reduction, hosts: Sequence[WorkerHost] = ()) -> PreparedModel:
        options = self.options
        summed = without_padding(reduction.summed(self.loss))
        best = None
        if options.plan == "auto" and options.ranks is not None:
            prepared = self._fastest_on_ranks(options.ranks.size, first, reduction, summed, hosts)
        else:
            best = self._search(summed, BatchSplit(first, (1,), reduction)) if options.plan == "auto" else None
            plan = written_out(_sized(best.plan if best else options.plan, options.workers))
            prepared = self._prepare_plan(plan, best, first, reduction, summed, hosts)
        if options.check_model:
            self._check(prepared, summed)
        return prepared

    def _fastest_on_ranks(
        self,
        size: int,
        first: UserBatch,
        reduction: Reduction,
        summed: Callable[[Any, Any], Tensor],
        hosts: Sequence[WorkerHost],
    ) -> PreparedModel:
        """Returns the synchronous plan for that many ranks with the shortest forecast of a step, of those that fit."""
        times: dict[str, float] = {}
        fastest, fault = None, InputError("there is no plan")
        for name, plan in _plans_of(size).items():
            try:
                prepared = self._prepare_plan(plan, None, first, reduction, summed, hosts)
                prediction = simulate(prepared.program)
                check_fit(prediction)
            except InputError as error:  # too few units for the stages, or too little memory
                fault = error
                continue
            times[name] = prediction.makespan_s
            if fastest is None or times[name] == min(times.values()):
                fastest = name, prepared
        if fastest is None:
            raise fault
        name, prepared = fastest
        others = ", ".join(f"{other} {format_seconds(time_s)}" for other, time_s in times.items() if other != name)
        tell(
            f"plan for {size} ranks: {name}, forecast {format_seconds(times[name])} per step"
            f"{f' ({others})' if others else ''}"
        )
        return prepared

    def _prepare_plan(
        self,
        plan: Plan,
        best: RankedPlan | None,
        first: UserBatch,
        reduction: Reduction,
        summed: Callable[[Any, Any], Tensor],
        hosts: Sequence[WorkerHost],
    ) -> PreparedModel:
        """Cuts the model for a plan and compiles it; measures what a search has not."""
        options = self.options
        if plan.version.flushed_updates:
            raise InputError(
                f"plan '{plan.name}' flushes its first {plan.version.flushed_updates} updates, and a Trainer repeats"
                " one program; leave version.flushed_updates out, or run the plan with 'pipedejavu train'"
            )
        if options.head_chunks is not None:
            plan = plan.replace(order=plan.order.replace(head_chunks=options.head_chunks))
        if options.clip_norm is not None and plan.reduce.clip == "none":
            plan = plan.replace(reduce=plan.reduce.replace(clip="global"))
        if options.ranks is not None and plan.num_workers != options.ranks.size:
            raise InputError(
                f"the plan has {plan.num_workers} workers and {options.ranks.size} ranks were started; start one for"
                " each"
            )
        batch = BatchSplit(first, _sizes(plan), reduction, pads=may_pad(plan))
        cut = batch.cut = self._cut(batch.own_inputs(0), plan.cut.begins)
        job = self._job(cut, summed)
        check_whole_state(job.optimizer, plan)
        if best is not None:
            program = compile_plan(plan, best.profile, best.machine, fold=False)
        else:
            program = _measure_and_compile(job, plan, batch, options, hosts, self.budget)
        return PreparedModel(cut, job, program, batch, best is not None)

    def _cut(self, inputs: Any, begins: Sequence[int] = ()) -> ModelCut:
        """Returns the model as units that take inputs of this shape; traces each shape once."""
        if self._known is not None and (not begins or tuple(begins) == self._known.begins):
            self._known.fit(inputs)
            return self._known
        cut = cut_model(self.model, inputs, begins)
        self._known = self._known or cut
        return cut

    def _job(self, cut: ModelCut, summed: Callable[[Any, Any], Tensor]) -> Job:
        options, optimizer = self.options, self.optimizer(cut.units)
        loss = loss_of(cut, summed)
        return Job(
            units=cut.units,
            loss=loss,
            optimizer=optimizer,
            seed=options.seed,
            clip_norm=options.clip_norm,
            graphs=unit_graphs,
            compiler=self.compiler,
        )

    def _check(self, prepared: PreparedModel, summed: Callable[[Any, Any], Tensor]) -> None:
        """Raises InputError if the units compute something else than the model."""
        cut, job, program, batch, _ = prepared
        both = [Sample(batch.own_inputs(n), batch.targets(n)) for n in (0, len(batch.sizes) - 1)]
        if remark := check_units(Checked(self.model, cut, job, summed, program, both), device_of(program, 0)):
            tell(remark)

    def _search(self, loss: Callable[[Any, Any], Tensor], batch: BatchSplit) -> RankedPlan:
        """Measures the model on all devices of this machine; returns the best plan for batches like the sample."""
        machine = self.options.machine or known_machine()
        clip: Literal["none", "global"] = "none" if self.options.clip_norm is None else "global"
        wanted = self._precision(machine)
        clip = "global" if wanted.reduce.clip == "global" else clip
        question = SearchOptions(
            batch=batch.size, clip=clip, head_chunks=self.options.head_chunks, precision=wanted.precision
        )
        best = choose_plan(self._measure(loss, batch, machine), machine, question)

        devices = [best.machine.device(name) for name in assign_devices(best.plan, best.machine)]
        used = {device.kind for device in devices}
        self.compiler.has_parameters = len(devices) == 1 and devices[0].type == "gpu"

        def measure_units(is_compiled: bool) -> Profile:
            return self._measure(loss, batch, machine, used, is_compiled=is_compiled, most=best.plan.feed.samples)

        chosen = settle_compile(best.plan, best.profile, best.machine, self.options.compile, measure_units)
        plan = chosen.plan.replace(decisions=(*chosen.plan.decisions, *explain_estimates(chosen.profile)))
        return best.replace(plan=plan, profile=chosen.profile)

    def measure(self, first: UserBatch, reduction: Reduction) -> Profile:
        """Measures the model on all devices of this machine, for microbatches of up to as many samples as a batch."""
        machine = self.options.machine or known_machine()
        return self._measure(reduction.summed(self.loss), BatchSplit(first, (1,), reduction), machine)

    def _measure(
        self,
        loss: Callable[[Any, Any], Tensor],
        batch: BatchSplit,
        machine: Machine,
        only: Collection[str] = (),
        *,
        is_compiled: bool = False,
        most: int | None = None,
    ) -> Profile:
        """Returns the profile on each kind of device of a machine, or on those in `only`, from the cache or measured.

        Compiled units are measured at one size: the plan's, or the largest that is measured.
        """
        setups = measure_setups(machine)
        setups = tuple(setup for setup in setups if setup.kind in only) or setups
        largest = most_samples(batch.size, setups)
        most = largest if most is None else min(largest, most)
        sizes = [most] if is_compiled else [size for size in choose_sizes(most) if size <= batch.size]
        cut = batch.cut = self._cut(batch.own_head(sizes[-1]))
        job, precision = self._job(cut, loss), self._precision(machine).precision

        budget = self.budget

        def measure() -> Profile:
            unit_samples = make_samples(lambda size: UnitSample(cut.units, *batch.head(size), job.loss), sizes)
            with show_measuring(lambda: budget.spent_share) as report:
                profile = measure_with(
                    *("model", unit_samples, job, setups, report),
                    precision=precision,
                    is_compiled=is_compiled,
                    budget=budget,
                )
            profile = profile.replace(begins=cut.begins)
            return profile if kinds_of_whole(job.optimizer) else divisible(profile, unit_samples[-1], machine)

        settings = {"sizes": sizes, "ways": setups, "precision": str(precision), "is_compiled": is_compiled}
        return kept_profile(job, batch.head(sizes[-1]), settings | {"budget": budget.total_s}, measure)

    def _precision(self, machine: Machine) -> Plan:
        """Returns a plan with the precision of the plans to search."""
        return with_precision(Plan(), self.options.precision, machine.devices, dtype=trained_dtype(self.model))


def may_pad(plan: Plan) -> bool:
    """Whether a batch may have fewer samples than the plan has microbatches: if all add up to one update."""
    return plan.version.kind == "sync" and not plan.feed.is_own and plan.reduce.combiner == "sum"


def _sized(plan: str | Plan, workers: int) -> Plan:
    """Returns a plan, or a preset by name with that many workers; a synchronous plan makes one update per step."""
    if isinstance(plan, str):
        plan = preset(plan.removeprefix("preset:")).at(workers=workers, microbatches=4)
    return plan if plan.version.kind != "sync" else plan.replace(steps=1)


def _plans_of(size: int) -> dict[str, Plan]:
    """Returns the synchronous plans for that many workers: replicas, and pipelines of each length, by name."""
    plans = {"ddp": preset("ddp").at(workers=size, microbatches=1)}
    for stages in (count for count in range(2, size + 1) if size % count == 0):
        copies = size // stages
        name = f"1f1b of {stages} stages" + (f" in {copies} copies" if copies > 1 else "")
        plans[name] = preset("1f1b").at(workers=stages, replicas=copies, microbatches=2 * stages)
    return {name: _sized(plan, size) for name, plan in plans.items()}


def _sizes(plan: Plan) -> tuple[int, ...]:
    """Returns equal sizes of all microbatches of a step."""
    return (1,) * (plan.feed.microbatches * _copies(plan) * plan.steps)


def _measure_and_compile(
    job: Job,
    plan: Plan,
    batch: BatchSplit,
    options: TrainerOptions,
    hosts: Sequence[WorkerHost],
    budget: TimeBudget,
) -> Program:
    """Measures a job at the microbatch size of a batch, and compiles the plan for it."""
    plan = plan.replace(feed=plan.feed.replace(samples=batch.length(0)))
    plan, machine = _place(plan, options.machine, hosts)
    devices = [machine.device(name) for name in assign_devices(plan, machine)]
    dtype = trained_dtype(nn.ModuleList(module for _, module in job.units))
    plan = with_precision(plan, options.precision, devices, dtype=dtype)
    kinds = _kinds(plan, machine)

    def measure_units(is_compiled: bool) -> Profile:
        load = lambda numbers: batch.head(len(numbers))  # noqa: E731

        def make() -> Profile:
            return measure("model", job, plan, batch.head, load, kinds, is_compiled=is_compiled, budget=budget)

        settings: dict[str, object] = {"feed": (plan.feed.kind, plan.feed.samples), "precision": str(plan.precision)}
        settings |= {"kinds": kinds, "is_compiled": is_compiled, "budget": budget.total_s}
        return kept_profile(job, batch.head(plan.feed.samples), settings, make)

    plan, profile = settle_compile(plan, None, machine, options.compile, measure_units)
    plan = plan.replace(decisions=(*plan.decisions, *explain_estimates(profile)))
    return compile_plan(plan, profile, machine, fold=False)


def _place(plan: Plan, machine: Machine | None, hosts: Sequence[WorkerHost]) -> tuple[Plan, Machine]:
    """Returns a plan, and a machine with a device for each of its workers; `hosts` are those of ranks."""
    if machine is None:
        return make_machine(plan, hosts or read_worker_hosts(plan.num_workers), "auto")
    return plan, machine.divided(plan.num_workers) if plan.place.devices is None else machine


def _kinds(plan: Plan, machine: Machine) -> dict[str, torch.device]:
    """Returns the torch device on which each kind of device of a plan is measured."""
    devices = devices_to_measure(plan, machine, assign_devices(plan, machine))
    return {kind: torch_device(machine, name) for kind, (_, name) in devices.items()}


def _copies(plan: Plan) -> int:
    return 1 if plan.feed.kind == "share" else plan.data_replicas
