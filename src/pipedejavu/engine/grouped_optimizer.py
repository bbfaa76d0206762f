"""An optimizer whose parameters have settings by group, which may change from update to update.

Does not know where the settings come from: before a round, the caller puts down those of each of its updates.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedejavu.engine.given_optimizer import GivenOptimizer
from pipedejavu.engine.optimizer import AdamW, Sgd, State, Tensors
from pipedejavu.optim.moment_format import MomentFormat


@dataclass(frozen=True)
class GroupRule:
    """How the parameters of a group are updated."""

    rule: AdamW | Sgd | GivenOptimizer
    maximizes: bool = False
    """Whether the loss grows along the update."""


class GroupedOptimizer:
    """Updates each parameter by the rule of its group."""

    def __init__(self, groups: Mapping[str, int], left_out: frozenset[str], rules: Sequence[GroupRule]):
        self.groups, self.left_out = groups, left_out
        self._rules = {0: tuple(rules)}
        """The rules of all groups, by update."""
        self._moments: MomentFormat = "fp32"

    def with_moments(self, form: MomentFormat) -> "GroupedOptimizer":
        """Returns an optimizer with the same rules, also later ones, and moments in a format."""
        other = copy.copy(self)
        other._moments = form
        return other

    def put(self, rules: Mapping[int, Sequence[GroupRule]]) -> None:
        """Replaces the rules by those of some updates; updates after them follow the last."""
        known = {update: tuple(some) for update, some in rules.items()}
        self._rules.clear()
        self._rules.update(known)

    def slots_of(self, name: str) -> set[str]:
        """Returns the names of a parameter's state."""
        return set() if name in self.left_out else self._with_format(self.rule_of(name, max(self._rules))).slots

    def shrinks(self, name: str) -> bool:
        """Whether weight decay changes a parameter even if its gradient is zero."""
        return name not in self.left_out and self.rule_of(name, max(self._rules)).rule.shrinks(name)

    def rate(self, update: int) -> float:
        """Returns the learning rate of the first group."""
        return self._at(update)[0].rule.lr

    def largest_gradient(self, update: int, dtype: torch.dtype) -> float:
        """Returns the largest mean gradient with which the arithmetic of every group stays finite."""
        return min(group.rule.largest_gradient(update, dtype) for group in self._at(update))

    def step(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float, out: Tensors
    ) -> None:
        """Writes the new weights to `out`, which may be the gradients or the weights, after one update."""
        for group, names in self._by_group(gradients, update):
            factor = -coefficient if group.maximizes else coefficient
            self._with_format(group).step(
                update, weights, {name: gradients[name] for name in names}, state, factor, out
            )
        for name in self.left_out & gradients.keys():
            out[name].detach().copy_(weights[name].detach())

    def deltas(
        self, update: int, weights: Tensors, gradients: Tensors, state: State, coefficient: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields what to add to each weight, in the memory of its gradient, after multiplying that by `coefficient`."""
        for name, gradient in gradients.items():
            if name in self.left_out:
                yield name, gradient.zero_()
                continue
            group = self.rule_of(name, update)
            factor = -coefficient if group.maximizes else coefficient
            yield from self._with_format(group).deltas(update, weights, {name: gradient}, state, factor)

    def _with_format(self, group: GroupRule) -> AdamW | Sgd | GivenOptimizer:
        return group.rule.with_moments(self._moments)

    def _by_group(self, names: Iterable[str], update: int) -> Iterator[tuple[GroupRule, list[str]]]:
        """Yields each group with those of its parameters that are among `names`."""
        members: dict[int, list[str]] = {}
        for name in names:
            if name not in self.left_out:
                members.setdefault(self.groups.get(name, 0), []).append(name)
        for number, some in members.items():
            yield self._at(update)[number], some

    @property
    def newest(self) -> tuple[GroupRule, ...]:
        """The rules of all groups, of the last update that they are known for."""
        return self._rules[max(self._rules)]

    def rule_of(self, name: str, update: int) -> GroupRule:
        """Returns the rule of a parameter at an update."""
        return self._at(update)[self.groups.get(name, 0)]

    def _at(self, update: int) -> tuple[GroupRule, ...]:
        return self._rules.get(update) or self._rules[max(self._rules)]
