"""Accuracy against time of every algorithm that changes the mathematics, of the exact ones, and of corrections.

Three models; every run begins with a seed's weights and sees the same number of samples. An algorithm has its own
learning rate for each model: the one with the least loss on held-out training samples, with a seed that is not among
the study's. Final accuracy is a mean over seeds with its 95 % interval; times are real seconds of this process and
simulated seconds on a described cluster.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import NamedTuple

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.facts import FaultsError, InputError, format_bytes
from pipedejavu.report import Compared, Curve, ExperimentFindings, FindingsTable, LineChart
from pipedejavu.reproduce.algorithm import ALGORITHMS, Algorithm
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.reproduce.learning_rate import HELD_OUT, choose_rate
from pipedejavu.reproduce.seed_interval import describe_mean
from pipedejavu.reproduce.training_study import CPU, HOSTS, Course, StudyRun, TrainingStudy
from pipedejavu.simulate import simulate
from pipedejavu.zoo import form_of, open_data

_MLP = (64, *(32,) * 7, 10)
_VGG = {"stages": ((8, 8), (16, 16)), "side": 8, "channels": 1, "has_batch_norm": False}
_GPT = {"layers": 2, "width": 32, "context": 16, "heads": 2}
_SWEPT = ("1f1b", "pipedream", "spectrain", "pipemare", "parameter-server", "dc-asgd")
"""Algorithms that are also run with other numbers of workers."""
_HEADS = (
    "Algorithm", "Rate", "Accuracy, %", "Against 1f1b, points", "Test loss", "Simulated s", "Real s", "Fullest worker",
)  # fmt: skip


class StudyRow(NamedTuple):
    """An algorithm's runs of one model, one course per seed; or why it cannot run."""

    algorithm: Algorithm
    rate: float
    courses: Sequence[Course] = ()
    refusal: str = ""

    @property
    def accuracies(self) -> list[float]:
        """Final accuracies in percent, by seed."""
        return [100 * course.accuracy for course in self.courses]

    @property
    def losses(self) -> list[float]:
        """Final test losses by seed."""
        return [course.evaluations[-1].loss for course in self.courses]


def studies() -> dict[str, TrainingStudy]:
    """Returns the three models with their data and optimizers."""
    mlp, vgg = {"widths": _MLP}, _VGG
    return {
        "MLP of 8 layers on digits": TrainingStudy(
            model="mlp", data="digits", samples=16, optimizer=Sgd(lr=0.01, momentum=0.9), options=mlp,
            test=open_data("digits", form_of("mlp", **mlp), split="test")),
        "small VGG on digits": TrainingStudy(
            model="vgg-small", data="digits", samples=16, optimizer=Sgd(lr=0.01, momentum=0.9), options=vgg,
            test=open_data("digits", form_of("vgg-small", **vgg), split="test")),
        "GPT of 2 layers on text": TrainingStudy(
            model="gpt-tiny", data="stdlib", samples=8, optimizer=AdamW(lr=3e-3, weight_decay=0.0), options=_GPT,
            test=open_data("stdlib", form_of("gpt-tiny", **_GPT), split="test"), most_tested=64),
    }  # fmt: skip


