"""Notices what a loop changes in its model between steps: workers train copies, which would not see it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.facts.printable import tell
from pipedejavu.profile.sequential import Units
from pipedejavu.session.newest_weights import NewestWeights

_PLAIN = (bool, int, float, str)
"""Types of attributes that are compared."""


class ModelWatch:
    """The model as the last step left it."""

    def __init__(self, model: nn.Module, units: Units):
        self._model, self._units = model, units
        self._told: set[str] = set()
        self.take()

    def take(self) -> None:
        """Takes the model as it is for what workers train."""
        self._versions = {name: p._version for name, p in self._model.named_parameters()}
        self._trained = {name: p.requires_grad for name, p in self._model.named_parameters()}
        self._attributes = _attributes(self._model)

    def check(self, newest: Callable[[], NewestWeights]) -> None:
        """Raises InputError for changed parameters, and for those that were frozen or freed since the last step.

        Says once which attributes have changed: copies compute with what they were.
        """
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad != self._trained.get(name, parameter.requires_grad):
                before, now = ("is trained", "frozen") if self._trained[name] else ("is frozen", "to be trained")
                raise InputError(
                    f"parameter '{name}' {before} by this Trainer and {now} since the last step; make a new Trainer"
                    " with the model to go on from its weights"
                )
        self.check_values(newest)
        for place, value in _attributes(self._model).items():
            before = self._attributes.get(place, value)
            if before != value and place not in self._told:
                self._told.add(place)
                tell(
                    f"attribute '{place}' of the model was {before!r} and is {value!r} since the last step; the"
                    f" training goes on with {before!r} (make a new Trainer with the model to train with another)"
                )

    def check_values(self, newest: Callable[[], NewestWeights]) -> None:
        """Raises InputError if parameters were changed, and have other values than the workers' newest."""
        versions = self._versions
        changed = {id(p): name for name, p in self._model.named_parameters() if p._version != versions.get(name)}
        if changed:
            self._compare(changed, newest().tensors)

    def _compare(self, changed: Mapping[int, str], newest: Mapping[str, Tensor]) -> None:
        for unit, module in self._units:
            for full, parameter in module.named_parameters(unit, remove_duplicate=False):
                trained = newest.get(full) if id(parameter) in changed else None
                if trained is not None and not torch.equal(trained.to(parameter.device), parameter.detach()):
                    raise InputError(
                        f"parameter '{changed[id(parameter)]}' was changed since the last step, and the workers train"
                        " copies, which were not; to change weights, call state_dict() of the model, change them, and"
                        " make a new Trainer with the model"
                    )


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Returns the plain values that modules hold, by their names in the model, without whether they train."""
    return {
        ".".join(filter(None, (path, key))): value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in _PLAIN and key != "training"
    }
