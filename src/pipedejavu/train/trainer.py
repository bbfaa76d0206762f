"""The Trainer: a user's own loop over a plan, with the workers as threads of the user's process."""

import json
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipedejavu.engine import AdamW, Job, Optimizer, Threads
from pipedejavu.engine.device import device_of
from pipedejavu.engine.replicas import ReplicaCheck
from pipedejavu.engine.state import put_all, take_all, take_norm
from pipedejavu.facts import InputError, Machine
from pipedejavu.plan import Plan, preset
from pipedejavu.profile import Cut, Shot, cut_model, make_shots
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.crew import assign_devices
from pipedejavu.program.share import divide
from pipedejavu.search import Candidate, Options
from pipedejavu.simulate import Prediction, check_fit, simulate
from pipedejavu.store import Saver, Shelf
from pipedejavu.train.door import inputs_and_targets, own_loss
from pipedejavu.train.failure import WorkerError
from pipedejavu.train.folder import result_of
from pipedejavu.train.loop import say
from pipedejavu.train.measure import measure
from pipedejavu.train.model_check import Checked, Sample
from pipedejavu.train.model_check import check_model as check_units
from pipedejavu.train.pace import Pace
from pipedejavu.train.planning import MOST_SAMPLES, choose_plan, known_machine, ways_of
from pipedejavu.train.profiling import choose_sizes, measure_ways
from pipedejavu.train.replan import Pilot, Switch, find_switch
from pipedejavu.train.saved import check_finite, current_gpu, random_state, saved_in, set_random_state
from pipedejavu.train.site import devices_to_measure, make_machine, read_sites, torch_device
from pipedejavu.train.task import describe_form, loss_of
from pipedejavu.train.vigil import Vigil


