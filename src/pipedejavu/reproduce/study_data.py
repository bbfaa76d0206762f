"""Data of an experiment: the published set if its files are there or can be downloaded, else the small digits."""

from pathlib import Path
from typing import NamedTuple

from pipedejavu.facts import InputError
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.zoo import open_data
from pipedejavu.zoo.form import ImageForm

_TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}


class ChosenImages(NamedTuple):
    """Images for an experiment."""

    name: str
    """As `open_data` reads it."""
    note: str
    """Why they are not the published ones; empty if they are."""

    @property
    def is_digits(self) -> bool:
        """Whether they are the small digits."""
        return self.name == "digits"


def choose_images(setting: Setting, published: str) -> ChosenImages:
    """Returns the published images, or the digits of 8×8 pixels with the reason; a quick run downloads nothing."""
    folder = Path(setting.data) / published
    name = f"{published}:{folder}"
    shape = {"mnist": (784,), "cifar10": (3, 32, 32)}[published]
    if setting.scale == "quick" and not folder.is_dir():
        reason = f"a quick run downloads nothing, and {folder} is missing"
    else:
        try:
            open_data(name, ImageForm(shape=shape, classes=10))
            open_data(name, ImageForm(shape=shape, classes=10), split="test")
            return ChosenImages(name, "")
        except InputError as fault:
            reason = str(fault).partition(";")[0]
    digits = "1,797 digits of 8×8 pixels that come with scikit-learn"
    return ChosenImages("digits", f"The data are the {digits}, not {_TITLES[published]}: {reason}.")
