"""A GPT's training step in closed form, on a grid of tensor × data × pipeline workers: no program, no profile.

Note [where the time goes]. A worker's microbatch takes the longer of its GPU's time and its host's time:

    GPU    matrix products at a share of the matrix rate; every other pass over activations, scores, logits and
           gradients at a share of the memory rate; all-reduces of a divided layer, each with the wait for its last
           worker
    host   a launch time per layer, and one per microbatch

The pipeline (1F1B) takes its slowest stage's time per microbatch, and the time of each other stage once. The step ends
with the all-reduce of gradients over replicas, that of the embedding over the first and the last stage, and the update.
None of these overlap. Weights, activations and gradients have 16 bits; summed gradients and optimizer state have 32.
"""

import math
from typing import NamedTuple

from pydantic import Field

from pipedejavu.facts import InputError
from pipedejavu.facts.record import Record
from pipedejavu.simulate.wiring import Grid, Wiring


class GptShape(NamedTuple):
    """The dimensions of a GPT."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 51200


class GptBatch(NamedTuple):
    """How a replica's share of a batch is divided into microbatches."""

    samples: int
    """Samples per microbatch."""
    microbatches: int
    recomputes: bool = False
    """Whether every layer is recomputed for its backward."""


class GptConstants(Record):
    """Fitted constants; the defaults are for A100s under an eager framework, calibrated by `bench/published.py`."""

    matrix: float = Field(default=0.8, gt=0, le=1)
    """Share of the stated matrix rate that large products reach."""
    memory: float = Field(default=0.715, gt=0, le=1)
    """Share of the stated memory rate that all other kernels reach."""
    logit_bytes: float = Field(default=138.0, gt=0)
    """Bytes per logit that the loss and its backward read and write, without the head's matrix products."""
    layer_host_s: float = Field(default=3.4e-3, gt=0)
    """Time to launch a layer's forward and backward."""
    microbatch_host_s: float = Field(default=1.36e-3, gt=0)
    """Time to fetch a microbatch and to launch everything but its layers."""
    wait_s: float = Field(default=1.68e-4, gt=0)
    """Wait for the second of two workers in an all-reduce; the wait for the last of n is log₂ n times this."""


class GptStep(NamedTuple):
    """The parts of a step's time."""

    pipeline_s: float
    """All microbatches, from the first forward to the last backward."""
    reduce_s: float
    update_s: float
    host_share: float
    """Host time per microbatch of the slowest stage relative to its GPU time; above 1 the step is host-bound."""

    @property
    def total_s(self) -> float:
        """Time of the whole step."""
        return self.pipeline_s + self.reduce_s + self.update_s


_HALF, _FULL = 2, 4
"""Bytes per number."""
_REPLICATED, _DIVIDED, _SCORES = (11, 19), (14, 28), (4.5, 5.5)
"""Passes of a layer's forward and backward over replicated activations (norms, dropout, residual sums), over divided
ones (biases, GELU of four times the width, transpositions), and over attention scores (softmax, dropout and its mask).
Each read and each write counts once."""
_ADD_BYTES = 10
"""Bytes per parameter to accumulate a gradient: read it in 16 bits, read and write the sum in 32."""
_UPDATE_BYTES = 42
"""Bytes per parameter of an update: unscaling, the norm, AdamW in 32 bits (28 of them), and the 16-bit weight."""
_SHARPNESS = 5
"""Exponent of the smooth maximum of GPU and host time: if they are about equal, neither hides the other fully."""


def estimate_gpt(
    shape: GptShape, grid: Grid, batch: GptBatch, wiring: Wiring, constants: GptConstants | None = None
) -> GptStep:
    """Returns the time of a training step; raises InputError if the shape cannot be divided over the grid."""
    check_division(shape, grid)
    setup = _GptSetup(shape, grid, batch, wiring, constants or GptConstants())
    even, more = divmod(shape.layers, grid.pipeline)
    stages = [_stage(setup, even + (n < more), n) for n in range(grid.pipeline)]
    slots = [_larger(gpu_s, host_s) for gpu_s, host_s in stages]
    send_s = 2 * wiring.pipeline.send_s(setup.boundary_bytes) if grid.pipeline > 1 else 0.0
    passes = batch.microbatches + grid.pipeline - 1
    parameters = (12 * shape.width**2 * (even + (more > 0)) + shape.vocabulary * shape.width) / grid.tensor
    reduce_s = wiring.data.reduce_s(_HALF * parameters, grid.data) if grid.data > 1 else 0.0
    if grid.pipeline > 1:
        reduce_s += wiring.ends.reduce_s(_HALF * shape.vocabulary * shape.width / grid.tensor, 2)
    slowest = max(stages, key=lambda stage: _larger(*stage))
    return GptStep(
        pipeline_s=sum(slots) + (batch.microbatches - 1) * max(slots) + passes * send_s,
        reduce_s=reduce_s,
        update_s=setup.pass_s(_UPDATE_BYTES * parameters),
        host_share=slowest[1] / slowest[0],
    )


