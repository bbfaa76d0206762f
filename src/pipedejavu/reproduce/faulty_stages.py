"""What a faulty stage of a pipeline does to training under each schedule, and scores that find it among replicas.

A stage passes wrong activations, wrong errors (gradients of its input) or wrong weight gradients on. With replicas of
the pipeline, a server scores the gradients of each stage of each replica on samples of its own, and drops the worst.
"""

import math
from typing import NamedTuple

from pipedejavu.engine import Byzantine, Sgd
from pipedejavu.engine.job import Applied
from pipedejavu.plan import Keep, Plan, Reduce, preset
from pipedejavu.report import Compared, Curve, ExperimentFindings, FindingsTable, LineChart
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.reproduce.training_study import Course, StudyRun, TrainingStudy
from pipedejavu.zoo import form_of, open_data

_WIDTHS = (64, 32, 32, 32, 10)
STAGES, REPLICAS, SAMPLES, LAST = 4, 5, 16, 20
_HIGHEST = 100.0
"""The highest loss that is drawn."""
FAULTY = 1
"""The stage with the fault; the last of the replicas has it."""
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "pipedream", "pipedream-vertical", "pipedream-2bw")
_FAULTS = {
    "no fault": None,
    "activations, sign": f"1:sign-flip:1@{FAULTY}:activations",
    "activations × 10": f"1:scale:10@{FAULTY}:activations",
    "activations, noise": f"1:random:1@{FAULTY}:activations",
    "errors, sign": f"1:sign-flip:1@{FAULTY}:errors",
    "errors × 10": f"1:scale:10@{FAULTY}:errors",
    "errors, noise": f"1:random:1@{FAULTY}:errors",
}
_REPLICA_FAULTS = {**_FAULTS, "weight gradients, sign × 10": f"1:sign-flip:10@{FAULTY}"}


class Suspicion(NamedTuple):
    """How often the server dropped the gradients of each stage of each replica, as a share of all updates."""

    dropped: dict[tuple[int, int], float]
    """By (stage, replica)."""

    def of(self, replica: int) -> list[float]:
        """Returns the shares of a replica's stages."""
        return [self.dropped[stage, replica] for stage in range(STAGES)]


def run(setting: Setting) -> ExperimentFindings:
    """Trains every schedule with every fault, and replicated pipelines with a mean and with scores."""
    updates = setting.pick(8, 200, 800)
    schedules = setting.pick(("1f1b", "pipedream"), SCHEDULES, SCHEDULES)
    faults = _FAULTS if setting.scale != "quick" else dict([*_FAULTS.items()][:2])
    study = TrainingStudy(
        model="mlp", data="digits", samples=SAMPLES, optimizer=Sgd(lr=0.05), options={"widths": _WIDTHS},
        test=open_data("digits", form_of("mlp", widths=_WIDTHS), split="test"),
    )  # fmt: skip
    alone: dict[tuple[str, str], Course] = {}
    for schedule in schedules:
        setting.report(f"one pipeline under {schedule}")
        for name, fault in faults.items():
            alone[schedule, name] = _train(study, setting, plan_of(schedule), updates, fault)
    compared, rows, charts = _replicated(study, setting, updates)
    table = [(name, *(_ending(alone[schedule, name]) for schedule in schedules)) for name in faults]
    sound, worst = (alone[schedules[0], name].accuracy for name in [*faults][:2])
    return ExperimentFindings(
        "", "", "What does one faulty stage do to training under each schedule, and do scores of stages find it?",
        [("model", f"MLP {'-'.join(map(str, _WIDTHS))} on digits, a layer per stage"), ("updates", f"{updates}"),
         ("update", f"{SAMPLES} samples per pipeline"), ("optimizer", "SGD, 0.05"),
         ("faulty stage", f"{FAULTY} of 0 to {STAGES - 1}"), ("replicas", f"{REPLICAS}, the last one faulty")],
        compared,
        [LineChart("One pipeline: training loss under 1f1b", "update", "mean loss",
                   [Curve(name, _until_it_leaves(alone["1f1b", name])) for name in faults], has_log_y=True),
         *charts],
        [FindingsTable("One pipeline: test accuracy by fault and schedule", ("Fault", *schedules), table),
         FindingsTable(f"{REPLICAS} pipelines: test accuracy, and how often each stage of the faulty one was dropped",
                       ("Fault", "Mean of all", "Scores per stage", "Faulty pipeline: stages 0 to 3 dropped",
                        "Others, on average"), rows)],
        [f"A fault in one stage is a fault of the run: with '{[*faults][1]}' accuracy is {worst:.0%} instead of"
         f" {sound:.0%} under {schedules[0]}. The columns of dropped stages say whom the scores of stages suspect."],
        ["Scores follow Zeno's rule, with the step on one stage alone: each costs the server a forward of the model.",
         "With one pipeline no other copy is there to compare with, so a fault is seen only in the loss."],
    )  # fmt: skip


