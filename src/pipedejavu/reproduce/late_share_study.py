"""Late shares between bulk synchronous and asynchronous training of a GPU and a CPU: accuracy against time.

Three small models are trained under every synchronisation, with equal weights, samples and updates. Their simulated
seconds are those of three large models on a described machine, because a small model's time is that of launches: a GPU
and a CPU that takes five times as long for a sample, the CPU with a sixth of each update. The asynchronous extreme is a
plain loop in the order in which gradients would arrive: the engine's server gives all workers equally many updates.
"""

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.facts import format_seconds
from pipedejavu.plan import Cut, Version, preset
from pipedejavu.report import Compared, Curve, ExperimentFindings, FindingsTable, LineChart
from pipedejavu.reproduce.accuracy_study import studies
from pipedejavu.reproduce.described_pair import CPU, DRAWS, GPU, LARGE, MACHINE, RATIO, SHARES, SPREAD, Large
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.reproduce.learning_rate import HELD_OUT, choose_rate
from pipedejavu.reproduce.seed_interval import describe_mean
from pipedejavu.reproduce.training_study import Evaluated, StudyRun, TrainingStudy
from pipedejavu.source.task import SampleOrder

POINTS = 8
"""Evaluations of a run."""
_COMPENSATION = 0.04
_HEADS = (
    "Synchronisation", "Rate", "Accuracy, %", "Against coarse, points", "Test loss", "Coarse needs",
    "Simulated update", "Where the CPU's times vary", "Real s",
)  # fmt: skip


@dataclass(frozen=True)
class Synchronisation:
    """A synchronisation: of the engine by its version, or in the order of arrivals."""

    name: str
    version: Version | None = None
    compensation: float = 0.0
    """For the order of arrivals."""


SYNCHRONISATIONS = (
    Synchronisation("coarse", Version()),
    Synchronisation("late-share", Version(kind="late")),
    Synchronisation("late-share + prediction", Version(kind="late", correction="weight-prediction")),
    Synchronisation("late-share + compensation", Version(kind="late", correction="delay-compensation")),
    Synchronisation("late-share, delay 4", Version(kind="late", delay=4)),
    Synchronisation("asynchronous", None),
    Synchronisation("asynchronous + compensation", None, _COMPENSATION),
)


class SynchronisationRun(NamedTuple):
    """The evaluations of a synchronisation, a list per seed; their simulated seconds count from 0."""

    mode: Synchronisation
    rate: float
    evaluations: Sequence[Sequence[Evaluated]]

    @property
    def accuracies(self) -> list[float]:
        """Final accuracies in percent, by seed."""
        return [100 * each[-1].accuracy for each in self.evaluations]

    @property
    def losses(self) -> list[float]:
        """Final test losses, by seed."""
        return [each[-1].loss for each in self.evaluations]