def check_division(shape: GptShape, grid: Grid) -> None:
    """Raises InputError if the grid does not divide the heads, or has more stages than layers."""
    if shape.heads % grid.tensor:
        raise InputError(f"{shape.heads} heads cannot be divided over {grid.tensor} workers; use a divisor")
    if grid.pipeline > shape.layers:
        raise InputError(f"{shape.layers} layers do not make {grid.pipeline} stages; use at most one stage a layer")


class _GptSetup(NamedTuple):
    """The inputs of an estimate, with the times that follow from rates alone."""

    shape: GptShape
    grid: Grid
    batch: GptBatch
    wiring: Wiring
    constants: GptConstants

    @property
    def tokens(self) -> int:
        """Tokens per microbatch."""
        return self.batch.samples * self.shape.context

    @property
    def boundary_bytes(self) -> float:
        """Bytes of the activations between two layers."""
        return _HALF * self.tokens * self.shape.width

    def pass_s(self, size_bytes: float) -> float:
        """Returns the time to read or write bytes."""
        return size_bytes / (self.constants.memory * self.wiring.device.memory_bytes_per_s)

    def product_s(self, rows: float, inner: float, columns: float, count: float = 1.0) -> float:
        """Returns the time of matrix products of one shape: their arithmetic, and the passes over their operands."""
        flop = 2 * rows * inner * columns / (self.constants.matrix * self.wiring.device.flop_per_s)
        return count * (flop + self.pass_s(_HALF * (rows * inner + inner * columns + rows * columns)))


def _stage(setup: _GptSetup, layers: int, index: int) -> tuple[float, float]:
    """Returns the GPU time and the host time of one microbatch on a stage."""
    shape, constants = setup.shape, setup.constants
    gpu_s = layers * _layer(setup)
    if index == setup.grid.pipeline - 1:
        columns = shape.vocabulary / setup.grid.tensor
        gpu_s += 3 * setup.product_s(setup.tokens, shape.width, columns)
        gpu_s += setup.pass_s(constants.logit_bytes * setup.tokens * columns)
    again = (3 + setup.batch.recomputes) / 3
    return gpu_s, layers * again * constants.layer_host_s + constants.microbatch_host_s


def _layer(setup: _GptSetup) -> float:
    """Returns the GPU time of a layer's forward and backward."""
    shape, tokens, parts, again = setup.shape, setup.tokens, setup.grid.tensor, setup.batch.recomputes
    width = shape.width
    part, head, heads = width / parts, width / shape.heads, setup.batch.samples * shape.heads / parts
    products_s = (
        setup.product_s(tokens, width, 3 * part)
        + setup.product_s(tokens, part, width)
        + setup.product_s(tokens, width, 4 * part)
        + setup.product_s(tokens, 4 * part, width)
        + setup.product_s(shape.context, head, shape.context, count=heads)
        + setup.product_s(shape.context, shape.context, head, count=heads)
    )
    scores = heads * shape.context**2
    passes = [
        replicated * tokens * width + divided * tokens * part + of_scores * scores
        for replicated, divided, of_scores in zip(_REPLICATED, _DIVIDED, _SCORES, strict=True)
    ]
    other_s = setup.pass_s(_HALF * ((1 + again) * passes[0] + passes[1]) + _ADD_BYTES * 12 * width * part)
    reduce_s = 0.0
    if parts > 1:
        ring_s = setup.wiring.tensor.reduce_s(setup.boundary_bytes, parts)
        reduce_s = (4 + 2 * again) * (ring_s + setup.constants.wait_s * math.log2(parts))
    return (3 + again) * products_s + other_s + reduce_s


def _larger(one_s: float, other_s: float) -> float:
    """Returns a smooth maximum of two times: a little more than the larger if they are about equal."""
    most = max(one_s, other_s)
    return float(most * (1 + (min(one_s, other_s) / most) ** _SHARPNESS) ** (1 / _SHARPNESS))
