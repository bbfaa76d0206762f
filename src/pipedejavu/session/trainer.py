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

from pipedejavu.engine import AdamW, Optimizer, Threads
from pipedejavu.engine.engine_state import final_buffers, take_all
from pipedejavu.engine.replicas import ReplicaCheck
from pipedejavu.facts import InputError, Machine
from pipedejavu.facts.printable import tell
from pipedejavu.health.failure import WorkerError
from pipedejavu.health.watchdog import HangWatchdog
from pipedejavu.plan import Plan
from pipedejavu.planner.precision_choice import check_request
from pipedejavu.planner.replan import PlanSwitch, Replanner, find_switch
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.run.run_folder import result_of
from pipedejavu.run.saved_facts import check_finite, saved_in
from pipedejavu.run.throughput import ThroughputMonitor
from pipedejavu.run.whole_state import WholeState
from pipedejavu.session.batch_split import BatchSplit
from pipedejavu.session.model_refresh import ModelRefresh, release
from pipedejavu.session.torch_optimizer import read_optimizer, read_positional
from pipedejavu.session.trainer_plan import OptimizerOf, TrainerOptions, TrainerPlan, may_pad, read_sample
from pipedejavu.session.training_session import ThreadWorkers, TrainingSession
from pipedejavu.simulate import Prediction, check_fit, simulate
from pipedejavu.source.loss_reduction import Reduction
from pipedejavu.source.precision import check_parameters, no_autocast, take_autocast
from pipedejavu.source.user_batch import UserBatch
from pipedejavu.store import Checkpoint, CheckpointDir, Saver


