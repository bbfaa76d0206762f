"""A model that is trained under several plans, with workers that are threads of this process.

All plans begin with the same weights and take the same samples in the same order. The workers run on a described
cluster, by default one of hosts with a CPU each, and the same programs are simulated on it, so that each run has real
and simulated seconds. Times of units are estimated from the cluster's stated rates.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from pipedejavu.data.data_choice import DataChoice
from pipedejavu.engine import AdamW, Byzantine, Job, Optimizer, Sgd
from pipedejavu.engine.engine_state import final_buffers, put_all, take_all
from pipedejavu.engine.job import Log
from pipedejavu.engine.threads import Outcome, Threads
from pipedejavu.facts import Machine, Profile
from pipedejavu.facts.cluster import Cluster, HostGroup, compose
from pipedejavu.plan import Plan
from pipedejavu.planner.profiling import estimate_task
from pipedejavu.profile import cut_model
from pipedejavu.profile.model_cut import ModelCut
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.reproduce.learning_rate import hold_out
from pipedejavu.run.run_folder import result_of
from pipedejavu.simulate import simulate
from pipedejavu.source.model_source import open_task
from pipedejavu.source.task import SampleOrder, loss_of
from pipedejavu.zoo import Dataset, Task, build

HOSTS, CPU = 9, "epyc-7763"
"""Hosts of the cluster, one of them for a server, and the CPU of each."""
NETWORK_BYTES_PER_S, NETWORK_LATENCY_S = 25e9 / 8, 20e-6


@dataclass(frozen=True, kw_only=True)
class TrainingStudy:
    """A model with its data, the samples of a microbatch, and its optimizer."""

    model: str
    data: str
    samples: int
    optimizer: Sgd | AdamW
    options: dict[str, Any] = field(default_factory=dict)
    """What changes the size of the model in the zoo."""
    test: Dataset | None = None
    trained: Dataset | None = None
    """What is trained on in place of the whole training data."""
    most_tested: int = 256
    machine: Machine = field(default_factory=lambda: hosts_with_cpus())
    devices: tuple[str, ...] = tuple(f"h{host}/cpu" for host in range(HOSTS))
    """The device of each worker, in order."""

    def task(self, seed: int, device: str | None = None) -> Task:
        """Returns the model with the weights of a seed."""
        if self.model.startswith("hf:"):
            choice = DataChoice(name=self.data, evaluation=self.data, **self.options)
            task = open_task(self.model, seed=seed, data=choice, device=device)
        else:
            task = build(self.model, seed=seed, data=self.data, device=device, **self.options)
        return task if self.trained is None else replace(task, data=self.trained)

    @cached_property
    def commonest_share(self) -> float:
        """The accuracy of always answering the commonest target of the test samples."""
        data = self.test or self.task(0).data
        targets = data.batch(range(min(self.most_tested, len(data))))[1]
        return float(targets[targets >= 0].bincount().max() / (targets >= 0).sum())

    @cached_property
    def held_out(self) -> "TrainingStudy":
        """The study on its training data alone, the last part of which is tested on."""
        trained, test = hold_out(self.task(0).data)
        return replace(self, trained=trained, test=test)

    @cached_property
    def profile(self) -> Profile:
        """The estimated costs of the units on the cluster's hosts."""
        task = self.task(0, "meta")
        return estimate_task(self.model, task, self.samples, self.machine, lambda _: None).profile

    def program(self, plan: Plan) -> Program:
        """Compiles a plan with one worker per device; workers that share weights are on the first one."""
        is_shared = plan.keep.kind == "shared"
        devices = self.devices[:1] * plan.num_workers if is_shared else self.devices[: plan.num_workers]
        place = plan.place.replace(devices=devices)
        return compile_plan(plan.replace(place=place), self.profile, self.machine, fold=False)

    def simulated_s(self, program: Program) -> float:
        """Returns the simulated seconds of one update of each replica."""
        return simulate(program).makespan_s / program.plan.steps


def hosts_with_cpus() -> Machine:
    """Returns the machine that studies are simulated on."""
    hosts = (HostGroup(count=HOSTS, cpu=CPU),)
    network = {"network_bytes_per_s": NETWORK_BYTES_PER_S, "network_latency_s": NETWORK_LATENCY_S}
    return compose(Cluster(name="cluster", hosts=hosts, **network))


class Evaluated(NamedTuple):
    """How well the weights do on test samples after some updates."""

    samples: int
    """Samples trained on so far, over all replicas."""
    elapsed_s: float
    """Seconds of this process so far."""
    simulated_s: float
    loss: float
    accuracy: float


