"""Many initialisations in parallel: those with small loss and large gradients, then finer samples near the best.

A rough round draws weights of many seeds. Each later round draws around the weights of the best candidate, within half
the distance. A candidate's rank is the sum of its ranks by loss, the smallest first, and by the norm of its gradient,
the largest first. Each loss and gradient of a candidate costs as much as an update, and counts as one.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.plan import preset
from pipedejavu.report import Compared, Curve, ExperimentFindings, FindingsTable, LineChart
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.reproduce.seed_interval import describe_mean, half_interval
from pipedejavu.reproduce.training_study import Course, StudyRun, TrainingStudy
from pipedejavu.zoo import form_of, open_data

Weights = dict[str, Tensor]
ROUGH, FINE, ROUNDS, SPREAD = 12, 6, 2, 0.5
"""Candidates of the first round and of each later one, later rounds, and how far these draw: a share of each weight's
standard deviation, halved from round to round."""
_WAYS = ("one seed", "as many updates", "equal cost")


class Candidate(NamedTuple):
    """Weights with their loss and the norm of their gradient on one batch."""

    weights: Weights
    loss: float
    norm: float


def run(setting: Setting) -> ExperimentFindings:
    """Compares the selected initialisation with a single seed, at equal cost and at equally many updates."""
    seeds = range(setting.seed, setting.seed + setting.pick(2, 5, 8))
    updates = setting.pick(30, 240, 800)
    rows, compared, charts, gains = [], [], [], dict[str, float]()
    for title, study in _studies(setting).items():
        found: dict[str, list[Course]] = {way: [] for way in _WAYS}
        for number, seed in enumerate(seeds):
            setting.report(f"{title}: seed {number + 1} of {len(seeds)}")
            for way, course in _courses(study, 1000 * seed, updates).items():
                found[way].append(course)
        ends = {way: [course.evaluations[-1].loss for course in courses] for way, courses in found.items()}
        differences = {way: [a - b for a, b in zip(ends["one seed"], ends[way], strict=True)] for way in _WAYS[1:]}
        cells = [describe_mean(ends[way]) for way in _WAYS]
        rows.append((title, *cells, *(describe_mean(differences[way], sign=True) for way in _WAYS[1:])))
        for way in _WAYS[1:]:
            text = describe_mean(differences[way], sign=True)
            compared.append(Compared(f"{title}: gain of test loss, {way}", text, meaning=_verdict(differences[way])))
        gains[title] = fmean(differences["equal cost"])
        charts.append(LineChart(title, "update", "training loss", [_mean_curve(w, c) for w, c in found.items()]))
    cost = ROUGH + ROUNDS * FINE
    better = [title for title, gain in gains.items() if gain > 0]
    answer = f"At equal cost the selection lowers the test loss of {len(better)} of {len(gains)} models on average."
    heads = (
        "Model",
        "One seed",
        "Selected, as many updates",
        "Selected, equal cost",
        "Won, as many",
        "Won, equal cost",
    )
    return ExperimentFindings(
        "", "", "Does it pay to sample initialisations with small loss and large gradients, and then more finely?",
        [("candidates", f"{ROUGH}, then {ROUNDS} rounds of {FINE} near the best"),
         ("cost of the selection", f"{cost} losses and gradients, counted as {cost} updates"),
         ("updates", f"{updates}"), ("seeds", f"{len(seeds)}"), ("intervals", "95 %, by Student's t")],
        compared, charts, [FindingsTable("Test loss after training", heads, rows)], [answer],
        ["A gain is the test loss of one seed minus that of the selected weights; an interval with zero shows nothing.",
         "`train --init-candidates` selects by losses of trials instead; bench/initialisations.py compares that."],
    )  # fmt: skip


def _verdict(gains: Sequence[float]) -> str:
    half = half_interval(gains)
    if half is None or abs(fmean(gains)) <= half:
        return "no difference that the interval tells from zero"
    return "it pays" if fmean(gains) > 0 else "it costs more than it gives"


def _studies(setting: Setting) -> dict[str, TrainingStudy]:
    mlp, vgg = {"widths": (64, 64, 10)}, {"stages": ((8,), (16,)), "side": 8, "channels": 1, "has_batch_norm": False}
    every = {
        "MLP on digits": TrainingStudy(
            model="mlp", data="digits", samples=16, optimizer=Sgd(lr=0.05), options=mlp,
            test=open_data("digits", form_of("mlp", **mlp), split="test")),
        "small VGG on digits": TrainingStudy(
            model="vgg-small", data="digits", samples=16, optimizer=AdamW(lr=1e-3, weight_decay=0.0), options=vgg,
            test=open_data("digits", form_of("vgg-small", **vgg), split="test")),
    }  # fmt: skip
    return every if setting.scale != "quick" else {"MLP on digits": every["MLP on digits"]}


def _courses(study: TrainingStudy, seed: int, updates: int) -> dict[str, Course]:
    """Trains a seed as it is, and the selected weights: as long, and as much shorter as the selection cost."""
    plan = preset("ddp").at(workers=1, microbatches=1, samples=study.samples)
    cost = ROUGH + ROUNDS * FINE
    best = select(study, seed)
    courses = {}
    for way, count in zip(_WAYS, (updates, updates, max(1, updates - cost)), strict=True):
        run = StudyRun(study, seed)
        if way != "one seed":
            run.task.model.load_state_dict(best.weights)
        courses[way] = run.train(plan, count)
    return courses


def select(study: TrainingStudy, seed: int) -> Candidate:
    """Returns the best candidate of a rough round and of finer rounds near the best so far."""
    source = torch.Generator().manual_seed(seed)
    rough = [study.task(seed + n).model.state_dict() for n in range(ROUGH)]
    best = choose([_judged(study, seed, weights) for weights in rough])
    for number in range(ROUNDS):
        share = SPREAD / 2**number
        near = [_drawn_near(best.weights, share, source) for _ in range(FINE)]
        best = choose([best, *(_judged(study, seed, weights) for weights in near)])
    return best


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the candidate with the lowest sum of its ranks by loss and by gradient; ties go to the first."""
    by_loss = sorted(range(len(candidates)), key=lambda n: candidates[n].loss)
    by_norm = sorted(range(len(candidates)), key=lambda n: -candidates[n].norm)
    return candidates[min(range(len(candidates)), key=lambda n: by_loss.index(n) + by_norm.index(n))]


