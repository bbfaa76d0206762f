"""VGG19 and ResNet-50 on images of 32×32: torchvision's with random weights if it is installed, else the zoo's."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from pipedejavu.zoo import Task, build, open_data
from pipedejavu.zoo.form import ImageForm
from pipedejavu.zoo.loss import cross_entropy

_FORM = ImageForm(shape=(3, 32, 32), classes=10)
_DATA = "random:64"
_ZOO: dict[str, dict[str, Any]] = {"vgg19": {}, "resnet50": {"side": _FORM.shape[-1]}}
"""The zoo's options by name, which is the same in torchvision."""


def image_task(name: str, device: str | None = None) -> Task:
    """Returns a model on random images, built on a device."""
    if find_spec("torchvision") is None:
        return build(name, device=device, data=_DATA, **_ZOO[name])
    models = import_module("torchvision.models")
    with torch.device(device or "cpu"):
        model = getattr(models, name)(weights=None, num_classes=_FORM.classes)
    return Task(name=name, model=model, loss=cross_entropy, count=len, data=open_data(_DATA, _FORM))


def image_note() -> str:
    """Returns the sentence that says where the models are from."""
    if find_spec("torchvision") is None:
        return "torchvision is not installed, so VGG19 and ResNet-50 are the zoo's."
    return "VGG19 and ResNet-50 are torchvision's, with random weights."