@dataclass
class Course:
    """What a run went through."""

    program: Program
    losses: list[float] = field(default_factory=list)
    """Mean training loss of each update, over its samples or tokens."""
    evaluations: list[Evaluated] = field(default_factory=list)
    logs: Sequence[Log] = ()
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: int = 0
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """What another plan goes on from."""

    @property
    def accuracy(self) -> float:
        """The share of test targets that the last weights get right."""
        return self.evaluations[-1].accuracy


class StudyRun:
    """One run of a study: a seed, and state that passes from plan to plan."""

    def __init__(self, study: TrainingStudy, seed: int, optimizer: Optimizer | None = None):
        self.study, self.seed, self.optimizer = study, seed, optimizer or study.optimizer
        self.task = study.task(seed)
        self.cut: ModelCut = cut_model(self.task.model, self.task.data.batch(range(study.samples))[0])
        self.tester = study.task(seed)

    def job(self, **more: Any) -> Job:
        """Returns the job; losses that are no numbers do not end it."""
        loss = loss_of(self.cut, self.task.loss)
        return Job(
            units=self.cut.units,
            loss=loss,
            optimizer=self.optimizer,
            seed=self.seed,
            on_nan="skip",
            graphs=unit_graphs,
            **more,
        )

    def train(
        self,
        plan: Plan,
        updates: int,
        evaluate_every: int = 0,
        byzantine: Byzantine | None = None,
        before: Course | None = None,
        keeps_state: bool = False,
    ) -> Course:
        """Trains for so many updates of each replica, in whole rounds; 0 evaluates only at the end.

        A run goes on from the state of the one `before`, which must have kept it, and whose updates count.
        """
        program = self.study.program(plan)
        batches = SampleOrder(self.task, self.cut, program.sizes, self.seed)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # each worker is a thread already
        threads = Threads(program, self.job(byzantine=byzantine), batches)
        course, step_s = Course(program), self.study.simulated_s(program)
        per_update, elapsed_s, last = sum(program.sizes), 0.0, 0
        earlier_s = 0.0
        try:
            if before is not None:
                last = before.updates
                put_all(threads, last, before.state.get)
                course.losses, course.evaluations = [*before.losses], [*before.evaluations]
                elapsed_s = before.evaluations[-1].elapsed_s
                earlier_s = before.evaluations[-1].simulated_s - last * step_s
            while threads.updates < updates:
                started = time.perf_counter()
                threads.run()
                elapsed_s += time.perf_counter() - started
                course.losses += _losses(threads, batches)
                is_due = evaluate_every and threads.updates // evaluate_every > last // evaluate_every
                if is_due or threads.updates >= updates:
                    last = threads.updates
                    outcome = threads.outcome()
                    buffers = {name: b for handlers in threads.handlers for name, b in final_buffers(handlers).items()}
                    figures = self.evaluate(program, outcome, buffers)
                    so_far = (last * per_update, elapsed_s, earlier_s + last * step_s)
                    course.evaluations.append(Evaluated(*so_far, *figures))
            outcome = threads.outcome()
            course.logs, course.weights = outcome.logs, result_of(program, outcome.weights)
            course.updates, course.state = threads.updates, take_all(threads) if keeps_state else {}
        finally:
            threads.close()
            torch.set_num_threads(num_threads)
        return course

    def evaluate(self, program: Program, outcome: Outcome, buffers: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Returns the mean loss and the accuracy of a run's result, with its running statistics, on test samples."""
        return self.evaluate_weights({**result_of(program, outcome.weights), **buffers})

    def evaluate_weights(self, tensors: Mapping[str, torch.Tensor]) -> tuple[float, float]:
        """Returns the mean loss and the accuracy of weights and running statistics on test samples."""
        self.tester.model.load_state_dict({name: t.detach() for name, t in tensors.items()}, strict=False)
        self.tester.model.eval()
        data = self.study.test or self.tester.held_out or self.tester.data
        inputs, targets = data.batch(range(min(self.study.most_tested, len(data))))
        with torch.no_grad():
            output = self.tester.model(**inputs) if isinstance(inputs, dict) else self.tester.model(inputs)
            loss = float(self.tester.loss(output, targets)) / self.tester.count(targets)
        counts, logits = targets >= 0, output if isinstance(output, torch.Tensor) else output.logits
        right = (logits.argmax(-1) == targets) & counts
        return loss, float(right.sum() / counts.sum())


def _losses(threads: Threads, batches: SampleOrder) -> list[float]:
    """Returns the mean loss of each update of the last round, and forgets them."""
    size = threads.program.update_size
    found: dict[int, list[tuple[float, int]]] = {}
    for handlers in threads.handlers:
        for number, loss in handlers.log.losses.items():
            found.setdefault(number // size, []).append((loss, batches.count(number)))
        handlers.log.forget_losses()
    sums = [[sum(column) for column in zip(*pairs, strict=True)] for _, pairs in sorted(found.items())]
    return [loss / count if math.isfinite(loss) else math.nan for loss, count in sums]
