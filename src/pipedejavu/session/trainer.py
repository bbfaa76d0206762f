"""The Trainer: trains under a plan from the user's own loop, with the workers as threads of the user's process."""

import json
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, Job, Optimizer, Threads
from pipedejavu.engine.device import device_of
from pipedejavu.engine.engine_state import final_buffers, take_all
from pipedejavu.engine.replicas import ReplicaCheck
from pipedejavu.facts import InputError, Machine
from pipedejavu.facts.printable import tell
from pipedejavu.health.failure import WorkerError
from pipedejavu.health.watchdog import HangWatchdog
from pipedejavu.model_check.check import Checked, Sample
from pipedejavu.model_check.check import check_model as check_units
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.measure import measure
from pipedejavu.planner.planning import MOST_SAMPLES, choose_plan, known_machine, measure_setups
from pipedejavu.planner.profiling import choose_sizes, measure_with
from pipedejavu.planner.replan import PlanSwitch, Replanner, find_switch
from pipedejavu.planner.worker_host import devices_to_measure, make_machine, read_worker_hosts, torch_device
from pipedejavu.profile import UnitSample, cut_model, make_samples
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.run.run_folder import result_of
from pipedejavu.run.saved_facts import check_finite
from pipedejavu.run.throughput import ThroughputMonitor
from pipedejavu.run.whole_state import WholeState
from pipedejavu.search import RankedPlan, SearchOptions
from pipedejavu.session.batch_split import BatchSplit
from pipedejavu.session.training_session import ThreadWorkers, TrainingSession
from pipedejavu.simulate import Prediction, check_fit, simulate
from pipedejavu.source.loss_reduction import Reduction, find_reduction, own_loss
from pipedejavu.source.precision import check_autocast, check_parameters
from pipedejavu.source.task import loss_of
from pipedejavu.source.user_batch import UserBatch
from pipedejavu.store import CheckpointDir, Saver


