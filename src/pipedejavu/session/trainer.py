"""The Trainer: a user's own loop over a plan, with the workers as threads of the user's process."""

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
from pipedejavu.engine.engine_state import final_buffers, put_all, take_all, take_norm
from pipedejavu.engine.replicas import ReplicaCheck
from pipedejavu.facts import InputError, Machine
from pipedejavu.facts.printable import tell
from pipedejavu.health.failure import WorkerError
from pipedejavu.health.watchdog import HangWatchdog
from pipedejavu.model_check.check import Checked, Sample
from pipedejavu.model_check.check import check_model as check_units
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.measure import measure
from pipedejavu.planner.planning import MOST_SAMPLES, choose_plan, known_machine, ways_of
from pipedejavu.planner.profiling import choose_sizes, measure_ways
from pipedejavu.planner.replan import PlanSwitch, Replanner, find_switch
from pipedejavu.planner.worker_host import devices_to_measure, make_machine, read_worker_hosts, torch_device
from pipedejavu.profile import UnitSample, cut_model, make_samples
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.run.run_folder import result_of
from pipedejavu.run.saved_facts import check_finite, current_gpu, random_state, saved_in, set_random_state
from pipedejavu.run.throughput import ThroughputMonitor
from pipedejavu.run.whole_state import WholeState
from pipedejavu.search import RankedPlan, SearchOptions
from pipedejavu.session.batch_split import BatchSplit
from pipedejavu.simulate import Prediction, check_fit, simulate
from pipedejavu.source.loss_reduction import Reduction, find_reduction, own_loss
from pipedejavu.source.precision import check_autocast, check_parameters
from pipedejavu.source.task import loss_of
from pipedejavu.source.user_batch import UserBatch
from pipedejavu.store import CheckpointDir, Saver


