"""Suspicion-based aggregation (Zeno): what a server thinks of each contribution, and which ones it drops.

A contribution u scores by what a step along it does to the loss f on samples of the server's own, less what its size
costs, γ being the learning rate and ρ the plan's penalty:

    score(u) = −f(w − γu) − ργ|u|²

The loss before the step, which the published score begins with, is the same for all, so it is not worked out.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipedejavu.engine.finite import largest_values, read_all
from pipedejavu.engine.job import Job
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.piece import PieceRunner


class ScoreTrial(NamedTuple):
    """What the contributions of one update are scored on: all on the same samples, under the same randomness."""

    microbatch: int
    inputs: Any
    targets: Any
    samples: int
    rate: float
    penalty: float


def number_of(update: int) -> int:
    """Returns the number of the microbatch that an update's contributions are scored on, and the other way round."""
    return -1 - update


def score(runner: PieceRunner, job: Job, trial: ScoreTrial, weights: Tensors, summed: Tensors, count: int) -> float:
    """Returns the score of gradients that are summed over `count` samples.

    It is minus infinity if it is no number, or if the optimizer's arithmetic would overflow. Running statistics stay as
    they are: normalisation counts over the samples.
    """
    update = number_of(trial.microbatch)
    values = read_all(largest_values([*summed.values()]))
    limits = (job.optimizer.largest_gradient(update, gradient.dtype) for gradient in summed.values())
    if not all(value / count <= limit for value, limit in zip(values, limits, strict=True)):
        return -math.inf
    square = sum(float(gradient.double().square().sum()) for gradient in summed.values()) / count**2
    stepped = {n: weight.detach().sub(summed[n], alpha=trial.rate / count) for n, weight in weights.items()}
    with torch.no_grad():
        output, _ = runner.forward(stepped, trial.inputs, trial.microbatch, keeps_buffers=True, is_first=True)
        loss: Tensor = job.loss(output, trial.targets)
    found = -loss.item() / trial.samples - trial.penalty * trial.rate * square
    return found if math.isfinite(found) else -math.inf


def kept(scores: Sequence[float], trim: int) -> tuple[int, ...]:
    """Returns the replicas to trust, in order: without the `trim` lowest scores and all that are no numbers."""
    best = sorted(range(len(scores)), key=lambda replica: (-scores[replica], replica))[: len(scores) - trim]
    return tuple(sorted(replica for replica in best if math.isfinite(scores[replica])))