def run(setting: Setting) -> ExperimentFindings:
    """Runs all algorithms on all models, and some with other numbers of workers."""
    seeds = range(setting.seed, setting.seed + setting.pick(1, 5, 5))
    models, workers = studies(), 4
    updates = dict(zip(models, setting.pick((24,), (240, 192, 96), (1920, 1920, 1920)), strict=False))
    chosen = ALGORITHMS if setting.scale != "quick" else tuple(a for a in ALGORITHMS if a.name in _SWEPT)
    tables, charts, answers, compared, rates = [], [], [], [], {}
    for title, count in updates.items():
        study, rows = models[title], []
        for algorithm in chosen:
            rate = _own_rate(study, algorithm, workers, count, seeds.stop)
            setting.report(f"{title}: {algorithm.name} with a learning rate of {rate:g}")
            rows.append(run_algorithm(study, algorithm, workers, count, seeds, rate))
        rates[title] = {row.algorithm.name: row.rate for row in rows}
        heading = f"{title}, {workers} workers, {count} updates of {study.samples} samples"
        tables.append(FindingsTable(heading, _HEADS, [_cells(row, rows[0]) for row in rows]))
        charts += _charts(title, rows)
        compared += _compared(title, rows)
        answers.append(_answer(title, rows))
    title = next(iter(updates))
    sweep = _sweep(setting, models[title], updates[title], seeds, rates[title])
    conditions = [
        ("samples", "the same number for every run of a model; a sample of the GPT is a sequence of 16 tokens"),
        ("seeds", f"{len(seeds)}"), ("intervals", "95 %, by Student's t"),
        ("accuracy of the commonest target", "; ".join(
            f"{title}: {models[title].commonest_share:.1%}" for title in updates)),
        ("optimizer", "SGD with momentum 0.9; AdamW for the GPT"),
        ("learning rate", "each algorithm's own: of three rates about a factor of 3 apart, and of more while the best"
                          f" is at the edge, that with the least loss on 1/{HELD_OUT} of the training samples, held"
                          f" out, with seed {seeds.stop}"),
        ("cluster", f"{HOSTS} hosts with a {CPU} each, 25 Gb/s and 20 µs between them"),
    ]  # fmt: skip
    return ExperimentFindings(
        "", "", "What does staleness cost, and what restores it, at which price in time and memory?",
        conditions, compared, charts, [*tables, sweep], answers,
        ["Real seconds are of threads of one process on this machine; they compare algorithms only roughly.",
         "The order of algorithms depends on the learning rate: with one rate for all of them it is another one.",
         "DISTREAL drops filters of convolutions, so it trains the VGG alone, with budgets of 1, 0.75, 0.5 and 0.25."],
    )  # fmt: skip


def _own_rate(study: TrainingStudy, algorithm: Algorithm, workers: int, updates: int, seed: int) -> float:
    """Returns the learning rate with the least loss on held-out training samples."""

    def loss_at(rate: float) -> float:
        row = run_algorithm(study.held_out, algorithm, workers, updates, [seed], rate)
        return row.losses[0] if row.courses else inf

    return choose_rate(loss_at, study.optimizer.lr)