def plan_of(schedule: str) -> Plan:
    """Returns a pipeline whose updates have as many samples under every schedule."""
    if schedule in ("pipedream", "pipedream-vertical"):
        return preset(schedule).at(workers=STAGES, samples=SAMPLES).replace(steps=8)
    steps = 8 if schedule == "pipedream-2bw" else 1
    return preset(schedule).at(workers=STAGES, microbatches=4, samples=SAMPLES // 4, steps=steps)


def replicated(combiner: str) -> Plan:
    """Returns pipelines beside each other, whose gradients are averaged or scored per stage."""
    plan = preset("1f1b").at(workers=STAGES, microbatches=2, samples=SAMPLES // 2, replicas=REPLICAS)
    if combiner == "sum":
        return plan
    place = plan.place.replace(servers=1)
    reduce = Reduce(wire="server", gate="barrier", combiner="score-trim", trim=1)
    return plan.replace(place=place, reduce=reduce, keep=Keep(kind="server"))


def suspicion_of(course: Course) -> Suspicion:
    """Returns how often each stage of each replica was dropped."""
    program, counts, updates = course.program, dict[tuple[int, int], int](), 0
    for event in (event for log in course.logs for event in log.events if isinstance(event, Applied)):
        updates += event.piece == 0
        kept = {q for q in range(REPLICAS) if program.fed_by(q, event.version - 1)[0] in event.microbatches}
        for q in set(range(REPLICAS)) - kept:
            counts[event.piece, q] = counts.get((event.piece, q), 0) + 1
    places = [(stage, q) for stage in range(STAGES) for q in range(REPLICAS)]
    return Suspicion({place: counts.get(place, 0) / max(1, updates) for place in places})


def _train(study: TrainingStudy, setting: Setting, plan: Plan, updates: int, fault: str | None) -> Course:
    byzantine = Byzantine.parse(fault) if fault else None
    return StudyRun(study, setting.seed).train(plan, updates, byzantine=byzantine)


def _replicated(
    study: TrainingStudy, setting: Setting, updates: int
) -> tuple[list[Compared], list[tuple[str, ...]], list[LineChart]]:
    """Trains replicated pipelines; the machine needs a device for each worker, so they share those of the cluster."""
    wide = _with_devices(study)
    faults = _REPLICA_FAULTS
    if setting.scale == "quick":
        faults = {name: faults[name] for name in ("no fault", "errors, sign")}
    rows, compared, curves = list[tuple[str, ...]](), list[Compared](), list[Curve]()
    for name, fault in faults.items():
        setting.report(f"{REPLICAS} pipelines: {name}")
        mean, scored = (_train(wide, setting, replicated(c), updates, fault) for c in ("sum", "score-trim"))
        suspicion = suspicion_of(scored)
        others = [share for q in range(REPLICAS - 1) for share in suspicion.of(q)]
        shares = " / ".join(f"{share:.0%}" for share in suspicion.of(REPLICAS - 1))
        rows.append((name, _ending(mean), _ending(scored), shares, f"{sum(others) / len(others):.0%}"))
        if fault and "@" in fault:
            caught = max(suspicion.of(REPLICAS - 1))
            meaning = "whole replicas with ten times the gradient are dropped in 98.8 % and more (docs/byzantine.md)"
            what = f"most suspected stage of the faulty pipeline: {name}"
            compared.append(Compared(what, f"dropped in {caught:.0%}", meaning=meaning))
        curves += [Curve(f"{name}: mean", [*enumerate(mean.losses, start=1)]),
                   Curve(f"{name}: scores", [*enumerate(scored.losses, start=1)])]  # fmt: skip
    drawn = ("no fault", "activations × 10", "weight", "errors, s")
    chosen = [curve for curve in curves if curve.name.startswith(drawn)]
    chart = LineChart(f"{REPLICAS} pipelines: training loss", "update", "mean loss", chosen, has_log_y=True)
    return compared, rows, [chart]


def _with_devices(study: TrainingStudy) -> TrainingStudy:
    """Returns the study with each device of the cluster for as many workers as it takes."""
    fields = {name: getattr(study, name) for name in ("model", "data", "samples", "optimizer", "options", "test")}
    count = STAGES * REPLICAS + 1
    return TrainingStudy(**fields, devices=tuple(study.devices[n % len(study.devices)] for n in range(count)))


def _until_it_leaves(course: Course) -> list[tuple[float, float]]:
    """Returns the losses by update; one that has left every scale is no number, and the curve ends there."""
    return [(n, loss if loss < _HIGHEST else math.nan) for n, loss in enumerate(course.losses, start=1)]


def _ending(course: Course) -> str:
    """Returns the accuracy at the end, and whether the loss is still a number."""
    is_number = all(map(math.isfinite, course.losses[-LAST:]))
    return f"{course.accuracy:.1%}" + ("" if is_number else ", loss no number")
