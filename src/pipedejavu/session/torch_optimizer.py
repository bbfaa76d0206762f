"""A torch optimizer and its scheduler as the user made them, read before each update.

The engine makes the updates, and keeps moments with the weights, wherever a plan puts them. The settings of the
parameter groups stay in the user's objects: what a scheduler or the user's loop changes there counts from the next
update on.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pipedejavu.engine import AdamW, Sgd
from pipedejavu.engine.given_optimizer import KINDS, GivenOptimizer
from pipedejavu.engine.grouped_optimizer import GroupedOptimizer, GroupRule
from pipedejavu.facts import InputError
from pipedejavu.facts.printable import tell
from pipedejavu.plan import Plan
from pipedejavu.profile.sequential import Units
from pipedejavu.run.saved_facts import SavedFacts

_TAKEN = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
_NAMES = f"torch.optim.AdamW, Adam and SGD, and {', '.join(kind.__name__ for kind in KINDS)}"
_UNKNOWN = ("amsgrad", "differentiable")
"""Options that change the arithmetic; `foreach`, `fused` and `capturable` only choose how torch computes it."""


class TorchOptimizer:
    """A torch optimizer whose updates the engine makes."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None):
        _check_kind(optimizer)
        _check_parameters(model, optimizer)
        _check_scheduler(optimizer, scheduler)
        self.optimizer, self.scheduler = optimizer, scheduler
        self._updates: GroupedOptimizer | None = None
        self._rules()  # refuses options

    def for_units(self, units: Units) -> GroupedOptimizer:
        """Returns the engine's optimizer of a model's units."""
        groups = {id(p): n for n, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        named = [pair for unit, module in units for pair in module.named_parameters(unit, remove_duplicate=False)]
        self._updates = GroupedOptimizer(
            {name: groups[id(p)] for name, p in named if id(p) in groups},
            frozenset(name for name, p in named if id(p) not in groups),
            self._rules(),
        )
        return self._updates

    def begin(self, first: int, count: int) -> None:
        """Puts down the settings of `count` updates from `first` on; the scheduler makes a step between two."""
        assert self._updates is not None
        rules = {first: self._rules()}
        for update in range(first + 1, first + count):
            self._advance()
            rules[update] = self._rules()
        self._updates.put(rules)

    def end(self) -> None:
        """Lets the scheduler make its step after the last update."""
        self._advance()

    def _advance(self) -> None:
        if self.scheduler is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else the scheduler warns that no update was made
            self.scheduler.step()

    def _rules(self) -> list[GroupRule]:
        return [_rule(self.optimizer, group) for group in self.optimizer.param_groups]

    def facts(self) -> dict[str, Any]:
        """Returns the settings of groups and scheduler, for a checkpoint."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        state = self.scheduler.state_dict() if self.scheduler is not None else None
        facts: dict[str, Any] = {"groups": _plain(groups), "scheduler": _plain(state)}
        try:
            json.dumps(facts, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"the optimizer or its scheduler holds more than tensors and numbers: {error}") from None
        return facts

    def restore(self, saved: SavedFacts) -> None:
        """Restores the settings of groups and scheduler from a checkpoint."""
        groups = self.optimizer.param_groups
        if saved.groups is not None:
            if len(saved.groups) != len(groups):
                raise InputError(
                    f"the checkpoint has {len(saved.groups)} groups of parameters, and the optimizer {len(groups)};"
                    " make the optimizer as in the run that saved it"
                )
            for group, loaded in zip(groups, saved.groups, strict=True):
                group.update({name: _like(value, group.get(name)) for name, value in loaded.items()})
        if self.scheduler is None:
            return
        if saved.scheduler is None:
            tell("the checkpoint holds no schedule: that of the scheduler begins with the next update")
        else:
            self.scheduler.load_state_dict(_like(saved.scheduler, self.scheduler.state_dict()))


def read_optimizer(model: nn.Module, optimizer: Any, scheduler: Any) -> TorchOptimizer | None:
    """Returns a torch optimizer with its scheduler as updates of the engine; None for an optimizer of the engine."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchOptimizer(model, optimizer, scheduler)
    if scheduler is not None:
        raise InputError(
            "a scheduler changes the rates of a torch optimizer, and none is given; give the one that it was made for"
        )
    if optimizer is not None and not isinstance(optimizer, Sgd | AdamW):
        raise InputError(f"the optimizer is a {type(optimizer).__name__}; the Trainer takes {_NAMES}")
    return None


def check_whole_state(optimizer: Any, plan: Plan) -> None:
    """Raises InputError if a plan divides parameters and their state, and the optimizer is run as torch runs it."""
    kinds = kinds_of_whole(optimizer)
    if kinds and (plan.keep.kind.startswith("zero") or plan.place.shards > 1 or plan.place.stage_shards):
        raise InputError(
            f"plan '{plan.name}' divides the state of a parameter over workers, and {kinds[0]} is run on whole ones;"
            " use AdamW, Adam or SGD, or a plan such as '1f1b' or 'ddp'"
        )


def kinds_of_whole(optimizer: Any) -> list[str]:
    """Returns the optimizers among the groups that are run as torch runs them, on whole parameters."""
    groups = optimizer.newest if isinstance(optimizer, GroupedOptimizer) else ()
    return [group.rule.kind.__name__ for group in groups if isinstance(group.rule, GivenOptimizer)]


def read_positional(positional: tuple[Any, ...], optimizer: Any, loss: Any) -> tuple[Any, Any]:
    """Returns optimizer and loss from the arguments after the model, which may be in either order."""
    for value in positional:
        is_optimizer = isinstance(value, torch.optim.Optimizer | Sgd | AdamW)
        if not is_optimizer and value is not None and not callable(value):
            raise InputError(
                f"the arguments after the model are the optimizer and the loss, and one is a {type(value).__name__};"
                " name the others"
            )
        if value is not None and (optimizer if is_optimizer else loss) is not None:
            raise InputError(f"two {'optimizers' if is_optimizer else 'losses'} are given; give one")
        optimizer, loss = (value, loss) if is_optimizer else (optimizer, loss if value is None else value)
    return optimizer, loss


def _rule(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> GroupRule:
    for option in _UNKNOWN:
        if group.get(option):
            raise InputError(
                f"{type(optimizer).__name__} has {option}=True, which the Trainer does not take; leave it out"
            )
    maximizes = bool(group.get("maximize"))
    if isinstance(optimizer, KINDS):
        return GroupRule(GivenOptimizer.of(optimizer, group), maximizes)
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if isinstance(optimizer, torch.optim.SGD):
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        rule: Sgd | AdamW = Sgd(
            lr=lr, weight_decay=decay, momentum=momentum, dampening=dampening, nesterov=bool(group["nesterov"])
        )
        return GroupRule(rule, maximizes)
    beta1, beta2 = group["betas"]
    is_decoupled = bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
    betas = (float(beta1), float(beta2))
    rule = AdamW(lr=lr, weight_decay=decay, betas=betas, eps=float(group["eps"]), is_decoupled=is_decoupled)
    return GroupRule(rule, maximizes)


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    if kind not in (*_TAKEN, *KINDS):
        raise InputError(
            f"the optimizer is a {kind.__name__}; the Trainer takes {_NAMES}, whose updates its workers make themselves"
        )
    if optimizer.state and any(state.get("step", 1) > 0 for state in optimizer.state.values()):
        raise InputError(
            f"the {kind.__name__} has made updates already, and their moments would be lost; give a new one, or save"
            " with Checkpoints(folder).save(model, optimizer, step=...) and call Trainer.load(folder)"
        )


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise InputError(
                    f"group {number} of the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not"
                    f" the {type(model).__name__}'s; make the optimizer from the parameters of the trained model"
                )


def _check_scheduler(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InputError(
            "a ReduceLROnPlateau needs a value that only your loop knows; leave scheduler= out and call its step(loss)"
            " after evaluate(): each update reads the rates of the optimizer"
        )
    if not isinstance(scheduler, LRScheduler):
        raise InputError(
            f"scheduler is a {type(scheduler).__name__}; give a scheduler of torch.optim.lr_scheduler, made for the"
            " optimizer"
        )
    if scheduler.optimizer is not optimizer:
        raise InputError("the scheduler was made for another optimizer; make it for the one that is given")


def _plain(value: Any) -> Any:
    """Returns settings in a form that JSON can hold."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(inside) for key, inside in value.items()}
    return [_plain(inside) for inside in value] if isinstance(value, list | tuple) else value


def _like(saved: Any, now: Any) -> Any:
    """Returns settings that JSON held in the form that they have now: with tuples, and keys that are numbers."""
    if isinstance(saved, dict) and isinstance(now, Mapping):
        names = {str(key): key for key in now}
        return type(now)(
            {names.get(name, name): _like(inside, now.get(names.get(name))) for name, inside in saved.items()}
        )  # type: ignore[call-arg]
    if isinstance(saved, list) and isinstance(now, list | tuple):
        others = [*now, *[None] * len(saved)]
        return type(now)(_like(inside, other) for inside, other in zip(saved, others, strict=False))
    return saved
