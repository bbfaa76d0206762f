"""An MLP on a CPU process and a GPU process: two networks that are not synchronised, and one that is.

The published setting: Adam at 0.001, minibatches of 100 samples, 100 epochs of MNIST; figures 6.1 and 6.2 show the loss
of each process, which were not synchronised. Synchronised, each process takes half of each minibatch.
"""

from functools import partial
from statistics import fmean

import torch

from pipedejavu.engine import AdamW
from pipedejavu.facts import Cluster, compose, format_seconds
from pipedejavu.facts.cluster import HostGroup
from pipedejavu.plan import Plan, preset
from pipedejavu.report import Compared, Curve, ExperimentFindings, LineChart
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.reproduce.process_pair import PairRequest, Trained, train_pair
from pipedejavu.reproduce.study_data import ChosenImages, choose_images
from pipedejavu.reproduce.training_study import CPU, TrainingStudy
from pipedejavu.zoo import open_data
from pipedejavu.zoo.mlp import MlpSize

BATCH, RATE, EPOCHS = 100, 1e-3, 100
_GPU = "t4"


def run(setting: Setting) -> ExperimentFindings:
    """Trains a network in each of two processes, side by side, then one network in both."""
    images = choose_images(setting, "mnist")
    hidden = setting.pick((64, 32), (512, 256, 128), (512, 256, 128))
    widths = (64 if images.is_digits else 784, *hidden, 10)
    epochs = setting.pick(4, EPOCHS if images.is_digits else 10, EPOCHS)
    per_epoch = len(_study(images, widths, BATCH).task(0).data) // BATCH
    plan = preset("ddp").at(workers=2, microbatches=1, samples=BATCH // 2)
    setting.report("two processes, not synchronised and then synchronised")
    pair = train_pair(PairRequest(
        studies=partial(_studies, images, widths),
        plan_alone=preset("ddp").at(workers=1, microbatches=1, samples=BATCH), plan_both=plan,
        updates=epochs * per_epoch, evaluate_every=per_epoch, seed=setting.seed,
    ))  # fmt: skip
    first, second = pair.together
    means = [fmean(losses) for losses in zip(first.losses, second.losses, strict=True)]
    courses = dict(zip(("CPU alone", "GPU alone"), pair.apart, strict=True))
    return _describe(images, widths, epochs, courses | {"synchronised": first._replace(losses=means)}, plan)


def _studies(images: ChosenImages, widths: tuple[int, ...]) -> list[TrainingStudy]:
    """Returns the study of each process alone, the CPU first, and that of both."""
    return [*(_study(images, widths, BATCH, slice(n, n + 1)) for n in range(2)), _study(images, widths, BATCH // 2)]


def _study(images: ChosenImages, widths: tuple[int, ...], samples: int, on: slice = slice(None)) -> TrainingStudy:
    """Returns the study on some of the devices, the CPU first."""
    machine = compose(Cluster(name="pair", hosts=(HostGroup(gpus=(f"1 x {_GPU}",), cpu=CPU),)))
    test = open_data(images.name, MlpSize(widths=widths).form(), split="test")
    return TrainingStudy(
        model="mlp", data=images.name, samples=samples, optimizer=AdamW(lr=RATE, weight_decay=0.0),
        options={"widths": widths}, test=test, most_tested=10_000, machine=machine,
        devices=tuple(device.name for device in reversed(machine.devices))[on],
    )  # fmt: skip


def _describe(
    images: ChosenImages, widths: tuple[int, ...], epochs: int, courses: dict[str, Trained], plan: Plan
) -> ExperimentFindings:
    def by_epoch(course: Trained) -> list[tuple[float, float]]:
        size = len(course.losses) // epochs
        return [(n + 1, fmean(course.losses[n * size : (n + 1) * size])) for n in range(epochs)]

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
        end = courses[curve.name].evaluations[-1]
        compared.append(Compared(f"{curve.name}: test accuracy", f"{end.accuracy:.1%}"))
        compared.append(Compared(f"{curve.name}: time of an epoch", format_seconds(end.elapsed_s / epochs)))
    pairs = [("model", f"MLP {'-'.join(map(str, widths))}"), ("data", images.name.partition(":")[0])]
    pairs += [
        ("optimizer", f"Adam, learning rate {RATE:g}"),
        ("minibatch", f"{BATCH} samples"),
        ("epochs", f"{epochs}"),
    ]
    notes = [images.note] if images.note else []
    if not torch.cuda.is_available():
        notes.append("This machine has no GPU: the second process, which stands in for it, computes on CPU tensors.")
    accuracies = {name: course.evaluations[-1].accuracy for name, course in courses.items()}
    gap = max(accuracies.values()) - accuracies["synchronised"]
    answer = (
        f"Synchronised, one network takes as many updates as each of the two alone, with half of each minibatch in each"
        f" process; its test accuracy is within {100 * gap:.1f} points of the best of the three."
    )
    return ExperimentFindings(
        "", "", "How does the loss fall over epochs if a CPU and a GPU train side by side, apart and together?",
        [*pairs, ("plan", ", ".join(f"{axis} {text}" for axis, text in plan.axes().items()))], compared,
        [LineChart("Training loss", "epoch", "mean loss", losses, has_log_y=True),
         LineChart("Test accuracy", "epoch", "percent", right)],
        (), [answer], [*notes, "Each worker is a process with one thread. Apart, both train side by side."],
    )  # fmt: skip
