"""Trains VGG19, BERT and an encoder-decoder: on one worker, as a pipeline of two, and as two replicas.

The same updates must come out of all three. Beside the losses: samples per second of this machine, and simulated ones
of the same plans on a described machine with two GPUs.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pipedejavu.engine import AdamW
from pipedejavu.facts import Cluster, Machine, compose, format_bytes
from pipedejavu.facts.cluster import HostGroup
from pipedejavu.plan import Plan, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.report import Compared, Curve, ExperimentFindings, FindingsTable, LineChart
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.reproduce.study_data import choose_images
from pipedejavu.reproduce.text_model import Kind, choose_text_model
from pipedejavu.reproduce.training_study import CPU, Course, StudyRun, TrainingStudy
from pipedejavu.simulate import simulate
from pipedejavu.zoo import Dataset, form_of, open_data

_GPU = "a100-80gb"
_PLANS: dict[str, Callable[[int], Plan]] = {
    "one worker": lambda samples: preset("ddp").at(workers=1, microbatches=1, samples=samples),
    "pipeline of 2": lambda samples: preset("1f1b").at(workers=2, microbatches=2, samples=samples // 2),
    "2 replicas": lambda samples: preset("ddp").at(workers=2, microbatches=1, samples=samples // 2),
}


class TrainedModel(NamedTuple):
    """A model, its size, and how long it is trained."""

    model: str
    options: dict[str, Any]
    samples: int
    updates: int

    @property
    def title(self) -> str:
        """What to call it."""
        return f"transformers' {Path(self.model).stem}" if self.model.startswith("hf:") else self.model


def run_vgg19(setting: Setting) -> ExperimentFindings:
    """VGG19 on CIFAR-10, or on the digits."""
    images = choose_images(setting, "cifar10")
    size = setting.pick(
        TrainedModel("vgg-small", {}, 16, 6),
        TrainedModel("vgg19", {}, 32, 24),
        TrainedModel("vgg19", {}, 128, 391 * 10),
    )
    notes = [images.note] if images.note else []
    return _train(setting, size, images.name, notes)


def run_bert(setting: Setting) -> ExperimentFindings:
    """A BERT that fills in masked bytes of text."""
    return _train_text(setting, "bert")


def run_encoder_decoder(setting: Setting) -> ExperimentFindings:
    """An encoder-decoder that reverses text."""
    return _train_text(setting, "bart")


_TEXT = "The text is the source of Python's standard library, byte by byte; no vocabulary is downloaded."


def _train_text(setting: Setting, kind: Kind) -> ExperimentFindings:
    samples, updates = setting.pick((8, 6), (16, 80), (32, 1000))
    with TemporaryDirectory() as folder:
        chosen = choose_text_model(setting, kind, Path(folder))
        size = TrainedModel(chosen.model, chosen.options, samples, updates)
        return _train(setting, size, "stdlib", [chosen.note, _TEXT])


def _train(setting: Setting, size: TrainedModel, data: str, notes: list[str]) -> ExperimentFindings:
    study = TrainingStudy(
        model=size.model, data=data, samples=size.samples, optimizer=AdamW(lr=1e-3, weight_decay=0.0),
        options=size.options, test=_test_data(size, data),
        most_tested=setting.pick(16, 64, 1024), estimated_on=_gpus(1),
    )  # fmt: skip
    courses: dict[str, Course] = {}
    run = StudyRun(study, setting.seed)  # workers train copies, so each plan begins with the same weights
    for name, plan in _PLANS.items():
        setting.report(f"{size.title}: {name}")
        courses[name] = run.train(plan(size.samples), size.updates)
    first, *others = courses.values()
    apart = max(abs(a - b) for other in others for a, b in zip(first.losses, other.losses, strict=True))
    rates = _simulated(study, size)
    rows = []
    for name, course in courses.items():
        end = course.evaluations[-1]
        rate = f"{end.samples / end.elapsed_s:.1f}"
        rows.append((name, f"{course.losses[-1]:.3f}", f"{end.accuracy:.1%}", rate, *rates[name]))
    parameters = sum(weight.numel() for weight in first.weights.values())
    heads = ("Plan", "Last loss", "Test accuracy", "Samples/s here", "Simulated samples/s", "Fullest GPU")
    end = first.evaluations[-1]
    falls = f"{first.losses[0]:.3f} → {first.losses[-1]:.3f}"
    has_norm = "vgg" in size.model
    text = "Batch statistics are of microbatches, so plans with smaller ones differ from the first update on."
    return ExperimentFindings(
        "", "", "Do one worker, a pipeline and replicas make the same updates, and how fast?",
        [("model", f"{size.title}, {parameters:,} parameters"), ("data", data.partition(":")[0]),
         ("update", f"{size.samples} samples"), ("updates", f"{size.updates}"), ("optimizer", "AdamW, 0.001"),
         ("simulated machine", f"2 × {_GPU}, {CPU}")],
        [Compared("training loss, first and last update", falls), Compared("test accuracy", f"{end.accuracy:.1%}"),
         Compared("largest difference between plans in the loss of an update", f"{apart:.2g}", meaning="rounding")
         if not has_norm else
         Compared("largest difference between plans in the loss of an update", f"{apart:.2g}", meaning=text)],
        [LineChart("Training loss", "update", "mean loss",
                   [Curve(name, [*enumerate(course.losses, start=1)]) for name, course in courses.items()])],
        [FindingsTable("Plans", heads, rows)], (),
        [*notes, "No figures are published for this model in this setting; the plans are compared with each other.",
         "Samples per second here are of threads of one process."],
    )  # fmt: skip


def _test_data(size: TrainedModel, data: str) -> Dataset | None:
    """Returns the test split; a model of transformers opens its own."""
    if size.model.startswith("hf:"):
        return None
    return open_data(data, form_of(size.model, **size.options), split="test")


def _simulated(study: TrainingStudy, size: TrainedModel) -> dict[str, tuple[str, str]]:
    """Returns, by plan, simulated samples per second and the peak memory on two GPUs."""
    found = {}
    for name, plan in _PLANS.items():
        prediction = simulate(compile_plan(plan(size.samples), study.profile, _gpus(2), fold=False))
        peak = max(worker.peak_bytes for worker in prediction.workers)
        found[name] = f"{size.samples / prediction.makespan_s:,.0f}", format_bytes(peak)
    return found


def _gpus(count: int) -> Machine:
    """Returns a host with so many GPUs and the CPU of the study's hosts."""
    return compose(Cluster(name=f"{count} GPUs", hosts=(HostGroup(gpus=(f"{count} x {_GPU}",), cpu=CPU),)))
