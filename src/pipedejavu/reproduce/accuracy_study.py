"""Accuracy against time of every algorithm that changes the mathematics, of the exact ones, and of corrections.

Three models; every run begins with a seed's weights and sees the same number of samples. Final accuracy is a mean over
seeds with its 95 % interval; times are real seconds of this process and simulated seconds on a described cluster.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.facts import FaultsError, format_bytes
from pipedejavu.report import Compared, Curve, ExperimentFindings, FindingsTable, LineChart
from pipedejavu.reproduce.algorithm import ALGORITHMS, Algorithm
from pipedejavu.reproduce.experiment import Setting
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
    "Algorithm", "Accuracy, %", "Against 1f1b, points", "Test loss", "Simulated s", "Real s", "Fullest worker",
)  # fmt: skip


class StudyRow(NamedTuple):
    """An algorithm's runs of one model, one course per seed; or why it cannot run."""

    algorithm: Algorithm
    courses: Sequence[Course] = ()
    refusal: str = ""

    @property
    def accuracies(self) -> list[float]:
        """Final accuracies in percent, by seed."""
        return [100 * course.accuracy for course in self.courses]


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
    updates = setting.pick(24, 480, 1920)
    models, workers = studies(), 4
    chosen = ALGORITHMS if setting.scale != "quick" else tuple(a for a in ALGORITHMS if a.name in _SWEPT)
    tables, charts, answers, compared = [], [], [], []
    for title, study in models.items():
        rows = []
        for algorithm in chosen:
            setting.report(f"{title}: {algorithm.name}")
            rows.append(run_algorithm(study, algorithm, workers, updates, seeds))
        tables.append(FindingsTable(f"{title}, {workers} workers", _HEADS, [_cells(row, rows[0]) for row in rows]))
        charts += _charts(title, rows)
        compared += _compared(title, rows)
        answers.append(_answer(title, rows))
        if setting.scale == "quick":
            break
    sweep = _sweep(setting, next(iter(models.values())), updates, seeds)
    conditions = [
        ("samples", f"{updates} updates of 16 samples (8 sequences of 16 tokens for the GPT), the same for every run"),
        ("seeds", f"{len(seeds)}"), ("intervals", "95 %, by Student's t"),
        ("optimizer", "SGD 0.01 with momentum 0.9; AdamW 0.003 for the GPT; the same rate for every algorithm"),
        ("cluster", f"{HOSTS} hosts with a {CPU} each, 25 Gb/s and 20 µs between them"),
    ]  # fmt: skip
    return ExperimentFindings(
        "", "", "What does staleness cost, and what restores it, at which price in time and memory?",
        conditions, compared, charts, [*tables, *sweep], answers,
        ["Real seconds are of threads of one process on this machine; they compare algorithms only roughly.",
         "DISTREAL's masks are not run by the engine yet, so it is left out."],
    )  # fmt: skip


def run_algorithm(
    study: TrainingStudy, algorithm: Algorithm, workers: int, updates: int, seeds: Sequence[int]
) -> StudyRow:
    """Trains with every seed, for so many updates of the model in all; a plan that breaks a rule is not run."""
    replicas, points = algorithm.replicas(workers), 8
    courses = []
    for seed in seeds:
        run, first = StudyRun(study, seed), None
        plan = algorithm.plan(workers, study.samples, max(1, updates // points))
        try:
            if algorithm.warm_up:
                exact = ALGORITHMS[0].plan(workers, study.samples, 1)
                first = run.train(exact, round(algorithm.warm_up * updates), updates // points, keeps_state=True)
            courses.append(run.train(plan, updates // replicas, 1, before=first))
        except FaultsError as faults:
            return StudyRow(algorithm, (), str(faults).partition("': ")[2].partition(";")[0])
    return StudyRow(algorithm, courses)


def _cells(row: StudyRow, exact: StudyRow) -> tuple[str, ...]:
    if row.refusal:
        return (row.algorithm.name, f"refused: {row.refusal}", *[""] * (len(_HEADS) - 2))
    ends = [course.evaluations[-1] for course in row.courses]
    gaps = [a - b for a, b in zip(row.accuracies, exact.accuracies, strict=True)]
    fullest = max(worker.peak_bytes for worker in simulate(row.courses[0].program).workers)
    return (
        row.algorithm.name, describe_mean(row.accuracies, ".1f"), describe_mean(gaps, ".1f", sign=True),
        describe_mean([end.loss for end in ends]), f"{ends[0].simulated_s:.3f}",
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
    exact = rows[0].accuracies
    found = []
    for row in (row for row in rows if row.algorithm.name in known and row.courses):
        gaps = [a - b for a, b in zip(row.accuracies, exact, strict=True)]
        text = f"{describe_mean(gaps, '.1f', sign=True)} points"
        found.append(Compared(f"{title}: {row.algorithm.name} against 1f1b", text, known[row.algorithm.name]))
    return found


def _answer(title: str, rows: Sequence[StudyRow]) -> str:
    """Returns a sentence on what staleness costs, and the best of what restores it."""
    by_name = {row.algorithm.name: fmean(row.accuracies) for row in rows if row.courses}
    exact, stale = by_name["1f1b"], by_name["pipedream"]
    ours = ("spectrain", "pipemare", "pipemare + rates", "pipedream + rates", "pipedream + compensation")
    restored = {n: by_name[n] for n in (*ours, "pipedream after warm-up") if n in by_name}
    best = max(restored, key=lambda name: restored[name])
    text = (
        f"{title}: PipeDream ends {stale - exact:+.1f} points from exact training; of the corrections {best} ends best,"
    )
    return f"{text} {restored[best] - exact:+.1f} points from it.".replace("-", "−")


def _sweep(setting: Setting, study: TrainingStudy, updates: int, seeds: Sequence[int]) -> list[FindingsTable]:
    """Returns accuracies of some algorithms with other numbers of workers, and their simulated seconds."""
    counts = setting.pick((2,), (2, 8), (2, 4, 8))
    found = [algorithm for algorithm in ALGORITHMS if algorithm.name in _SWEPT]
    rows = []
    for algorithm in found:
        setting.report(f"{algorithm.name} with {' and '.join(map(str, counts))} workers")
        made = [run_algorithm(study, algorithm, count, updates, seeds) for count in counts]
        rows.append((algorithm.name, *(
            text for row in made
            for text in (describe_mean(row.accuracies, ".1f"), f"{row.courses[0].evaluations[-1].simulated_s:.3f}")
        )))  # fmt: skip
    heads = [text for count in counts for text in (f"Accuracy, {count} workers", f"Simulated s, {count}")]
    return [FindingsTable("The MLP with other numbers of workers", ("Algorithm", *heads), rows)]
