"""The table of experiments: name, title, where its code is, and the packages that it cannot do without.

The code of an experiment is imported when it runs, so that listing them needs no torch.
"""

import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipedejavu.facts import InputError, nearest
from pipedejavu.report import ExperimentFindings

Scale = Literal["quick", "laptop", "full"]
"""Seconds, minutes on a laptop, or the published size."""
_EXTRAS = {"torch": "train", "sklearn": "data", "transformers": "hf"}
"""The extra of this project that brings a package."""


class Setting(NamedTuple):
    """How an experiment is run."""

    scale: Scale = "laptop"
    seed: int = 0
    data: Path = Path("data")
    """Folder with the usual files of data sets, one folder for each."""
    report: Callable[[str], None] = lambda _: None
    """Takes a sentence about the progress."""

    def pick(self, quick: Any, laptop: Any, full: Any) -> Any:
        """Returns the value of the scale."""
        return {"quick": quick, "laptop": laptop, "full": full}[self.scale]


class Experiment(NamedTuple):
    """An experiment, and the module of this room that has a function from a setting to findings."""

    name: str
    title: str
    module: str
    needs: tuple[str, ...] = ("torch", "sklearn")
    """Packages."""
    function: str = "run"


EXPERIMENTS = (
    Experiment("mlp-sync", "An MLP on a CPU and a GPU, not synchronised and synchronised", "mlp_sync"),
    Experiment("gpt-forward", "Ten forward passes of a GPT of 10 layers, by device", "gpt_forward", ("torch",)),
    Experiment("vgg19", "VGG19 on CIFAR-10", "model_training", function="run_vgg19"),
    Experiment("bert", "A BERT on text", "model_training", function="run_bert"),
    Experiment("encoder-decoder", "An encoder-decoder on text", "model_training", function="run_encoder_decoder"),
    Experiment("splits", "Analytical and naive splits of deep networks", "split_study", ("torch",)),
    Experiment("initialisations", "Parallel random initialisations", "initialisation_study"),
    Experiment("accuracy", "Accuracy against time of training algorithms and corrections", "accuracy_study"),
    Experiment("late-share", "A CPU's late share between synchronous and asynchronous training", "late_share_study"),
    Experiment("faulty-stages", "Faulty stages of pipelines, and scores that find them", "faulty_stages"),
    Experiment("predictors", "Predictors of time and memory", "predictor_study"),
)


def experiment(name: str) -> Experiment:
    """Returns the experiment with this name; raises InputError that suggests the nearest one."""
    for known in EXPERIMENTS:
        if known.name == name:
            return known
    raise InputError(f"there is no experiment '{name}'{nearest(name, [known.name for known in EXPERIMENTS])}")


def run_experiment(chosen: Experiment, setting: Setting) -> ExperimentFindings:
    """Runs an experiment; raises InputError if a package that it needs is not installed."""
    check_packages(chosen)
    started = time.perf_counter()

    def report(text: str) -> None:
        setting.report(f"{time.perf_counter() - started:4.0f} s  {text}")

    function = getattr(import_module(f"{__package__}.{chosen.module}"), chosen.function)
    findings: ExperimentFindings = function(setting._replace(report=report))
    return findings._replace(name=chosen.name, title=chosen.title, time_s=time.perf_counter() - started)


def check_packages(chosen: Experiment) -> None:
    """Raises InputError if a package that an experiment needs is not installed."""
    for package in chosen.needs:
        if find_spec(package) is None:
            extra = _EXTRAS.get(package, package)
            raise InputError(
                f"experiment '{chosen.name}' needs {package}, which is not installed; pip install 'pipedejavu[{extra}]'"
            )