def run_algorithm(
    study: TrainingStudy, algorithm: Algorithm, workers: int, updates: int, seeds: Sequence[int], rate: float
) -> StudyRow:
    """Trains with every seed, for so many updates of the model in all; a plan that does not fit it is not run."""
    replicas, points = algorithm.replicas(workers), 8
    courses = []
    for seed in seeds:
        run, first = StudyRun(study, seed, replace(study.optimizer, lr=rate)), None
        plan = algorithm.plan(workers, study.samples, max(1, updates // points))
        try:
            if algorithm.warm_up:
                exact = ALGORITHMS[0].plan(workers, study.samples, 1)
                first = run.train(exact, round(algorithm.warm_up * updates), updates // points, keeps_state=True)
            courses.append(run.train(plan, updates // replicas, 1, before=first))
        except InputError as error:
            reason = error.faults[0] if isinstance(error, FaultsError) else str(error)
            return StudyRow(algorithm, rate, (), reason.partition(";")[0])
    return StudyRow(algorithm, rate, courses)


def _cells(row: StudyRow, exact: StudyRow) -> tuple[str, ...]:
    if row.refusal:
        return (row.algorithm.name, "", f"refused: {row.refusal}", *[""] * (len(_HEADS) - 3))
    ends = [course.evaluations[-1] for course in row.courses]
    gaps = [a - b for a, b in zip(row.accuracies, exact.accuracies, strict=True)]
    fullest = max(worker.peak_bytes for worker in simulate(row.courses[0].program).workers)
    return (
        row.algorithm.name, f"{row.rate:g}",
        describe_mean(row.accuracies, ".1f"), describe_mean(gaps, ".1f", sign=True),
        describe_mean(row.losses), f"{ends[0].simulated_s:.3f}",
        f"{fmean(end.elapsed_s for end in ends):.2f}", format_bytes(fullest),
    )  # fmt: skip


def _charts(title: str, rows: Sequence[StudyRow]) -> list[LineChart]:
    exact = [row for row in rows if row.algorithm.family == "exact"]
    pipelines, servers = ([row for row in rows if row.algorithm.family == f] for f in ("pipeline", "server"))
    return [
        LineChart(f"{title}: pipelines", "simulated s", "accuracy, %", _curves([*exact[:1], *pipelines], 2)),
        LineChart(f"{title}: servers and replicas", "simulated s", "accuracy, %", _curves([*exact[1:], *servers], 2)),
        LineChart(f"{title}: by samples", "samples", "accuracy, %", _curves([*exact[:1], *pipelines, *servers], 0)),
        LineChart(f"{title}: by real time", "s", "accuracy, %", _curves([*exact[:1], *pipelines, *servers], 1)),
    ]


def _curves(rows: Sequence[StudyRow], axis: int) -> list[Curve]:
    """Returns mean accuracies over seeds by a field of evaluations: samples, elapsed or simulated seconds."""
    curves = []
    for row in (row for row in rows if row.courses):
        ends = zip(*(course.evaluations for course in row.courses), strict=False)
        points = [(fmean(e[axis] for e in each), 100 * fmean(e.accuracy for e in each)) for each in ends]
        curves.append(Curve(row.algorithm.name, points))
    return curves


def _compared(title: str, rows: Sequence[StudyRow]) -> list[Compared]:
    known = {
        "pipedream": "the accuracy of data parallelism",
        "pipedream-2bw": "the quality of data parallelism",
        "spectrain": "hardly any loss of accuracy, with momentum SGD",
        "pipemare": "similar quality, together with rates by delay and a warm-up",
        "dc-asgd": "nearly that of sequential SGD",
    }
    exact = rows[0]
    compared = []
    for row in (row for row in rows if row.algorithm.name in known and row.courses):
        points = [a - b for a, b in zip(row.accuracies, exact.accuracies, strict=True)]
        losses = [a - b for a, b in zip(row.losses, exact.losses, strict=True)]
        text = f"{describe_mean(points, '.1f', sign=True)} points, loss {describe_mean(losses, '.2f', sign=True)}"
        compared.append(Compared(f"{title}: {row.algorithm.name} against 1f1b", text, known[row.algorithm.name]))
    return compared


def _answer(title: str, rows: Sequence[StudyRow]) -> str:
    """Returns a sentence on what staleness costs, and the best of what restores it."""
    losses = {row.algorithm.name: fmean(row.losses) for row in rows if row.courses}
    points = {row.algorithm.name: fmean(row.accuracies) for row in rows if row.courses}
    ours = ("spectrain", "pipemare", "pipemare + rates", "pipedream + rates", "pipedream + compensation")
    best = min((name for name in (*ours, "pipedream after warm-up") if name in losses), key=losses.__getitem__)

    def gap(name: str) -> str:
        return (
            f"{points[name] - points['1f1b']:+.1f} points ({losses[name] - losses['1f1b']:+.2f} of test loss)".replace(
                "-", "−"
            )
        )

    text = f"{title}: PipeDream ends {gap('pipedream')} from exact training;"
    return f"{text} of the corrections {best} ends with the least test loss, {gap(best)} from it."


def _sweep(
    setting: Setting, study: TrainingStudy, updates: int, seeds: Sequence[int], rates: dict[str, float]
) -> FindingsTable:
    """Returns accuracies of some algorithms with other numbers of workers, and their simulated seconds."""
    counts = setting.pick((2,), (2, 8), (2, 4, 8))
    rows = []
    for algorithm in (algorithm for algorithm in ALGORITHMS if algorithm.name in _SWEPT):
        setting.report(f"{algorithm.name} with {' and '.join(map(str, counts))} workers")
        made = [run_algorithm(study, algorithm, count, updates, seeds, rates[algorithm.name]) for count in counts]
        rows.append((algorithm.name, *(
            text for row in made
            for text in (describe_mean(row.accuracies, ".1f"), f"{row.courses[0].evaluations[-1].simulated_s:.3f}")
        )))  # fmt: skip
    heads = [text for count in counts for text in (f"Accuracy, {count} workers", f"Simulated s, {count}")]
    title = "The MLP with other numbers of workers, at the learning rates of 4 workers"
    return FindingsTable(title, ("Algorithm", *heads), rows)
