"""The models of images in the studies: torchvision's where it is installed."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from torch import nn

from pipedejavu.reproduce.image_model import image_note, image_task


def small_net(weights: None, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))


def test_a_model_of_torchvision_is_built_with_random_weights_where_it_is_asked_for(monkeypatch):
    package, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    package.__spec__ = ModuleSpec("torchvision", None)
    package.models, models.resnet50 = models, small_net
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert image_note() == "VGG19 and ResNet-50 are torchvision's, with random weights."
    assert {p.device.type for p in image_task("resnet50", "meta").model.parameters()} == {"meta"}
    task = image_task("resnet50")
    images, labels = task.data.batch(range(4))
    assert task.loss(task.model(images), labels).isfinite()


@pytest.mark.parametrize("name", ["vgg19", "resnet50"])
def test_without_torchvision_the_models_are_the_zoos(monkeypatch, name):
    monkeypatch.setattr("pipedejavu.reproduce.image_model.find_spec", lambda _: None)
    assert "the zoo's" in image_note()
    task = image_task(name, "meta")
    assert type(task.model).__module__.startswith("pipedejavu.zoo")