class Trainer:
    """Trains a model step by step under a plan.

    A step of a synchronous plan makes one update. A step of any other plan makes `plan.steps` updates and drains the
    pipeline; the next step starts from the newest weights.

    `loss` takes the model's output and the targets. It returns a mean over samples or over the labels that count, or a
    sum, which a step divides by the number of samples; the Trainer finds out which on the sample. With None, the loss
    is the attribute `loss` of the model's output.

    `sample` is a batch like those to come: (inputs, targets), with inputs a tensor, a tuple of arguments or a mapping
    of keyword arguments; or, if the model returns its own loss, that mapping alone. Each may hold tuples, lists and
    dicts of tensors. A plan that scores contributions scores them on the last microbatch of the sample, which should
    therefore not be trained on.

    With the plan "auto" the model is measured on all devices of this machine, and the planner searches for the best
    plan for batches like the sample; `workers` is ignored. If workers become slower or faster than forecast, the
    planner searches again in the background, and the next step switches to a plan that pays; `replan=False` keeps the
    first plan.

    A model that is not a chain is traced again for each new microbatch size.

    Before the first step, copies of the model and of its units run the sample; a model whose units compute something
    else is refused. `check_model=False` skips this.

    If an action takes longer than `hang_after_s` (0: no limit; None: a limit far above the forecast of a step), `step`
    raises a WorkerError that names the action and its line of code. The Trainer cannot be used after that.

    Replicas that share every update must hold equal weights. They are compared every `check_replicas` updates (0:
    never), before each checkpoint and before `save_to_model`. A WorkerError names the replica that differs; `load` then
    restores the last checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
        *,
        sample: Any,
        plan: str | Plan = "1f1b",
        workers: int = 2,
        optimizer: Optimizer | None = None,
        seed: int = 0,
        machine: Machine | None = None,
        replan: bool = True,
        hang_after_s: float | None = None,
        check_replicas: int = 50,
        check_model: bool = True,
    ):
        check_autocast("Trainer()")
        check_parameters(model)
        self.model = model
        self.samples = 0
        """Samples trained on so far."""
        self._steps = 0
        self._losses: list[float] = []
        self._saver: Saver | None = None
        optimizer = optimizer or AdamW(lr=1e-3)
        first, reduction = _read(model, loss, sample)
        summed = reduction.summed(loss or own_loss)
        best = (
            _search(model, summed, BatchSplit(first, (1,), reduction), optimizer, machine) if plan == "auto" else None
        )
        plan = _sized(best.plan if best else plan, workers)
        batch = BatchSplit(first, (1,) * (plan.feed.microbatches * _copies(plan) * plan.steps), reduction)
        cut = batch.cut = cut_model(model, batch.own_inputs(0), plan.cut.begins)
        self.units = cut.units
        self._cut = cut
        self._whole = WholeState(model, cut.units)
        self._is_stale = False
        model.register_state_dict_pre_hook(_Refresh(weakref.ref(self)))  # type: ignore[no-untyped-call]
        self._job = Job(units=cut.units, loss=loss_of(cut, summed), optimizer=optimizer, seed=seed)
        self._switch: PlanSwitch | None = None
        self._replanner: Replanner | None = None
        self._replans, self._hang_after_s = replan and best is not None, hang_after_s
        self._check_every = check_replicas
        if best is not None:
            program = compile_plan(plan, best.profile, best.machine, fold=False)
        else:
            program = _measure_and_compile(self._job, plan, batch, machine)
        if check_model:
            both = [Sample(batch.own_inputs(n), batch.targets(n)) for n in (0, len(batch.sizes) - 1)]
            checked = Checked(model, cut, self._job, summed, program, both)
            if remark := check_units(checked, device_of(program, 0)):
                tell(remark)
        self.batch = batch
        self._start(program, first)
        self.batch.held_out = BatchSplit(first, self.batch.sizes, reduction, cut)

    def _start(self, program: Program, batch: UserBatch) -> None:
        """Starts the workers of a program, for batches like this one."""
        self.program = program
        prediction = self.predict()
        check_fit(prediction)
        self.batch = BatchSplit(batch, program.sizes * program.plan.steps, self.batch.reduction, self._cut)
        self.threads = Threads(program, self._job, self.batch)
        self.batch.cuts = [replace(self._cut, units=worker.job.units) for worker in self.threads.handlers]
        replicas = ReplicaCheck(program, self._job, self._check_every)
        self._session = TrainingSession(ThreadWorkers(self.threads), replicas, self._whole)
        self._start_watchdogs(prediction.makespan_s / program.plan.steps)
        if self._replans and len(program.workers) > 1:
            self._replanner = Replanner(ThroughputMonitor(program), self._find_switch, self._request_switch)
        else:
            self._replanner = None

    def _find_switch(self, slowdowns: Sequence[float]) -> PlanSwitch | None:
        """Searches for a plan that pays; assumes that as many steps follow as were made, since the end is unknown."""
        return find_switch(self.program, slowdowns, self._steps, start_s=0.0)

    def _request_switch(self, switch: PlanSwitch) -> None:
        self._switch = switch
        tell(switch.reason)

    def _switch_plan(self, switch: PlanSwitch, batch: UserBatch) -> None:
        """Replaces the workers by those of another plan, with the same state."""
        self._switch = None
        state, updates = take_all(self.threads), self.updates
        del self.threads, self._session  # a GPU may not have memory for both
        self._start(compile_plan(switch.plan, switch.profile, switch.machine, fold=False), batch)
        self._session.workers.put_state(updates, state.get, None)
        self._session.replicas.agreed = updates

    def _start_watchdogs(self, forecast_s: float) -> None:
        """Starts a watchdog over the lanes of each worker, given the forecast of an update.

        It stops when the threads are freed.
        """
        end = partial(_give_up, weakref.ref(self.threads))
        for worker in self.threads.handlers:
            watchdog = HangWatchdog(worker.index, end, option="hang_after_s")
            watchdog.allow(forecast_s, self._hang_after_s)
            worker.notice = watchdog.notice
            weakref.finalize(self.threads, watchdog.stop)

    def predict(self) -> Prediction:
        """Returns the prediction of a step."""
        return simulate(self.program)

    def step(self, batch: Any) -> float:
        """Trains on one batch; returns its mean loss."""
        check_autocast("Trainer.step()")
        if self._switch is not None:
            self._switch_plan(self._switch, self.batch.batch)
        self._is_stale = False  # tracing a new batch shape reads the model's state
        try:
            self.batch.take(batch, first=self.threads.updates * self.program.update_size)
        finally:
            self._is_stale = True
        start_s = time.perf_counter()
        spans = self.threads.run()
        self._steps += 1
        if self._session.replicas.is_due(self.updates, self.program.plan.steps):
            self._check_replicas()
        if self._replanner is not None:
            self._replanner.throughput.take_round(time.perf_counter() - start_s, spans)
            self._replanner.look()
        losses = [loss for worker in self.threads.handlers for loss in worker.log.losses.values()]
        for worker in self.threads.handlers:
            worker.log.forget_losses()
        self.samples += self.batch.size
        self._losses.append(sum(losses) / sum(self.batch.counts))
        return self._losses[-1]

    def _check_replicas(self) -> None:
        """Raises WorkerError if replicas that share every update hold different weights."""
        if sentence := self._session.compare_replicas(self.updates):
            raise WorkerError(sentence)

    @property
    def updates(self) -> int:
        """Updates made so far, including those of a checkpoint that was loaded."""
        return self.threads.updates

    def save(self, folder: str | Path) -> None:
        """Copies the state and starts writing it to a folder of checkpoints, while training goes on.

        The folder keeps the newest two checkpoints and the one with the lowest loss. `wait` returns once all is on
        disk. Raises InputError if the state is not finite, and after a failed step the error of that step.
        """
        if self.threads.failure is not None:
            raise self.threads.failure
        self._check_replicas()
        if self._saver is None or self._saver.checkpoint_dir.path != Path(folder):
            self.wait()
            self._saver = Saver(CheckpointDir(folder), tell=tell)
        about = {
            "samples": self.samples,
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "plan": json.loads(self.program.plan.to_json()),
            "facts": {"norm": self._session.take_norm()},
        }
        tensors = self._session.take_state()
        self._losses.clear()
        self._saver.save(self.updates, tensors, lambda: about)

    def wait(self) -> None:
        """Waits until all saved checkpoints are on disk."""
        if self._saver is not None:
            self._saver.wait()

    def load(self, folder: str | Path, *, allow_restart: bool = False) -> int:
        """Loads the newest complete checkpoint, saved under this plan or any other; returns its number of updates.

        Returns 0 if the folder never had one. A damaged checkpoint is reported and set aside. Raises CheckpointError if
        one cannot be read for another reason, or if all are damaged and `allow_restart` is not set. Afterwards
        `samples` is the number of samples trained on; the loop goes on with the next one.
        """
        self.wait()
        checkpoint = CheckpointDir(folder).newest(tell, allow_restart=allow_restart)
        if checkpoint is None:
            return 0
        check_finite(checkpoint, CheckpointDir(folder))
        self._session.restore(checkpoint)
        self.samples, self._is_stale = checkpoint.manifest.samples, True
        return checkpoint.step

    def save_to_model(self) -> nn.Module:
        """Copies the trained weights and buffers into the user's model and returns it.

        `state_dict()` of the model calls it when needed. After a failed step it raises the error of that step.
        """
        if self.threads.failure is not None:  # some workers may have made an update that others have not
            raise self.threads.failure
        self._check_replicas()
        self._is_stale = False
        trained = result_of(self.program, self.threads.outcome().weights)
        for worker in self.threads.handlers:
            trained |= final_buffers(worker)
        targets = [
            *(pair for unit, m in self.units for pair in m.named_parameters(unit, remove_duplicate=False)),
            *(pair for unit, m in self.units for pair in m.named_buffers(unit, remove_duplicate=False)),
        ]
        with torch.no_grad():
            for name, tensor in targets:
                if name in trained:
                    tensor.copy_(trained[name])
        return self.model


class _Refresh:
    """A hook that copies the trained weights into the user's model before its `state_dict` is read.

    Copies and pickles of the model have a hook that does nothing.
    """

    def __init__(self, trainer: Callable[[], Trainer | None] = lambda: None):
        self.trainer = trainer

    def __call__(self, *_: object) -> None:
        trainer = self.trainer()
        if trainer is not None and trainer._is_stale:
            trainer.save_to_model()

    def __reduce__(self) -> tuple[type["_Refresh"], tuple[()]]:
        return _Refresh, ()


def _sized(plan: str | Plan, workers: int) -> Plan:
    """Returns a plan, or a preset by name with that many workers; a synchronous plan makes one update per step."""
    if isinstance(plan, str):
        plan = preset(plan.removeprefix("preset:")).at(workers=workers, microbatches=4)
    return plan if plan.version.kind != "sync" else plan.replace(steps=1)


def _measure_and_compile(job: Job, plan: Plan, batch: BatchSplit, machine: Machine | None) -> Program:
    """Measures a job at the microbatch size of a batch, and compiles the plan for it."""
    plan = plan.replace(feed=plan.feed.replace(samples=batch.length(0)))
    plan, machine = _place(plan, machine)
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


def _give_up(threads: "weakref.ref[Threads]", trace: str, sentence: str) -> None:
    if running := threads():
        error = WorkerError(sentence)
        error.add_note(f"There it is in the code:\n{trace}")
        running.give_up(error)


def _read(model: nn.Module, loss: Callable[[Any, Any], Tensor] | None, sample: Any) -> tuple[UserBatch, Reduction]:
    """Returns the sample as a batch, and how the loss is reduced over samples."""
    batch = UserBatch.of(sample, has_own_loss=loss is None)
    try:
        reduction, batch = find_reduction(model, loss or own_loss, batch.readings())
    except InputError:
        raise
    except Exception:
        cut_model(model, batch.inputs)  # raises an error with the line of the model that fails, if it is the model
        raise
    return batch, reduction


def _search(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: BatchSplit,
    optimizer: Optimizer,
    machine: Machine | None,
) -> RankedPlan:
    """Measures a model on all devices of this machine; returns the best plan for batches like the sample."""
    machine = machine or known_machine()
    sizes = [size for size in choose_sizes(min(batch.size, MOST_SAMPLES)) if size <= batch.size]
    cut = batch.cut = cut_model(model, batch.own_head(sizes[-1]))
    job = Job(units=cut.units, loss=loss_of(cut, loss), optimizer=optimizer)
    unit_samples = make_samples(lambda size: UnitSample(cut.units, *batch.head(size), job.loss), sizes)
    profile = measure_with("model", unit_samples, job, measure_setups(machine), lambda text: None)  # noqa: ARG005
    return choose_plan(profile.replace(begins=cut.begins), machine, SearchOptions(batch=batch.size))


def _copies(plan: Plan) -> int:
    return 1 if plan.feed.kind == "share" else plan.place.replicas