def run(setting: Setting) -> ExperimentFindings:
    """Trains three models under every synchronisation."""
    seeds = range(setting.seed, setting.seed + setting.pick(1, 5, 5))
    counts = setting.pick((16,), (240, 192, 96), (1920, 1920, 1920))
    small = {
        title: replace(study, samples=2 * study.samples, machine=MACHINE, devices=_devices())
        for title, study in studies().items()
    }
    modes = (
        SYNCHRONISATIONS
        if setting.scale != "quick"
        else (*SYNCHRONISATIONS[:2], SYNCHRONISATIONS[3], SYNCHRONISATIONS[5])
    )
    tables, charts, compared, answers, choices = [], [], [], [], []
    for (title, study), large, updates in zip(small.items(), LARGE, counts, strict=False):
        runs = []
        for mode in modes:
            rate = _own_rate(study, large, mode, updates, seeds.stop)
            setting.report(f"{title}: {mode.name} with a learning rate of {rate:g}")
            runs.append(
                SynchronisationRun(mode, rate, [train(study, large, mode, updates, seed, rate) for seed in seeds])
            )
        steps = max(1, updates // POINTS)
        heading = f"{title}, {updates} updates of {study.samples} samples; times of {large.name}"
        tables.append(FindingsTable(heading, _HEADS, [_cells(each, runs[0], large, steps) for each in runs]))
        charts.append(LineChart(title, "simulated s", "accuracy, %", [_curve(each) for each in runs]))
        compared += _compared(title, runs)
        answers.append(_answer(title, runs, large, steps))
        choices.append((f"shares that the plan would choose for {large.name}", large.choice()))
    title, study = next(iter(small.items()))
    tables.append(_by_speed(LARGE[1]))
    tables.append(_sweep(setting, title, study, counts[0], seeds, study.optimizer.lr))
    conditions = [
        ("machine", f"{GPU}, and a {CPU} whose passes take {RATIO:g} times as long"),
        ("shares", f"{SHARES[0]:.0%} and {SHARES[1]:.0%} of each update"),
        ("large models", "; ".join(f"{each.name}, {each.batch} samples per update" for each in LARGE)),
        *choices,
        ("times that vary", f"quartiles {SPREAD:.0%} from the median, drawn for each share of the CPU; {DRAWS} draws"),
        ("seeds", f"{len(seeds)}"), ("intervals", "95 %, by Student's t"),
        ("learning rate", "each synchronisation's own: that with the least loss on"
                          f" 1/{HELD_OUT} of the training samples, held out, with seed {seeds.stop}"),
    ]  # fmt: skip
    return ExperimentFindings(
        "", "", "What does a late share cost in accuracy, and what does it gain in time?",
        conditions, compared, charts, tables, answers,
        ["Rounds end with a drain, which counts. All plans reduce eagerly.",
         "Real seconds are of threads of one process on this machine, and compare only roughly."],
    )  # fmt: skip


def _devices() -> tuple[str, ...]:
    return tuple(device.name for device in MACHINE.devices)


def _own_rate(study: TrainingStudy, large: Large, mode: Synchronisation, updates: int, seed: int) -> float:
    def loss_at(rate: float) -> float:
        return train(study.held_out, large, mode, updates, seed, rate)[-1].loss

    return choose_rate(loss_at, study.optimizer.lr)


def train(
    study: TrainingStudy, large: Large, mode: Synchronisation, updates: int, seed: int, rate: float,
    shares: tuple[float, ...] = SHARES,
) -> list[Evaluated]:  # fmt: skip
    """Trains with one seed; returns the evaluations, in simulated seconds of the large model."""
    each = StudyRun(study, seed, replace(study.optimizer, lr=rate))
    steps = max(1, updates // POINTS)
    if mode.version is None:
        return train_in_order_of_arrival(each, large.arrivals(), updates, mode.compensation)
    plan = preset("late-share").at(workers=1, microbatches=1, samples=study.samples, steps=steps)
    plan = plan.replace(version=mode.version, feed=plan.feed.replace(shares=shares), cut=Cut())
    made = each.train(plan, updates, steps).evaluations
    update_s = large.update_s(mode.version, steps)
    return [e._replace(simulated_s=e.samples / study.samples * update_s) for e in made]


def train_in_order_of_arrival(
    run: StudyRun, periods_s: Sequence[float], updates: int, compensation: float
) -> list[Evaluated]:
    """Trains as workers would that never wait: each gradient is applied when it arrives, to the newest weights.

    Every worker takes the next samples, as many as an update has, with the weights of the moment at which it starts.
    With `compensation` λ a gradient g becomes g + λ·g⊙g⊙(newest − read).
    """
    batches = SampleOrder(run.task, run.cut, [run.study.samples], run.seed)
    model, evaluations, started = run.task.model.train(), list[Evaluated](), time.perf_counter()
    parameters = [p for p in model.parameters() if p.requires_grad]
    stepper = _torch_optimizer(run.optimizer, parameters)
    first = [p.detach().clone() for p in parameters]
    under_way = [(period_s, n, n, first) for n, period_s in enumerate(periods_s)]  # arrival, batch, worker, weights
    heapq.heapify(under_way)
    elapsed_s = 0.0
    for update in range(updates):
        now_s, batch, worker, read = under_way[0]
        _differentiate(run, batches, batch, parameters, read)
        for parameter, weight in zip(parameters, read, strict=True) if compensation else ():
            gradient = parameter.grad
            assert gradient is not None
            gradient += compensation * gradient * gradient * (parameter.detach() - weight)
        stepper.step()
        newest = [p.detach().clone() for p in parameters]
        following = update + len(periods_s)
        heapq.heapreplace(under_way, (now_s + periods_s[worker], following, worker, newest))
        if (update + 1) % max(1, updates // POINTS) == 0 or update + 1 == updates:
            elapsed_s += time.perf_counter() - started
            figures = run.evaluate_weights(model.state_dict())
            evaluations.append(Evaluated((update + 1) * run.study.samples, elapsed_s, now_s, *figures))
            started = time.perf_counter()
    return evaluations


def _differentiate(
    run: StudyRun, batches: SampleOrder, batch: int, parameters: Sequence[Tensor], read: Sequence[Tensor]
) -> None:
    """Computes the mean gradients of a batch at the weights that were read; the newest weights stay."""
    newest = [p.data for p in parameters]
    for parameter, weight in zip(parameters, read, strict=True):
        parameter.data, parameter.grad = weight.clone(), None
    inputs = batches.own_inputs(batch)
    output = run.task.model(**inputs) if isinstance(inputs, dict) else run.task.model(inputs)
    loss: Tensor = run.task.loss(output, batches.targets(batch)) / batches.count(batch)
    torch.autograd.backward(loss)
    for parameter, weight in zip(parameters, newest, strict=True):
        parameter.data = weight


def _torch_optimizer(optimizer: object, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    if isinstance(optimizer, Sgd):
        return torch.optim.SGD([*parameters], lr=optimizer.lr, momentum=optimizer.momentum)
    assert isinstance(optimizer, AdamW)
    return torch.optim.AdamW([*parameters], lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=0.0)


def _times(each: SynchronisationRun, large: Large, steps: int) -> tuple[float, float | None]:
    """Returns the simulated time of an update, and its mean where the CPU's times vary."""
    if each.mode.version is None:
        last = each.evaluations[0][-1]
        first = each.evaluations[0][0]
        return last.simulated_s / (last.samples / first.samples * steps), None
    return large.update_s(each.mode.version, steps), large.varying_s(each.mode.version, steps)


def _cells(each: SynchronisationRun, exact: SynchronisationRun, large: Large, steps: int) -> tuple[str, ...]:
    points = [a - b for a, b in zip(each.accuracies, exact.accuracies, strict=True)]
    update_s, varying_s = _times(each, large, steps)
    return (
        each.mode.name, f"{each.rate:g}",
        describe_mean(each.accuracies, ".1f"), describe_mean(points, ".1f", sign=True),
        describe_mean(each.losses, ".3f"), f"{needed(exact, fmean(each.losses)):.0%} of its updates",
        format_seconds(update_s), format_seconds(varying_s) if varying_s else "–",
        f"{fmean(evaluations[-1].elapsed_s for evaluations in each.evaluations):.2f}",
    )  # fmt: skip


def needed(exact: SynchronisationRun, loss: float) -> float:
    """Returns the share of its updates after which a run's mean test loss first is as low, between evaluations by line.

    From the first evaluation on; 1 if the loss ends higher.
    """
    rows = [*zip(*exact.evaluations, strict=True)]
    points: list[tuple[float, float]] = [
        (row[0].samples / rows[-1][0].samples, fmean(e.loss for e in row)) for row in rows
    ]
    if points[0][1] <= loss:
        return points[0][0]
    for (start, above), (end, below) in pairwise(points):
        if below <= loss:
            return start + (end - start) * (above - loss) / (above - below)
    return 1.0


def _curve(each: SynchronisationRun) -> Curve:
    points = [
        (fmean(e.simulated_s for e in row), 100 * fmean(e.accuracy for e in row))
        for row in zip(*each.evaluations, strict=True)
    ]
    return Curve(each.mode.name, points)


def _compared(title: str, runs: Sequence[SynchronisationRun]) -> list[Compared]:
    found = []
    for each in runs[1:]:
        points = [a - b for a, b in zip(each.accuracies, runs[0].accuracies, strict=True)]
        found.append(
            Compared(f"{title}: {each.mode.name} against coarse", f"{describe_mean(points, '.1f', sign=True)} points")
        )
    return found


def _answer(title: str, runs: Sequence[SynchronisationRun], large: Large, steps: int) -> str:
    """Returns a sentence on what a late share costs and gains."""
    exact, late = runs[0], runs[1]
    points = [a - b for a, b in zip(late.accuracies, exact.accuracies, strict=True)]
    pairs = zip(_times(exact, large, steps), _times(late, large, steps), strict=True)
    steady, varying = (1 - (b or 1) / (a or 1) for a, b in pairs)
    share = needed(exact, fmean(late.losses))
    verdict = "pays" if varying > 1 - share else "does not pay"
    return (
        f"{title}: a late share ends {describe_mean(points, '.1f', sign=True)} points from synchronous training, which"
        f" needs {share:.0%} of its updates for that test loss. Late updates of {large.name} are {steady:.1%} shorter,"
        f" {varying:.1%} where the CPU's times vary: a late share {verdict} here."
    )


def _by_speed(large: Large) -> FindingsTable:
    """Returns updates with shares that plans choose, as sums of gradients take more of them on faster devices."""
    rows = []
    for speed in (1, 10, 40):
        cells = [large.chosen_s(version, speed) for version in (Version(), Version(kind="late"))]
        alone_s = large.alone_s(speed)
        times = [text for parts, each_s in cells for text in (parts, format_seconds(each_s))]
        rows.append((str(speed), format_seconds(alone_s), *times, f"{1 - cells[1][1] / cells[0][1]:.1%}"))
    heads = ("Speed of both devices", "GPU alone", "Coarse chooses", "Update", "Late share chooses", "Update", "Gain")
    return FindingsTable(f"{large.name}: shares that the plan chooses, times that do not vary", heads, rows)


def _sweep(
    setting: Setting, title: str, study: TrainingStudy, updates: int, seeds: Sequence[int], rate: float
) -> FindingsTable:
    """Returns the accuracy by delay and by the share that is late."""
    rows = []
    for delay in setting.pick((1,), (0, 1, 2, 4, 8), (0, 1, 2, 4, 8)):
        setting.report(f"{title}: a delay of {delay}")
        mode, cells = Synchronisation("", Version(kind="late", delay=delay)), []
        for share in (1 / 6, 1 / 2, 5 / 6):
            ends = [train(study, LARGE[0], mode, updates, s, rate, (1 - share, share))[-1] for s in seeds]
            cells.append(describe_mean([100 * end.accuracy for end in ends], ".1f"))
        rows.append((str(delay), *cells))
    heads = ("Delay", "Accuracy, a sixth late", "A half late", "Five sixths late")
    return FindingsTable(f"{title}: by delay and late share, at a learning rate of {rate:g}", heads, rows)
