"""The Trainer: trains under a plan from the user's own loop.

Its workers are threads of the user's process, or the ranks that torchrun started.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, Optimizer, Threads
from pipedejavu.engine.engine_state import take_all
from pipedejavu.engine.replicas import ReplicaCheck
from pipedejavu.facts import InputError, Machine
from pipedejavu.facts.measurement import MEASURE_S
from pipedejavu.facts.start_phase import START
from pipedejavu.plan import Plan
from pipedejavu.plan.precision_request import PrecisionRequest
from pipedejavu.planner.compile_choice import read_mode
from pipedejavu.planner.replan import PlanSwitch
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.run.saved_facts import saved_in
from pipedejavu.run.whole_state import WholeState
from pipedejavu.session.batch_reader import BatchReader
from pipedejavu.session.batch_split import BatchSplit
from pipedejavu.session.callback import Callback
from pipedejavu.session.eval_metrics import Metric
from pipedejavu.session.fit_history import FitHistory
from pipedejavu.session.fit_loop import FitLoop
from pipedejavu.session.loop_checkpoints import load_weights
from pipedejavu.session.loop_evaluation import LoopEvaluation
from pipedejavu.session.loop_replanner import LoopReplanner
from pipedejavu.session.loop_watchdog import start_watchdogs
from pipedejavu.session.model_refresh import ModelRefresh, release
from pipedejavu.session.model_watch import ModelWatch
from pipedejavu.session.newest_weights import NewestWeights, copy_newest
from pipedejavu.session.pretrained_folder import check_tokenizer, is_pretrained, save_pretrained
from pipedejavu.session.started_workers import detach, held_by_session, start_workers
from pipedejavu.session.step_shortage import run_explained
from pipedejavu.session.torch_optimizer import read_optimizer, read_positional
from pipedejavu.session.trainer_checkpoints import TrainerCheckpoints, describe_checkpoint
from pipedejavu.session.trainer_plan import OptimizerOf, TrainerOptions, TrainerPlan, may_pad
from pipedejavu.session.trainer_ranks import BatchKind, TrainerRanks
from pipedejavu.session.training_session import TrainingSession, take_losses
from pipedejavu.simulate import Prediction, check_fit, simulate
from pipedejavu.source.precision import check_parameters, no_autocast, take_autocast
from pipedejavu.source.user_batch import UserBatch
from pipedejavu.store import Checkpoint


class Trainer:
    """Trains a model step by step under a plan.

    A step of a synchronous plan makes one update. A step of any other plan makes `plan.steps` updates and drains the
    pipeline; the next step starts from the newest weights.

    `optimizer` is a torch.optim.AdamW, Adam or SGD with its parameter groups, another optimizer of torch that updates
    each element by itself, or a record of `pipedejavu.engine`. Workers make its updates: each reads the settings of the
    groups, so that a scheduler, or the loop itself, may change them between steps. With `scheduler`, one of
    torch.optim.lr_scheduler, each update is followed by its `step()`. State is in workers and checkpoints only.

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
    first plan. On several ranks, replicas and pipelines of as many workers are compared instead, and the plan stays.

    Batches may be shorter than the sample, and samples may vary in length. A model that is not a chain is traced again
    for each new shape of a microbatch.

    `clip_norm` limits the norm of all gradients of an update, as `clip_grad_norm_` does.

    In a process that torchrun started, the workers are the ranks. Every rank runs the same script and makes the same
    calls. With `batches="global"` each rank gives the whole batch, with "shard" its share, as under
    DistributedDataParallel; "auto" decides by whether the first batch is the same on all ranks.

    Before the first step, copies of the model and of its units run the sample; a model whose units compute something
    else is refused. `check_model=False` skips this.

    With `head_chunks`, the last linear layer and the cross-entropy of its result run in that many chunks of tokens, so
    that the logits of all tokens never exist together; with None the plan decides.

    If an action takes longer than `hang_after_s` (0: no limit; None: a limit far above the forecast of a step), `step`
    raises a WorkerError that names the action and its line of code. The Trainer cannot be used after that.

    `precision` is what the units compute: "bf16", "fp16", "tf32", "fp32", "fp64", or "auto" for the plan's own, bf16 if
    all GPUs that train compute it, and else fp32. A `torch.autocast` of bfloat16 around the Trainer asks for "bf16".
    The model's weights stay float32: `state_dict` returns the masters that updates work on, as bfloat16 models have.
    Measuring takes about `measure_budget_s` at most, and what is left out is estimated; results are kept on disk.
    With `compile` units run under torch.compile: "on" or True, "off" or False, or "auto", if some 200 steps repay it.

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
        workers: int | None = None,
        batches: BatchKind = "auto",
        clip_norm: float | None = None,
        seed: int = 0,
        machine: Machine | None = None,
        replan: bool = True,
        hang_after_s: float | None = None,
        check_replicas: int = 50,
        check_model: bool = True,
        head_chunks: int | None = None,
        compile: str | bool = "auto",  # noqa: A002
        precision: str = "auto",
        measure_budget_s: float = MEASURE_S,
    ):
        request = PrecisionRequest.read(precision)
        asked = str(request._replace(compute=take_autocast("Trainer()", request.compute)))
        if head_chunks is not None and head_chunks < 1:
            raise InputError(f"head_chunks is {head_chunks}; give 1 or more chunks of tokens, or None")
        check_parameters(model)
        self.model = model
        self.samples = 0
        """Samples trained on so far."""
        self.is_stale = False
        """Whether the user's model lacks updates that were made."""
        self.should_stop = False
        """Set by a callback to end `fit` after this step."""
        self._ranks = TrainerRanks.join(batches)
        self._checkpoints = TrainerCheckpoints(self._ranks)
        self._eval: LoopEvaluation | None = None
        self._losses: list[float] = []
        chosen, self.loss = read_positional(optimizer_and_loss, optimizer, loss)
        self._groups = read_optimizer(model, chosen, scheduler)
        self._optimizer: OptimizerOf = self._groups.for_units if self._groups else lambda _: chosen or AdamW(lr=1e-3)
        self._options = TrainerOptions(
            plan=plan, workers=workers or (self._ranks.size if self._ranks else 2), seed=seed, machine=machine,
            replan=replan, hang_after_s=hang_after_s, check_replicas=check_replicas, check_model=check_model,
            precision=asked, head_chunks=head_chunks, clip_norm=clip_norm, ranks=self._ranks,
            compile=read_mode(compile), measure_budget_s=measure_budget_s,
        )  # fmt: skip
        self._reader = BatchReader(model, self.loss, self._ranks, batches)
        self._loaded: Checkpoint | None = None
        self._is_started = False
        if sample is not None:
            with no_autocast():
                self._begin(self._reader.whole(sample, "the first batch"))

    def _begin(self, sample: Any) -> None:
        """Plans for batches like the sample, and starts the workers."""
        release(self.model)
        START.restart()
        first, reduction = self._reader.form(sample), self._reader.read(sample)[1]
        prepared = TrainerPlan(self.model, self.loss, self._optimizer, self._options).prepare(first, reduction)
        self._cut, self._job, self.batch = prepared.cut, prepared.job, prepared.batch
        self.units = self._cut.units
        self._whole_state = WholeState(self.model, self.units)
        self._replanner = LoopReplanner(is_on=self._options.replan and prepared.is_searched)
        self._start(prepared.program, first)
        self.batch.held_out = BatchSplit(first, self.batch.sizes, reduction, self._cut, pads=self.batch.pads)
        ModelRefresh(self).install(self.model)
        self._watch = ModelWatch(self.model, self.units)
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
        self.threads = start_workers(program, self._job, self.batch, self.model, has_ranks=self._ranks is not None)
        units = {id(job.units): job.units for job in (worker.recorded_job for worker in self.threads.handlers)}
        self.batch.cuts = [replace(self._cut, units=each) for each in units.values()]
        replicas = ReplicaCheck(program, self._job, self._options.check_replicas)
        self._session = TrainingSession(held_by_session(self.threads), replicas, self._whole_state)
        start_watchdogs(self.threads, prediction.makespan_s / program.plan.steps, self._options.hang_after_s)
        self._replanner.follow(program)

    def _switch_plan(self, switch: PlanSwitch, batch: UserBatch) -> None:
        """Replaces the workers by those of another plan, with the same state."""
        assert isinstance(self.threads, Threads), "ranks keep their plan"
        state, updates = take_all(self.threads), self.updates
        self.threads.close()
        del self.threads, self._session  # a GPU may not have memory for both
        self._start(compile_plan(switch.plan, switch.profile, switch.machine, fold=False), batch)
        self._session.workers.put_state(updates, state.get, None)
        self._session.replicas.agreed = updates

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
        batch = self._reader.whole(batch, "step")
        if not self._is_started:
            self._begin(batch)
        self._watch.check(self._newest)
        if self._replanner.switch is not None:
            self._switch_plan(self._replanner.switch, self.batch.batch)
        self.is_stale = False  # tracing a new batch shape reads the model's state
        try:
            self.batch.take(batch, first=self.threads.updates * self.program.update_size)
        finally:
            self.is_stale = True
        if self._groups is not None:
            self._groups.begin(self.updates, self.program.plan.steps)
        start_s = time.perf_counter()
        spans = run_explained(self.threads, self.program, self.updates + 1)
        if self._groups is not None:
            self._groups.end()
        if self._session.replicas.is_due(self.updates, self.program.plan.steps):
            self._session.check_replicas(self.updates)
        self._replanner.take_step(time.perf_counter() - start_s, spans)
        losses = take_losses(self.threads.handlers)
        self._watch.take()
        self.samples += self.batch.size
        total = sum(losses) if self._ranks is None else self._ranks.add_up([sum(losses)])[0]
        self._losses.append(total / self.last_count)
        return self._losses[-1]

    @property
    def last_count(self) -> int:
        """How many samples, or labels that count, the last step's loss is the mean of."""
        return sum(self.batch.counts)

    @property
    def shows_progress(self) -> bool:
        """Whether this process shows progress: the only one, or the first rank."""
        return self._ranks is None or self._ranks.rank == 0

    def has_ended(self, is_here: bool) -> bool:
        """Whether this rank's loader has ended, and that of all others with it."""
        if is_here and self._ranks is not None:
            self._ranks.agree("the end of an epoch")
        return is_here

    def evaluate(self, loader: Iterable[Any], metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """Returns metrics of the newest weights over all batches of a loader, in evaluation mode.

        `loss` is a mean over samples, or over the labels that count, as in training; `perplexity` is given for losses
        of tokens, `accuracy` for scores of classes, and `samples` is how many there were. `metrics` are functions of
        (output, targets) by name; each returns its mean over the samples of the batch, or a pair (sum, count).

        Batches may have any size. Units run one after another on the devices of the workers, and random generators,
        running statistics and all other state of the training stay as they were.
        """
        if self._eval is None:
            self._eval = LoopEvaluation(self.model, self.loss, self._ranks)
        if not self._is_started and self._loaded is not None:
            load_weights(self.model, self._loaded)
        if self._is_started:
            self._check_sound()
        weights = self._newest() if self._is_started else None
        is_stale, self.is_stale = self.is_stale, False  # tracing reads the model's state, and only its shapes
        try:
            return self._eval.run(loader, metrics or {}, self._reader.read, weights, self._reader.kind)
        finally:
            self.is_stale = is_stale

    def fit(
        self,
        loader: Iterable[Any],
        eval_loader: Iterable[Any] | None = None,
        epochs: int = 1,
        callbacks: Sequence[Callback] = (),
        *,
        metrics: Mapping[str, Metric] | None = None,
    ) -> FitHistory:
        """Trains for `epochs` passes over a loader, each followed by `evaluate` on `eval_loader` if it is given.

        Before each epoch, samplers that have a `set_epoch` are given its number. Returns losses, metrics and times.
        """
        return FitLoop(self, loader, eval_loader, callbacks, metrics).run(epochs)

    @property
    def updates(self) -> int:
        """Updates made so far, including those of a checkpoint that was loaded."""
        if self._is_started:
            return self.threads.updates
        return self._loaded.step if self._loaded is not None else 0

    def save(self, folder: str | Path, *, tokenizer: Any = None) -> None:
        """Copies the state and starts writing it to a folder of checkpoints, while training goes on.

        The folder keeps the newest two checkpoints and the one with the lowest loss. `wait` returns once all is on
        disk. A model of transformers is also written beside them as by `save_pretrained`, with the tokenizer if given,
        so that `from_pretrained` opens the folder. Raises InputError if the state is not finite, and after a failed
        step the error of that step.
        """
        self._check_started("a checkpoint")
        check_tokenizer(tokenizer)
        ranks = self._ranks
        if ranks is not None:
            ranks.agree_on("save", folder)
        self._check_sound()
        self._session.check_replicas(self.updates)
        norm, groups = self._session.take_norm(), self._groups.facts() if self._groups else {}
        about = describe_checkpoint(self.program.plan, self.samples, self._losses, {"norm": norm} | groups)
        tensors = self._session.take_state()
        self._losses.clear()
        self._checkpoints.save(Path(folder), self.updates, tensors, lambda: about)
        if is_pretrained(self.model):
            self._copy_trained()
            if ranks is None or ranks.rank == 0:
                save_pretrained(Path(folder), self.model, *filter(None, [tokenizer]))

    def wait(self) -> None:
        """Waits until all saved checkpoints are on disk."""
        self._checkpoints.wait()

    def load(self, folder: str | Path, *, allow_restart: bool = False) -> int:
        """Loads the newest complete checkpoint, saved under this plan or any other; returns its number of updates.

        Returns 0 if the folder never had one. A damaged checkpoint is reported and set aside. Raises CheckpointError if
        one cannot be read for another reason, or if all are damaged and `allow_restart` is not set. Afterwards
        `samples` is the number of samples trained on; the loop goes on with the next one.
        """
        checkpoint = self._checkpoints.newest(Path(folder), allow_restart=allow_restart)
        if checkpoint is None:
            return 0
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
        if self._ranks is not None:
            self._ranks.agree("state_dict")
        self._check_sound()
        self._session.check_replicas(self.updates)
        self._copy_trained()
        return self.model

    def detach(self) -> None:
        """Ends the training if it is that of the model's own modules, so that another Trainer can take them."""
        if self._is_started:
            detach(self.threads, [self._job])

    def _check_sound(self) -> None:
        """Raises the error of a failed step: some workers may have made an update that others have not."""
        if self.threads.failure is not None:
            raise self.threads.failure

    def _newest(self) -> NewestWeights:
        return NewestWeights(self.program, self.units, self.threads.handlers)

    def _copy_trained(self) -> None:
        self._watch.check_values(self._newest)
        self.is_stale = False
        copy_newest(self._newest(), self.units, self._ranks)
        self._watch.take()