class Trainer:
    """Trains a model step by step.

    A step of a synchronous plan makes one update. A step of any other makes as many as the plan's `steps`, drains the
    pipeline, and starts the next from the newest weights: a loop of the user's own has that border.

    `loss` takes the model's output and the targets and returns the *sum* over samples; a step divides once by
    the number of samples. With None it is the model's own loss, a mean over samples that its output has as `loss`.
    `sample` is a batch like those to come: (inputs, targets), where inputs are a tensor, a tuple of arguments or a
    mapping of keyword arguments; or, for a model's own loss, that mapping alone. A plan that scores contributions
    scores them on its last microbatch, so it should be one that is not trained on.

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
        self.model = model
        self.samples = 0
        """Samples that were trained on."""
        self._steps = 0
        self._losses: list[float] = []
        self._saver: Saver | None = None
        optimizer = optimizer or AdamW(lr=1e-3)
        found = _search(model, loss or own_loss, sample, optimizer, machine) if plan == "auto" else None
        if found is not None:
            plan, machine = found.plan, found.machine
        elif isinstance(plan, str):
            plan = preset(plan.removeprefix("preset:")).at(workers=workers, microbatches=4)
        assert isinstance(plan, Plan)
        plan = plan if plan.version.kind != "sync" else plan.but(steps=1)
        batch = _Split(sample, (1,) * (plan.feed.microbatches * _copies(plan) * plan.steps))
        samples = len(batch.targets(0))
        cut = batch.cut = cut_model(model, batch.own_inputs(0), plan.cut.begins)
        self.units = cut.units
        self._cut = cut
        self._job = Job(units=cut.units, loss=loss_of(cut, loss or own_loss), optimizer=optimizer, seed=seed)
        if found is not None:
            profile = found.profile
        else:
            plan = plan.but(feed=plan.feed.but(samples=samples))
            plan, machine = _place(plan, machine)
            profile = measure(
                "model", self._job, plan, batch.head, lambda numbers: batch.head(len(numbers)), _kinds(plan, machine)
            )
        assert machine is not None
        self._switch: Switch | None = None
        self._pilot: Pilot | None = None
        self._replans, self._hang_after_s = replan and found is not None, hang_after_s
        self._check_every = check_replicas
        program = compile_plan(plan, profile, machine, fold=False)
        if check_model:
            both = [Sample(batch.own_inputs(n), batch.targets(n)) for n in (0, len(batch.sizes) - 1)]
            checked = Checked(model, cut, self._job, loss or own_loss, program, both)
            if remark := check_units(checked, device_of(program, 0)):
                say(remark)
        self._begin(program, sample)
        self.batch.held_out = _Split(sample, self.batch.sizes, cut)

    def _begin(self, program: Program, batch: Any) -> None:
        """Lets a program's workers begin, with batches like this one."""
        self.program = program
        check_fit(self.predict())
        self.batch = _Split(batch, program.sizes * program.plan.steps, self._cut)
        self.threads = Threads(program, self._job, self.batch)
        self.batch.cuts = [replace(self._cut, units=own.job.units) for own in self.threads.handlers]
        self._replicas = ReplicaCheck(program, self._job, self._check_every)
        self._keep_vigil()
        if self._replans and len(program.workers) > 1:
            self._pilot = Pilot(Pace(program), self._ask, self._turn)
        else:
            self._pilot = None

    def _ask(self, lags: Sequence[float]) -> Switch | None:
        """Asks the planner; nobody says how long the loop goes on, so it is taken to be half-way."""
        return find_switch(self.program, lags, self._steps, start_s=0.0)

    def _turn(self, switch: Switch) -> None:
        self._switch = switch
        say(switch.reason)

    def _go_on(self, switch: Switch, batch: Any) -> None:
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
            vigil = Vigil(own.index, end, option="hang_after_s")
            vigil.allow(forecast_s, self._hang_after_s)
            own.notice = vigil.notice
            weakref.finalize(self.threads, vigil.stop)

    def predict(self) -> Prediction:
        """Returns what a step is predicted to look like."""
        return simulate(self.program)

    def step(self, batch: Any) -> float:
        """Trains on one batch; returns its mean loss."""
        if self._switch is not None:
            self._go_on(self._switch, batch)
        self.batch.take(batch, first=self.threads.updates * self.program.update_size)
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
        self._losses.append(sum(losses) / self.batch.size)
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
        if self._saver is None or self._saver.shelf.path != Path(folder):
            self.wait()
            self._saver = Saver(Shelf(folder), tell=say)
        about = {
            "samples": self.samples,
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "plan": json.loads(self.program.plan.to_json()),
            "facts": {"norm": take_norm(self.threads.handlers[0])},
        }
        tensors = take_all(self.threads) | random_state(device=current_gpu())
        self._losses.clear()
        self._saver.save(self.updates, tensors, lambda: about)

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
        found = Shelf(folder).newest(say, allow_restart=allow_restart)
        if found is None:
            return 0
        check_finite(found, Shelf(folder))
        has = found.manifest.tensors
        put_all(
            self.threads,
            found.step,
            lambda name: found.tensor(name) if name in has else None,
            saved_in(found).norm,
        )
        self.samples, self._replicas.agreed = found.manifest.samples, found.step
        set_random_state(found, device=current_gpu())
        return found.step

    def save_to_model(self) -> nn.Module:
        """Copies the trained weights into the user's model and returns it; raises again what a step has raised."""
        if self.threads.failure is not None:  # some workers have made an update that others have not
            raise self.threads.failure
        self._check_replicas()
        weights = result_of(self.program, self.threads.outcome().weights)
        parameters = {n: p for u, m in self.units for n, p in m.named_parameters(u, remove_duplicate=False)}
        with torch.no_grad():
            for name, weight in weights.items():
                parameters[name].copy_(weight)
        return self.model


def _place(plan: Plan, machine: Machine | None) -> tuple[Plan, Machine]:
    """Returns a plan and the machine with a device for each of its workers."""
    if machine is None:
        return make_machine(plan, read_sites(plan.num_workers), "auto")
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


