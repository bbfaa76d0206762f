"""A hook of the user's model that brings the trained weights back before the model is read or called."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn


class Trains(Protocol):
    """What trains copies of a model's weights."""

    is_stale: bool
    """Whether the model lacks updates that were made."""

    def save_to_model(self) -> nn.Module:
        """Copies the trained weights into the model."""

    def detach(self) -> None:
        """Stops using the model's own modules."""


class ModelRefresh:
    """Copies the trained weights into the user's model before its `state_dict` is read and before it is called.

    The model keeps its Trainer alive, so that a function may train a model and return it. Copies and pickles of the
    model have a hook that does nothing.
    """

    only_refreshes = True

    def __init__(self, trainer: Trains | None = None):
        self.trainer = trainer

    def install(self, model: nn.Module) -> None:
        """Gives a model the hook."""
        model.register_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(self)

    def __call__(self, *_: object) -> None:
        """Copies the weights if updates were made since the last copy."""
        if self.trainer is not None and self.trainer.is_stale:
            self.trainer.save_to_model()

    def __reduce__(self) -> tuple[type["ModelRefresh"], tuple[()]]:
        return ModelRefresh, ()


def release(model: nn.Module) -> None:
    """Copies what an earlier Trainer trained into the model, and removes that one's hooks."""
    tables: tuple[Mapping[int, Any], ...] = (model._state_dict_pre_hooks, model._forward_pre_hooks)
    for hooks in tables:
        for number, hook in [*hooks.items()]:
            if isinstance(hook, ModelRefresh):
                hook()
                if hook.trainer is not None:
                    hook.trainer.detach()
                    hook.trainer = None
                del hooks[number]  # type: ignore[attr-defined]