class Trainer:
    """Trains a model step by step under a plan.

    A step of a synchronous plan makes one update. A step of any other plan makes `plan.steps` updates and drains the
    pipeline; the next step starts from the newest weights.

    `optimizer` is a torch.optim.AdamW, Adam or SGD with its parameter groups, or a record of `pipedejavu.engine`. The
    workers make its updates: each reads lr, weight decay, betas and momentum from the groups, so that a scheduler, or
    the loop itself, may change them between steps. With `scheduler`, one of torch.optim.lr_scheduler, each update is
    followed by its `step()`. Moments are in the workers and in checkpoints, not in `optimizer.state`.

    `loss` takes the model's output and the targets. It returns a mean over samples or over the labels that count, or a
    sum, which a step divides by the number of samples; the Trainer finds out which on the sample. With None, the loss
    is the attribute `loss` of the model's output.

    `sample` is a batch like those to come, by default the first that `step` is given: (inputs, targets), with inputs a
    tensor, a tuple of arguments or a mapping of keyword arguments; or, if the model returns its own loss, that mapping
    alone. Each may hold tuples, lists and dicts of tensors. A plan that scores contributions scores them on the last
    microbatch of the sample, which should therefore not be trained on.

    With the plan "auto" the model is measured on all devices of this machine, and the planner searches for the best
    plan for batches like the sample; `workers` is ignored. If workers become slower or faster than forecast, the
    planner searches again in the background, and the next step switches to a plan that pays; `replan=False` keeps the
    first plan.

    Batches may be shorter than the sample, and samples may vary in length. A model that is not a chain is traced again
    for each new shape of a microbatch.

    Before the first step, copies of the model and of its units run the sample; a model whose units compute something
    else is refused. `check_model=False` skips this.

    If an action takes longer than `hang_after_s` (0: no limit; None: a limit far above the forecast of a step), `step`
    raises a WorkerError that names the action and its line of code. The Trainer cannot be used after that.

    `precision` is what the units compute: "bf16", "fp16", "tf32", "fp32", "fp64", or "auto" for the plan's own, bf16 if
    all GPUs that train compute it, and else fp32. A `torch.autocast` of bfloat16 around the Trainer asks for "bf16".
    The model's weights stay float32: `state_dict` returns the masters that updates work on. A bfloat16 model is
    trained with float32 masters.

    Replicas that share every update must hold equal weights. They are compared every `check_replicas` updates (0:
    never), before each checkpoint and before `save_to_model`. A WorkerError names the replica that differs; `load` then
    restores the last checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizer_and_loss: Any,
        optimizer: torch.optim.Optimizer | Optimizer | None = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        scheduler: Any = None,
        sample: Any = None,
        plan: str | Plan = "1f1b",
        workers: int = 2,
        seed: int = 0,
        machine: Machine | None = None,
        replan: bool = True,
        hang_after_s: float | None = None,
        check_replicas: int = 50,
        check_model: bool = True,
        precision: str = "auto",
    ):
        asked = take_autocast("Trainer()", check_request(precision))
        check_parameters(model)
        self.model = model
        self.samples = 0
        """Samples trained on so far."""
        self.is_stale = False
        """Whether the user's model lacks updates that were made."""
        self.should_stop = False
        """Set by a callback to end `fit` after this step."""
        self._steps = 0
        self._losses: list[float] = []
        self._saver: Saver | None = None
        chosen, self.loss = read_positional(optimizer_and_loss, optimizer, loss)
        self._groups = read_optimizer(model, chosen, scheduler)
        self._optimizer: OptimizerOf = self._groups.for_units if self._groups else lambda _: chosen or AdamW(lr=1e-3)
        self._options = TrainerOptions(
            plan=plan,
            workers=workers,
            seed=seed,
            machine=machine,
            replan=replan,
            hang_after_s=hang_after_s,
            check_replicas=check_replicas,
            check_model=check_model,
            precision=asked,
        )
        self._reading: tuple[UserBatch, Reduction] | None = None
        self._loaded: Checkpoint | None = None
        self._is_started = False
        if sample is not None:
            with no_autocast():
                self._begin(sample)

    def _read(self, batch: Any) -> tuple[UserBatch, Reduction]:
        """Returns the first batch in the form of the engine, and how the loss is reduced over samples."""
        self._reading = self._reading or read_sample(self.model, self.loss, batch)
        return self._reading

    def _begin(self, sample: Any) -> None:
        """Plans for batches like the sample, and starts the workers."""
        release(self.model)
        known, reduction = self._read(sample)
        first = UserBatch.of(sample, known.per_sample, has_own_loss=self.loss is None)
        plan = TrainerPlan(self.model, self.loss, self._optimizer, self._options)
        prepared = plan.prepare(first, reduction)
        self._cut, self._job, self.batch = prepared.cut, prepared.job, prepared.batch
        self.units = self._cut.units
        self._whole = WholeState(self.model, self.units)
        self._switch: PlanSwitch | None = None
        self._replanner: Replanner | None = None
        self._replans = self._options.replan and prepared.is_searched
        self._start(prepared.program, first)
        self.batch.held_out = BatchSplit(first, self.batch.sizes, reduction, self._cut, pads=self.batch.pads)
        ModelRefresh(self).install(self.model)
        self._is_started = True
        if self._loaded is not None:
            self._restore(self._loaded)
            self._loaded = None

    def _check_started(self, what: str) -> None:
        if not self._is_started:
            raise InputError(
                f"{what} needs the shape of a batch, and none was seen yet; call step first, or give sample="
            )

    def _start(self, program: Program, batch: UserBatch) -> None:
        """Starts the workers of a program, for batches like this one."""
        self.program = program
        prediction = self.predict()
        check_fit(prediction)
        sizes = program.sizes * program.plan.steps
        self.batch = BatchSplit(batch, sizes, self.batch.reduction, self._cut, pads=may_pad(program.plan))
        self.threads = Threads(program, self._job, self.batch)
        self.batch.cuts = [replace(self._cut, units=worker.job.units) for worker in self.threads.handlers]
        replicas = ReplicaCheck(program, self._job, self._options.check_replicas)
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
            watchdog.allow(forecast_s, self._options.hang_after_s)
            worker.notice = watchdog.notice
            weakref.finalize(self.threads, watchdog.stop)

    def predict(self) -> Prediction:
        """Returns the prediction of a step."""
        if not hasattr(self, "program"):
            self._check_started("a prediction")
        return simulate(self.program)

    def step(self, batch: Any) -> float:
        """Trains on one batch; returns its mean loss."""
        take_autocast("Trainer.step()", self.program.plan.precision.compute if self._is_started else "auto")
        with no_autocast():
            return self._step(batch)

    def _step(self, batch: Any) -> float:
        if not self._is_started:
            self._begin(batch)
        if self._switch is not None:
            self._switch_plan(self._switch, self.batch.batch)
        self.is_stale = False  # tracing a new batch shape reads the model's state
        try:
            self.batch.take(batch, first=self.threads.updates * self.program.update_size)
        finally:
            self.is_stale = True
        if self._groups is not None:
            self._groups.begin(self.updates, self.program.plan.steps)
        start_s = time.perf_counter()
        spans = self.threads.run()
        if self._groups is not None:
            self._groups.end()
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
        if self._is_started:
            return self.threads.updates
        return self._loaded.step if self._loaded is not None else 0

    def save(self, folder: str | Path) -> None:
        """Copies the state and starts writing it to a folder of checkpoints, while training goes on.

        The folder keeps the newest two checkpoints and the one with the lowest loss. `wait` returns once all is on
        disk. Raises InputError if the state is not finite, and after a failed step the error of that step.
        """
        self._check_started("a checkpoint")
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
            "facts": {"norm": self._session.take_norm()} | (self._groups.facts() if self._groups else {}),
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
        if self._is_started:
            self._restore(checkpoint)
        else:
            self._loaded = checkpoint  # workers start with the first batch
        self.samples = checkpoint.manifest.samples
        return checkpoint.step

    def _restore(self, checkpoint: Checkpoint) -> None:
        self._session.restore(checkpoint)
        if self._groups is not None:
            self._groups.restore(saved_in(checkpoint))
        self.is_stale = True

    def save_to_model(self) -> nn.Module:
        """Copies the trained weights and buffers into the user's model and returns it.

        `state_dict()` and a call of the model call it when needed. After a failed step it raises the error of that
        step.
        """
        self._check_started("a trained model")
        if self.threads.failure is not None:  # some workers may have made an update that others have not
            raise self.threads.failure
        self._check_replicas()
        self.is_stale = False
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


def _give_up(threads: "weakref.ref[Threads]", trace: str, sentence: str) -> None:
    if running := threads():
        error = WorkerError(sentence)
        error.add_note(f"There it is in the code:\n{trace}")
        running.give_up(error)
