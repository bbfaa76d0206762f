"""The Trainer: a user's own loop over a plan, with the workers as threads of the user's process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, Job, Optimizer, Threads
from pipedejavu.facts import InputError, Machine
from pipedejavu.plan import Plan, preset
from pipedejavu.profile import measure_profile, read_chain
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.crew import assign_devices
from pipedejavu.simulate import Prediction, simulate
from pipedejavu.train.folder import result_of
from pipedejavu.train.site import devices_to_measure, make_machine, read_sites, torch_device
from pipedejavu.train.task import describe_form


class Trainer:
    """Trains a model step by step.

    A step of a synchronous plan makes one update. A step of any other makes as many as the plan's `steps`, drains the
    pipeline, and starts the next from the newest weights: a loop of the user's own has that border.

    `loss` takes the model's output and the targets and returns the *sum* over samples; a step divides once by
    the number of samples. `sample` is a batch like those to come: (inputs, targets).
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        *,
        sample: tuple[Any, Any],
        plan: str | Plan = "1f1b",
        workers: int = 2,
        optimizer: Optimizer | None = None,
        seed: int = 0,
        machine: Machine | None = None,
    ):
        self.model = model
        plan = (
            preset(plan.removeprefix("preset:")).at(workers=workers, microbatches=4) if isinstance(plan, str) else plan
        )
        plan = plan if plan.version.kind != "sync" else plan.but(steps=1)
        _check_steps(plan)
        self.units = read_chain(model)
        job = Job(units=self.units, loss=loss, optimizer=optimizer or AdamW(lr=1e-3), seed=seed)
        inputs, targets = sample
        self.batch = _Split(inputs, targets, plan.feed.microbatches * _copies(plan) * plan.steps)
        samples = max(1, len(targets) // self.batch.parts)
        plan = plan.but(feed=plan.feed.but(samples=samples))
        if machine is None:
            plan, machine = make_machine(plan, read_sites(plan.num_workers), "auto")
        elif plan.place.devices is None:
            machine = machine.divided(plan.num_workers)
        names = assign_devices(plan, machine)
        found = devices_to_measure(plan, machine, names)
        kinds = {kind: torch_device(machine, name) for kind, (_, name) in found.items()}
        first = (_part(inputs, 0, samples), targets[:samples])
        profile = measure_profile("model", self.units, job.ties, *first, loss, kinds)
        self.program = compile_plan(plan, profile, machine, fold=False)
        self.threads = Threads(self.program, job, self.batch)

    def predict(self) -> Prediction:
        """Returns what a step is predicted to look like."""
        return simulate(self.program)

    def step(self, batch: tuple[Any, Any]) -> float:
        """Trains on one batch; returns its mean loss."""
        self.batch.take(*batch, first=self.threads.rounds * self.batch.parts)
        self.threads.run()
        losses = [loss for own in self.threads.handlers for loss in own.log.losses.values()]
        for own in self.threads.handlers:
            own.log.losses.clear()
        return sum(losses) / len(batch[1])

    def save_to_model(self) -> nn.Module:
        """Copies the trained weights into the user's model and returns it."""
        weights = result_of(self.program, self.threads.outcome().weights)
        parameters = {f"{u}.{n}": p for u, m in self.units for n, p in m.named_parameters(remove_duplicate=False)}
        with torch.no_grad():
            for name, weight in weights.items():
                parameters[name].copy_(weight)
        return self.model


class _Split:
    """One batch as microbatches by number."""

    def __init__(self, inputs: Any, targets: Any, parts: int):
        self.parts, self.form = parts, ""
        self.take(inputs, targets, first=0)

    def take(self, inputs: Any, targets: Any, first: int) -> None:
        """Makes this the batch whose first microbatch has the number `first`."""
        if len(targets) < self.parts:
            raise InputError(
                f"a batch of {len(targets)} samples has fewer than the plan's {self.parts} microbatches; use a larger"
                " batch or fewer microbatches"
            )
        form = f"inputs of {describe_form(inputs)}, targets of {describe_form(targets)}"
        if form != (self.form or form):
            raise InputError(
                f"a batch has {form}, where the sample had {self.form}; give all batches one shape and one dtype"
            )
        self._inputs, self._targets, self.first, self.form = inputs, targets, first, form
        size, more = divmod(len(targets), self.parts)
        ends = [0]
        for part in range(self.parts):
            ends.append(ends[-1] + size + (part < more))
        self.ends = ends

    def inputs(self, microbatch: int) -> Any:
        """Returns what the first piece reads."""
        n = microbatch - self.first
        return _part(self._inputs, self.ends[n], self.ends[n + 1])

    def targets(self, microbatch: int) -> Any:
        """Returns what the loss compares with."""
        n = microbatch - self.first
        return self._targets[self.ends[n] : self.ends[n + 1]]

    def count(self, microbatch: int) -> int:
        """Returns the samples of a microbatch."""
        return len(self.targets(microbatch))


def _check_steps(plan: Plan) -> None:
    """Raises InputError for plans whose workers know more of each other than a step can hand to the next."""
    if plan.reduce.combiner == "elastic" or plan.reduce.gate == "bound":
        what = "how far each worker is from the centre" if plan.reduce.combiner == "elastic" else "the waves in flight"
        raise InputError(
            f"plan '{plan.name}' carries {what} from update to update, which the end of a step would cut off; give all"
            " updates to one program, as 'train' does, or use another plan"
        )


def _part(value: Any, start: int, end: int) -> Any:
    return tuple(v[start:end] for v in value) if isinstance(value, tuple) else value[start:end]


def _copies(plan: Plan) -> int:
    return 1 if plan.feed.kind == "share" else plan.place.replicas