def _search(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], sample: Any, optimizer: Optimizer, machine: Machine | None
) -> Candidate:
    """Measures a model on all that is here, and returns the best plan for batches like the sample."""
    batch, machine = _Split(sample, (1,)), machine or known_machine()
    sizes = [size for size in choose_sizes(min(batch.size, MOST_SAMPLES)) if size <= batch.size]
    cut = batch.cut = cut_model(model, batch.own_head(sizes[-1]))
    job = Job(units=cut.units, loss=loss_of(cut, loss), optimizer=optimizer)
    shots = make_shots(lambda size: Shot(cut.units, *batch.head(size), job.loss), sizes)
    profile = measure_ways("model", shots, job, ways_of(machine), lambda text: None)  # noqa: ARG005
    return choose_plan(profile.but(begins=cut.begins), machine, Options(batch=batch.size))


class _Split:
    """One batch as microbatches by number."""

    def __init__(self, batch: Any, sizes: Sequence[int], cut: Cut | None = None):
        self.sizes, self.cut, self.form = sizes, cut, ""
        self.cuts = [cut] if cut is not None else []
        """Whose units must take every microbatch: each worker has its own copy of them."""
        self.held_out: _Split | None = None
        """Whose last microbatch stands for those below 0, which contributions are scored on."""
        self.take(batch, first=0)

    def take(self, batch: Any, first: int) -> None:
        """Makes this the batch whose first microbatch has the number `first`; sizes are in proportion to the plan's."""
        inputs, targets = inputs_and_targets(batch)
        parts = divide(len(targets), self.sizes)
        if min(parts) < 1:
            raise InputError(
                f"a batch of {len(targets)} samples has fewer than the plan's {len(parts)} microbatches; use a larger"
                " batch or fewer microbatches"
            )
        form = f"inputs of {describe_form(inputs)}, targets of {describe_form(targets)}"
        if form != (self.form or form):
            raise InputError(
                f"a batch has {form}, where the sample had {self.form}; give all batches one shape and one dtype"
            )
        self._inputs, self._targets, self.first, self.form = inputs, targets, first, form
        self.size = len(targets)
        self.ends = [0, *accumulate(parts)]
        for cut in self.cuts:
            for count in set(parts):
                cut.fit(self._rows(0, count))

    def inputs(self, microbatch: int) -> Any:
        """Returns what the first piece reads."""
        assert self.cut is not None
        if microbatch < 0 and self.held_out is not None:
            return self.held_out.inputs(len(self.sizes) - 1)
        return self.cut.flat(self.own_inputs(microbatch))

    def own_inputs(self, microbatch: int) -> Any:
        """Returns what the user's model reads."""
        return self._rows(*self.ends[microbatch - self.first :][:2])

    def own_head(self, count: int) -> Any:
        """Returns the first samples, as the user's model reads them."""
        return self._rows(0, count)

    def head(self, count: int) -> tuple[Any, Any]:
        """Returns the first samples, as the first unit and the loss read them."""
        assert self.cut is not None
        inputs = self._rows(0, count)
        self.cut.fit(inputs)
        return self.cut.flat(inputs), self._targets[:count]

    def _rows(self, start: int, end: int) -> Any:
        """Returns some samples of tensors that have one row for each, and the others whole."""

        def part(tensor: Tensor) -> Tensor:
            return tensor[start:end] if tensor.ndim and len(tensor) == self.size else tensor

        return pytree.tree_map_only(Tensor, part, self._inputs)

    def targets(self, microbatch: int) -> Any:
        """Returns what the loss compares with."""
        if microbatch < 0 and self.held_out is not None:
            return self.held_out.targets(len(self.sizes) - 1)
        n = microbatch - self.first
        return self._targets[self.ends[n] : self.ends[n + 1]]

    def length(self, microbatch: int) -> int:
        """Returns the samples of a microbatch."""
        return len(self.targets(microbatch))

    def count(self, microbatch: int) -> int:
        """Returns the samples of a microbatch: all count."""
        return self.length(microbatch)


def _copies(plan: Plan) -> int:
    return 1 if plan.feed.kind == "share" else plan.place.replicas