class Trainer:
    """Trains a model step by step.

    A step of a synchronous plan makes one update. A step of any other makes as many as the plan's `steps`, drains the
    pipeline, and starts the next from the newest weights: a loop of the user's own has that border.

    `loss` takes the model's output and the targets and returns a mean over samples, or over labels that count, or a
    sum, which a step divides once by the number of samples; which of them it is is found out on the sample. With None
    it is the model's own loss, which its output has as `loss`.
    `sample` is a batch like those to come: (inputs, targets), where inputs are a tensor, a tuple of arguments or a
    mapping of keyword arguments; or, for a model's own loss, that mapping alone. Each may hold tuples, lists and dicts
    of tensors. A plan that scores contributions scores them on its last microbatch, so it should be one that is not
    trained on.

    With the plan "auto" the model is measured on all that is here, and the best plan for batches like the sample is
    searched for; `workers` is then not looked at. Where workers leave the pace of their forecast, the planner is asked
    again beside training, and a plan that pays is taken from the next step on; `replan=False` keeps the first.

    A model that is no chain is recorded once more for each new size of a microbatch.

    Before the first step copies of the model and of the units that it is cut into run the sample; a model whose units
    compute something else is refused (`check_model=False` leaves that out).

    An action that lasts longer than `hang_after_s` (0: for ever; None: far longer than a step should) lets `step` raise
    a WorkerError that names it and says where in the code it is; the trainer is then of no more use.

    Replicas that share every update must hold equal weights. They are compared every `check_replicas` updates (0:
    never), before a checkpoint and before `save_to_model`. A WorkerError names the replica that differs; `load` goes on
    from the last checkpoint.
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
        """Samples that were trained on."""
        self._steps = 0
        self._losses: list[float] = []
        self._saver: Saver | None = None
        optimizer = optimizer or AdamW(lr=1e-3)
        first, reduction = _read(model, loss, sample)
        summed = reduction.summed(loss or own_loss)
        found = (
            _search(model, summed, BatchSplit(first, (1,), reduction), optimizer, machine) if plan == "auto" else None
        )
        if found is not None:
            plan, machine = found.plan, found.machine
        elif isinstance(plan, str):
            plan = preset(plan.removeprefix("preset:")).at(workers=workers, microbatches=4)
        assert isinstance(plan, Plan)
        plan = plan if plan.version.kind != "sync" else plan.replace(steps=1)
        batch = BatchSplit(first, (1,) * (plan.feed.microbatches * _copies(plan) * plan.steps), reduction)
        samples = batch.length(0)
        cut = batch.cut = cut_model(model, batch.own_inputs(0), plan.cut.begins)
        self.units = cut.units
        self._cut = cut
        self._whole = WholeState(model, cut.units)
        self._is_stale = False
        model.register_state_dict_pre_hook(_Refresh(weakref.ref(self)))  # type: ignore[no-untyped-call]
        self._job = Job(units=cut.units, loss=loss_of(cut, summed), optimizer=optimizer, seed=seed)
        if found is not None:
            profile = found.profile
        else:
            plan = plan.replace(feed=plan.feed.replace(samples=samples))
            plan, machine = _place(plan, machine)
            profile = measure(
                "model", self._job, plan, batch.head, lambda numbers: batch.head(len(numbers)), _kinds(plan, machine)
            )
        assert machine is not None
        self._switch: PlanSwitch | None = None
        self._pilot: Replanner | None = None
        self._replans, self._hang_after_s = replan and found is not None, hang_after_s
        self._check_every = check_replicas
        program = compile_plan(plan, profile, machine, fold=False)
        if check_model:
            both = [Sample(batch.own_inputs(n), batch.targets(n)) for n in (0, len(batch.sizes) - 1)]
            checked = Checked(model, cut, self._job, summed, program, both)
            if remark := check_units(checked, device_of(program, 0)):
                tell(remark)
        self.batch = batch
        self._begin(program, first)
        self.batch.held_out = BatchSplit(first, self.batch.sizes, reduction, cut)

    def _begin(self, program: Program, batch: UserBatch) -> None:
        """Lets a program's workers begin, with batches like this one."""
        self.program = program
        check_fit(self.predict())
        self.batch = BatchSplit(batch, program.sizes * program.plan.steps, self.batch.reduction, self._cut)
        self.threads = Threads(program, self._job, self.batch)
        self.batch.cuts = [replace(self._cut, units=own.job.units) for own in self.threads.handlers]
        self._replicas = ReplicaCheck(program, self._job, self._check_every)
        self._keep_vigil()
        if self._replans and len(program.workers) > 1:
            self._pilot = Replanner(ThroughputMonitor(program), self._ask, self._turn)
        else:
            self._pilot = None

    def _ask(self, slowdowns: Sequence[float]) -> PlanSwitch | None:
        """Asks the planner; nobody says how long the loop goes on, so it is taken to be half-way."""
        return find_switch(self.program, slowdowns, self._steps, start_s=0.0)

    def _turn(self, switch: PlanSwitch) -> None:
        self._switch = switch
        tell(switch.reason)

    def _go_on(self, switch: PlanSwitch, batch: UserBatch) -> None:
        """Exchanges the workers for those of another plan, which take over the state."""
        self._switch = None
        state, updates = take_all(self.threads), self.updates
        del self.threads  # a GPU has no room for both
        self._begin(compile_plan(switch.plan, switch.profile, switch.machine, fold=False), batch)
        put_all(self.threads, updates, state.get)
        self._replicas.agreed = updates

    def _keep_vigil(self) -> None:
        """Watches over each worker's lanes for as long as there is somebody to tell."""
        end = partial(_give_up, weakref.ref(self.threads))
        forecast_s = self.predict().makespan_s / self.program.plan.steps
        for own in self.threads.handlers:
            watchdog = HangWatchdog(own.index, end, option="hang_after_s")
            watchdog.allow(forecast_s, self._hang_after_s)
            own.notice = watchdog.notice
            weakref.finalize(self.threads, watchdog.stop)

    def predict(self) -> Prediction:
        """Returns what a step is predicted to look like."""
        return simulate(self.program)

    def step(self, batch: Any) -> float:
        """Trains on one batch; returns its mean loss."""
        check_autocast("Trainer.step()")
        if self._switch is not None:
            self._go_on(self._switch, self.batch.batch)
        self._is_stale = False  # while the model may be recorded, which reads its state
        try:
            self.batch.take(batch, first=self.threads.updates * self.program.update_size)
        finally:
            self._is_stale = True
        begun_s = time.perf_counter()
        spans = self.threads.run()
        self._steps += 1
        if self._replicas.is_due(self.updates, self.program.plan.steps):
            self._check_replicas()
        if self._pilot is not None:
            self._pilot.pace.take_round(time.perf_counter() - begun_s, spans)
            self._pilot.look()
        losses = [loss for own in self.threads.handlers for loss in own.log.losses.values()]
        for own in self.threads.handlers:
            own.log.forget_losses()
        self.samples += self.batch.size
        self._losses.append(sum(losses) / sum(self.batch.counts))
        return self._losses[-1]

    def _check_replicas(self) -> None:
        """Raises WorkerError if replicas that share every update hold different weights."""
        if sentence := self._replicas.find(self.updates, self.threads.handlers):
            raise WorkerError(sentence)

    @property
    def updates(self) -> int:
        """Updates that were made, in this process or before the checkpoint that was loaded."""
        return self.threads.updates

    def save(self, folder: str | Path) -> None:
        """Copies the state and begins to write it to a folder of checkpoints, beside training.

        The newest two stay, and the one whose steps had the lowest loss. `wait` returns when it is on the disk. Raises
        InputError for a state that is not finite, and after a step that has failed what that raised.
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
            "facts": {"norm": take_norm(self.threads.handlers[0])},
        }
        tensors = take_all(self.threads) | random_state(device=current_gpu())
        self._losses.clear()
        self._saver.save(self.updates, self._whole.saved_rest() | tensors, lambda: about)

    def wait(self) -> None:
        """Waits until what was saved is on the disk."""
        if self._saver is not None:
            self._saver.wait()

    def load(self, folder: str | Path, *, allow_restart: bool = False) -> int:
        """Takes up the newest checkpoint that is whole, of this plan or any other; returns the updates behind it.

        Returns 0 if there never was one. A damaged one is named and set aside; CheckpointError is raised if one cannot
        be read for another reason, or if none is left, unless `allow_restart` lets the loop begin at step 0. `samples`
        then says how many samples were trained on: a loop that goes on begins with the next.
        """
        self.wait()
        found = CheckpointDir(folder).newest(tell, allow_restart=allow_restart)
        if found is None:
            return 0
        check_finite(found, CheckpointDir(folder))
        has = found.manifest.tensors
        put_all(
            self.threads,
            found.step,
            lambda name: found.tensor(name) if name in has else None,
            saved_in(found).norm,
        )
        self.samples, self._replicas.agreed, self._is_stale = found.manifest.samples, found.step, True
        set_random_state(found, device=current_gpu())
        return found.step

    def save_to_model(self) -> nn.Module:
        """Copies the trained weights and the buffers into the user's model and returns it.

        The model's own `state_dict` does so by itself. Raises again what a step has raised.
        """
        if self.threads.failure is not None:  # some workers have made an update that others have not
            raise self.threads.failure
        self._check_replicas()
        self._is_stale = False
        trained = result_of(self.program, self.threads.outcome().weights)
        for own in self.threads.handlers:
            trained |= final_buffers(own)
        members = [
            *(pair for unit, m in self.units for pair in m.named_parameters(unit, remove_duplicate=False)),
            *(pair for unit, m in self.units for pair in m.named_buffers(unit, remove_duplicate=False)),
        ]
        with torch.no_grad():
            for name, tensor in members:
                if name in trained:
                    tensor.copy_(trained[name])
        return self.model


class _Refresh:
    """A hook of a user's model: what was trained is copied into it before its state is read.

    It holds for the model alone: copies and pickles of it have none.
    """

    def __init__(self, trainer: Callable[[], Trainer | None] = lambda: None):
        self.trainer = trainer

    def __call__(self, *_: object) -> None:
        trainer = self.trainer()
        if trainer is not None and trainer._is_stale:
            trainer.save_to_model()

    def __reduce__(self) -> tuple[type["_Refresh"], tuple[()]]:
        return _Refresh, ()


def _place(plan: Plan, machine: Machine | None) -> tuple[Plan, Machine]:
    """Returns a plan and the machine with a device for each of its workers."""
    if machine is None:
        return make_machine(plan, read_worker_hosts(plan.num_workers), "auto")
    return plan, machine.divided(plan.num_workers) if plan.place.devices is None else machine


def _kinds(plan: Plan, machine: Machine) -> dict[str, torch.device]:
    """Returns the kinds of devices that a plan uses, and where each is measured."""
    found = devices_to_measure(plan, machine, assign_devices(plan, machine))
    return {kind: torch_device(machine, name) for kind, (_, name) in found.items()}


def _give_up(threads: "weakref.ref[Threads]", trace: str, sentence: str) -> None:
    if found := threads():
        error = WorkerError(sentence)
        error.add_note(f"There it is in the code:\n{trace}")
        found.give_up(error)


def _read(model: nn.Module, loss: Callable[[Any, Any], Tensor] | None, sample: Any) -> tuple[UserBatch, Reduction]:
    """Returns the sample by its rows, and how the loss is reduced."""
    batch = UserBatch.of(sample, has_own_loss=loss is None)
    try:
        reduction, batch = find_reduction(model, loss or own_loss, batch.readings())
    except InputError:
        raise
    except Exception:
        cut_model(model, batch.inputs)  # which tells, with the line, of a model that does not take its inputs
        raise
    return batch, reduction


def _search(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: BatchSplit,
    optimizer: Optimizer,
    machine: Machine | None,
) -> RankedPlan:
    """Measures a model on all that is here, and returns the best plan for batches like the sample."""
    machine = machine or known_machine()
    sizes = [size for size in choose_sizes(min(batch.size, MOST_SAMPLES)) if size <= batch.size]
    cut = batch.cut = cut_model(model, batch.own_head(sizes[-1]))
    job = Job(units=cut.units, loss=loss_of(cut, loss), optimizer=optimizer)
    unit_samples = make_samples(lambda size: UnitSample(cut.units, *batch.head(size), job.loss), sizes)
    profile = measure_ways("model", unit_samples, job, ways_of(machine), lambda text: None)  # noqa: ARG005
    return choose_plan(profile.replace(begins=cut.begins), machine, SearchOptions(batch=batch.size))


def _copies(plan: Plan) -> int:
    return 1 if plan.feed.kind == "share" else plan.place.replicas
