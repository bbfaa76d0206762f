"""The door to the room that trains: it needs torch, which planning does not."""

from importlib import import_module
from types import ModuleType

from pipedejavu.facts import InputError


def training_room() -> ModuleType:
    """Returns the room that trains; raises InputError where what it needs is not installed."""
    try:
        return import_module("pipedejavu.train")
    except ImportError as error:
        raise InputError(f"training needs torch and safetensors: pip install 'pipedejavu[train]' ({error})") from None
