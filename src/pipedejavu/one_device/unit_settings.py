"""The parameter groups of HybridAdamW for a job: each parameter has the settings that the job's optimizer gives it."""

from typing import Any

from torch import nn

from pipedejavu.engine import AdamW, Job
from pipedejavu.engine.grouped_optimizer import GroupedOptimizer
from pipedejavu.facts import InputError


class UnitSettings:
    """Groups of parameters with equal settings, and what an update of the job's optimizer changes in them."""

    def __init__(self, job: Job):
        self.optimizer = job.optimizer
        known = set[int]()
        members: dict[tuple[int, bool], tuple[str, list[nn.Parameter]]] = {}
        for unit, module in job.units:
            for name, parameter in module.named_parameters(unit, remove_duplicate=False):
                if parameter.requires_grad and id(parameter) not in known:
                    known.add(id(parameter))
                    members.setdefault(self._key(name), (name, []))[1].append(parameter)
        self._names = [name for name, _ in members.values()]
        """By group: the name of one of its parameters, which all have the same settings."""
        self.groups: list[dict[str, Any]] = [
            {"params": params} | self._settings(n, 0) for n, params in members.values()
        ]

    def _key(self, name: str) -> tuple[int, bool]:
        """Returns what the settings of a parameter depend on."""
        number = self.optimizer.groups.get(name, 0) if isinstance(self.optimizer, GroupedOptimizer) else 0
        return number, self._rule(name, 0).decays(name)

    def _rule(self, name: str, update: int) -> AdamW:
        rule: object = self.optimizer
        if isinstance(self.optimizer, GroupedOptimizer):
            group = self.optimizer.rule_of(name, update)
            rule = None if group.maximizes else group.rule
        if not isinstance(rule, AdamW) or not rule.is_decoupled:
            raise InputError(
                f"the optimizer of '{name}' was changed to maximize, or to another than AdamW with decoupled weight"
                " decay, between two steps; make a new Trainer for it"
            )
        return rule

    def _settings(self, name: str, update: int) -> dict[str, Any]:
        rule = self._rule(name, update)
        decay = rule.weight_decay if rule.decays(name) else 0.0
        return {"lr": rule.rate(update), "betas": rule.betas, "eps": rule.eps, "weight_decay": decay}

    def write(self, groups: list[dict[str, Any]], update: int) -> None:
        """Writes the settings of an update into the groups of the optimizer."""
        for group, name in zip(groups, self._names, strict=True):
            group.update(self._settings(name, update))
