"""Suspicion-based aggregation (Zeno): scores the gradient of each replica, and drops those with the lowest scores.

The score of a gradient u is the negative loss f, on the server's own samples, after a step along u, minus a penalty on
its size, with learning rate γ and the plan's penalty ρ:

    score(u) = −f(w − γu) − ργ|u|²

The published score also adds the loss before the step. It is the same for all replicas, so it is not computed.
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
    """The samples that all gradients of one update are scored on, with the same random numbers."""

    microbatch: int
    inputs: Any
    targets: Any
    samples: int
    rate: float
    penalty: float


def number_of(update: int) -> int:
    """Returns the number of the microbatch that an update's gradients are scored on; its own inverse."""
    return -1 - update


def score(
    runners: Sequence[PieceRunner],
    job: Job,
    trial: ScoreTrial,
    weights: Sequence[Tensors],
    piece: int,
    summed: Tensors,
    count: int,
) -> float:
    """Returns the score of the gradients of a piece that are summed over `count` samples; the other pieces stay.

    The score is minus infinity if it is not finite, or if the optimizer's arithmetic would overflow. Running statistics
    do not change: normalisation uses the statistics of the samples.
    """
    update = number_of(trial.microbatch)
    values = read_all(largest_values([*summed.values()]))
    limits = (job.optimizer.largest_gradient(update, gradient.dtype) for gradient in summed.values())
    if not all(value / count <= limit for value, limit in zip(values, limits, strict=True)):
        return -math.inf
    square = sum(float(gradient.double().square().sum()) for gradient in summed.values()) / count**2
    stepped = {n: weight.detach().sub(summed[n], alpha=trial.rate / count) for n, weight in weights[piece].items()}
    value, number = trial.inputs, trial.microbatch
    with torch.no_grad():
        for n, runner in enumerate(runners):
            moved = stepped if n == piece else weights[n]
            value, _ = runner.forward(moved, value, number, keeps_buffers=True, is_first=n == 0)
        loss: Tensor = job.loss(value, trial.targets)
    result = -loss.item() / trial.samples - trial.penalty * trial.rate * square
    return result if math.isfinite(result) else -math.inf


def kept(scores: Sequence[float], trim: int) -> tuple[int, ...]:
    """Returns the replicas to trust, in order: all but the `trim` lowest scores and those that are not finite."""
    best = sorted(range(len(scores)), key=lambda replica: (-scores[replica], replica))[: len(scores) - trim]
    return tuple(sorted(replica for replica in best if math.isfinite(scores[replica])))