def _judged(study: TrainingStudy, seed: int, weights: Weights) -> Candidate:
    """Returns a candidate with its figures on the first samples of the data."""
    task = study.task(seed)
    task.model.load_state_dict(weights)
    inputs, targets = task.data.batch(range(4 * study.samples))
    loss = task.loss(task.model(inputs), targets) / task.count(targets)
    loss.backward()  # type: ignore[no-untyped-call]
    squares = [parameter.grad.square().sum() for parameter in task.model.parameters() if parameter.grad is not None]
    copies = {name: tensor.detach().clone() for name, tensor in weights.items()}
    return Candidate(copies, float(loss.detach()), float(torch.stack(squares).sum().sqrt()))


def _drawn_near(weights: Weights, share: float, source: torch.Generator) -> Weights:
    """Returns weights at a random distance from others: normal, with a share of each tensor's standard deviation."""
    near = {}
    for name, weight in weights.items():
        spread = float(weight.std()) if weight.numel() > 1 and weight.is_floating_point() else 0.0
        near[name] = weight + share * spread * torch.randn(weight.shape, generator=source) if spread else weight
    return near


def _mean_curve(way: str, courses: Sequence[Course]) -> Curve:
    losses = zip(*(course.losses for course in courses), strict=True)
    return Curve(way, [(n + 1, fmean(each)) for n, each in enumerate(losses)])
