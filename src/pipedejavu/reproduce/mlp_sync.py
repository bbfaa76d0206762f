"""An MLP on a CPU worker and a GPU worker: two networks that are not synchronised, and one that is.

The published setting: Adam at 0.001, minibatches of 100 samples, 100 epochs of MNIST; figures 6.1 and 6.2 show the loss
of each process, which were not synchronised. Synchronised, each worker takes half of each minibatch.
"""

import torch

from pipedejavu.engine import AdamW
from pipedejavu.facts import Cluster, compose
from pipedejavu.facts.cluster import HostGroup
from pipedejavu.plan import Plan, preset
from pipedejavu.report import Compared, Curve, ExperimentFindings, LineChart
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.reproduce.study_data import ChosenImages, choose_images
from pipedejavu.reproduce.training_study import CPU, Course, StudyRun, TrainingStudy
from pipedejavu.zoo import open_data
from pipedejavu.zoo.mlp import MlpSize

BATCH, RATE, EPOCHS = 100, 1e-3, 100
_GPU = "t4"


def run(setting: Setting) -> ExperimentFindings:
    """Trains both networks alone, then one network on both workers."""
    images = choose_images(setting, "mnist")
    hidden = setting.pick((64, 32), (512, 256, 128), (512, 256, 128))
    widths = (64 if images.is_digits else 784, *hidden, 10)
    epochs = setting.pick(4, EPOCHS if images.is_digits else 10, EPOCHS)
    alone, both = _study(images, widths, BATCH), _study(images, widths, BATCH // 2)
    size = len(alone.task(0).data)
    updates = epochs * (size // BATCH)
    courses: dict[str, Course] = {}
    for number, device in enumerate(("CPU", "GPU")):
        setting.report(f"{device} worker alone")
        study = _with_device(alone, number)
        plan = preset("ddp").at(workers=1, microbatches=1, samples=BATCH)
        courses[f"{device} alone"] = StudyRun(study, setting.seed + number).train(plan, updates, size // BATCH)
    setting.report("both workers, synchronised")
    plan = preset("ddp").at(workers=2, microbatches=1, samples=BATCH // 2)
    courses["synchronised"] = StudyRun(both, setting.seed).train(plan, updates, size // BATCH)
    return _describe(images, widths, epochs, size // BATCH, courses, plan)


def _study(images: ChosenImages, widths: tuple[int, ...], samples: int) -> TrainingStudy:
    machine = compose(Cluster(name="pair", hosts=(HostGroup(gpus=(f"1 x {_GPU}",), cpu=CPU),)))
    test = open_data(images.name, MlpSize(widths=widths).form(), split="test")
    return TrainingStudy(
        model="mlp", data=images.name, samples=samples, optimizer=AdamW(lr=RATE, weight_decay=0.0),
        options={"widths": widths}, test=test, most_tested=10_000, machine=machine,
        devices=tuple(device.name for device in reversed(machine.devices)),
    )  # fmt: skip


def _with_device(study: TrainingStudy, number: int) -> TrainingStudy:
    """Returns the study with one of its devices, the CPU first."""
    fields = {name: getattr(study, name) for name in ("model", "data", "samples", "optimizer", "options", "test")}
    return TrainingStudy(**fields, most_tested=10_000, machine=study.machine, devices=(study.devices[number],))


def _describe(
    images: ChosenImages, widths: tuple[int, ...], epochs: int, per_epoch: int, courses: dict[str, Course], plan: Plan
) -> ExperimentFindings:
    def by_epoch(course: Course) -> list[tuple[float, float]]:
        means = [course.losses[n * per_epoch : (n + 1) * per_epoch] for n in range(epochs)]
        return [(n + 1, sum(losses) / len(losses)) for n, losses in enumerate(means)]

    losses = [Curve(name, by_epoch(course)) for name, course in courses.items()]
    right = [
        Curve(name, [(n + 1, 100 * e.accuracy) for n, e in enumerate(course.evaluations)])
        for name, course in courses.items()
    ]
    figures = {"CPU alone": "Figure 6.1", "GPU alone": "Figure 6.2", "synchronised": ""}
    compared = []
    for curve in losses:
        first, last = curve.points[0][1], curve.points[-1][1]
        where = figures[curve.name]
        compared.append(
            Compared(
                f"{curve.name}: training loss, first and last epoch",
                f"{first:.3f} → {last:.4f}",
                f"falls ({where}, a curve without figures)" if where else "not published",
                "falls too" if last < first else "does not fall",
            )
        )
        accuracy = courses[curve.name].accuracy
        compared.append(Compared(f"{curve.name}: test accuracy", f"{accuracy:.1%}"))
    pairs = [("model", f"MLP {'-'.join(map(str, widths))}"), ("data", images.name.partition(":")[0])]
    pairs += [
        ("optimizer", f"Adam, learning rate {RATE:g}"),
        ("minibatch", f"{BATCH} samples"),
        ("epochs", f"{epochs}"),
    ]
    notes = [images.note] if images.note else []
    if not torch.cuda.is_available():
        notes.append("This machine has no GPU: the GPU worker runs its part of the plan on CPU tensors.")
    gap = abs(courses["synchronised"].accuracy - max(c.accuracy for c in courses.values()))
    answer = (
        f"Synchronised, one network takes as many updates as each of the two alone, with half of each minibatch on each"
        f" worker; its test accuracy is within {100 * gap:.1f} points of the best of the three."
    )
    return ExperimentFindings(
        "", "", "How does the loss fall over epochs if a CPU and a GPU train side by side, apart and together?",
        [*pairs, ("plan", ", ".join(f"{axis} {text}" for axis, text in plan.axes().items()))], compared,
        [LineChart("Training loss", "epoch", "mean loss", losses, has_log_y=True),
         LineChart("Test accuracy", "epoch", "percent", right)],
        (), [answer], [*notes, "Workers are threads of one process, each with its own device and weights."],
    )  # fmt: skip
