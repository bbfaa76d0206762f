"""The mean of the weights of replicas that update separately: of all alike, or of each filter where it was trained."""

from typing import Any, Protocol

import torch
from torch import Tensor

from pipedejavu.engine.filter_masks import FilterMasks
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.summed_piece import add_up
from pipedejavu.engine.wire import Wire
from pipedejavu.program import Action, Program, Value
from pipedejavu.program.action import value_of


class HoldsWeights(Protocol):
    """A worker, as far as the mean of its weights needs it."""

    program: Program
    values: dict[Value, Any]
    wire: Wire
    first_version: int


def average_weights(worker: HoldsWeights, masks: FilterMasks | None, a: Action) -> Tensors:
    """Returns the mean of the weights of a piece over the replicas of a group."""
    weights: Tensors = worker.values[value_of(a)]
    if masks is not None:
        return masks.average(worker.wire, a.group, weights, a.replica, worker.first_version + a.version - 1)
    sums, count = add_up(worker.wire, weights, a.group), len(worker.program.groups[a.group].workers)
    return {name: total.div_(count) for name, total in sums.items()}


class ReplayAverage:
    """The means of a replay, made once all replicas have made a version."""

    def __init__(self, num_replicas: int, masks: FilterMasks | None):
        self.num_replicas, self.masks = num_replicas, masks
        self._unmet: dict[tuple[int, int], dict[int, dict[str, Tensor]]] = {}
        """By (piece, version), the weights of the replicas that wait to be averaged."""

    def add(self, piece: int, replica: int, version: int, new: Tensors) -> Tensors | None:
        """Takes a replica's version; returns the mean of all replicas' once this is the last of them."""
        made = self._unmet.setdefault((piece, version), {})
        made[replica] = new
        if len(made) < self.num_replicas:
            return None
        in_order = [made[q] for q in sorted(self._unmet.pop((piece, version)))]
        if self.masks is not None:
            return self.masks.mean(in_order, version - 1)
        return {n: torch.stack([weights[n] for weights in in_order]).sum(0) / len(in_order) for n in new}
