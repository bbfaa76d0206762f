"""A GPT's training step in closed form, on a grid of tensor × data × pipeline workers: no program, no profile.

Note [where the time goes]. A worker's microbatch takes what its GPU needs or what its host needs to launch the kernels:

    GPU    products at a share of the matrix rate; every other pass over values, scores, logits and gradients at a
           share of the memory rate; all-reduces of a divided layer, each with the wait until its last member is there
    host   a time for each layer, and one for each microbatch

The pipeline (1F1B) is its slowest stage for every microbatch and the others once; the step ends with the sum of
gradients over replicas, that of the embedding over the first and the last stage, and the update. None of these overlap.
Weights, activations and gradients have 16 bits, sums of gradients and the optimizer's state 32.
"""

import math
from typing import NamedTuple

from pydantic import Field

from pipedejavu.facts import InputError
from pipedejavu.facts.record import Record
from pipedejavu.simulate.wiring import Grid, Wiring


class GptShape(NamedTuple):
    """The numbers that make a GPT."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 51200


class GptBatch(NamedTuple):
    """How a replica's share of a batch is cut."""

    samples: int
    """In a microbatch."""
    microbatches: int
    recomputes: bool = False
    """Whether every layer runs forward again for its backward."""


class GptConstants(Record):
    """What is fitted; the defaults are those of A100s under an eager framework, calibrated by `bench/published.py`."""

    matrix: float = Field(default=0.8, gt=0, le=1)
    """Share of the stated matrix rate that large products reach."""
    memory: float = Field(default=0.715, gt=0, le=1)
    """Share of the stated memory rate that all other kernels reach."""
    logit_bytes: float = Field(default=138.0, gt=0)
    """Read and written for each logit by the loss and its backward, beside the head's products."""
    layer_host_s: float = Field(default=3.4e-3, gt=0)
    """To launch a layer's forward and backward."""
    microbatch_host_s: float = Field(default=1.36e-3, gt=0)
    """To launch everything else of a microbatch, and to fetch it."""
    wait_s: float = Field(default=1.68e-4, gt=0)
    """Until the second of two workers is there for an all-reduce; the last of n comes after log₂ n times this."""


class GptStep(NamedTuple):
    """A step's time, part by part."""

    pipeline_s: float
    """All microbatches, from the first forward to the last backward."""
    reduce_s: float
    update_s: float
    host_share: float
    """The host's time for a microbatch of the slowest stage as a part of its GPU's; above 1 the host is the bound."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.pipeline_s + self.reduce_s + self.update_s


_HALF, _FULL = 2, 4
"""Bytes of a number."""
_REPLICATED, _DIVIDED, _SCORES = (11, 19), (14, 28), (4.5, 5.5)
"""Passes of a layer's forward and backward over values that every member of a tensor group has (norms, dropout,
residual sums), over those that are divided (biases, GELU of four times the width, transpositions), and over attention's
scores (softmax, dropout and its mask). A value that is read, or written, counts once."""
_ADD_BYTES = 10
"""Of each parameter, to add a microbatch's gradient to the sum: one of 16 bits and the sum read, the sum written."""
_UPDATE_BYTES = 42
"""Of each parameter: unscaling, the norm, AdamW on 32 bits (28 of them), and the new weight of 16 bits."""
_SHARPNESS = 5
"""Of the larger of GPU and host: where both take about as long, neither hides behind the other wholly."""


def estimate_gpt(
    shape: GptShape, grid: Grid, batch: GptBatch, wiring: Wiring, constants: GptConstants | None = None
) -> GptStep:
    """Returns the time of a training step; raises InputError where a shape cannot be divided so."""
    check_division(shape, grid)
    given = _Given(shape, grid, batch, wiring, constants or GptConstants())
    even, more = divmod(shape.layers, grid.pipeline)
    stages = [_stage(given, even + (n < more), n) for n in range(grid.pipeline)]
    slots = [_larger(gpu_s, host_s) for gpu_s, host_s in stages]
    send_s = 2 * wiring.pipeline.send_s(given.boundary_bytes) if grid.pipeline > 1 else 0.0
    passes = batch.microbatches + grid.pipeline - 1
    parameters = (12 * shape.width**2 * (even + (more > 0)) + shape.vocabulary * shape.width) / grid.tensor
    reduce_s = wiring.data.reduce_s(_HALF * parameters, grid.data) if grid.data > 1 else 0.0
    if grid.pipeline > 1:
        reduce_s += wiring.ends.reduce_s(_HALF * shape.vocabulary * shape.width / grid.tensor, 2)
    slowest = max(stages, key=lambda stage: _larger(*stage))
    return GptStep(
        pipeline_s=sum(slots) + (batch.microbatches - 1) * max(slots) + passes * send_s,
        reduce_s=reduce_s,
        update_s=given.pass_s(_UPDATE_BYTES * parameters),
        host_share=slowest[1] / slowest[0],
    )


def check_division(shape: GptShape, grid: Grid) -> None:
    """Raises InputError where heads or layers do not suffice for a grid."""
    if shape.heads % grid.tensor:
        raise InputError(f"{shape.heads} heads cannot be divided over {grid.tensor} workers; use a divisor")
    if grid.pipeline > shape.layers:
        raise InputError(f"{shape.layers} layers do not make {grid.pipeline} stages; use at most one stage a layer")


class _Given(NamedTuple):
    """All that is known, with the times that follow from rates alone."""

    shape: GptShape
    grid: Grid
    batch: GptBatch
    wiring: Wiring
    constants: GptConstants

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.batch.samples * self.shape.context

    @property
    def boundary_bytes(self) -> float:
        """Of the values between two layers."""
        return _HALF * self.tokens * self.shape.width

    def pass_s(self, size_bytes: float) -> float:
        """Returns what reading and writing so many bytes takes."""
        return size_bytes / (self.constants.memory * self.wiring.device.memory_bytes_per_s)

    def product_s(self, rows: float, inner: float, columns: float, count: float = 1.0) -> float:
        """Returns what matrix products of one shape take: their arithmetic, and the passes over their operands."""
        flop = 2 * rows * inner * columns / (self.constants.matrix * self.wiring.device.flop_per_s)
        return count * (flop + self.pass_s(_HALF * (rows * inner + inner * columns + rows * columns)))


def _stage(given: _Given, layers: int, index: int) -> tuple[float, float]:
    """Returns what one microbatch takes on a stage, by its GPU and by its host."""
    shape, constants = given.shape, given.constants
    gpu_s = layers * _layer(given)
    if index == given.grid.pipeline - 1:
        columns = shape.vocabulary / given.grid.tensor
        gpu_s += 3 * given.product_s(given.tokens, shape.width, columns)
        gpu_s += given.pass_s(constants.logit_bytes * given.tokens * columns)
    again = (3 + given.batch.recomputes) / 3
    return gpu_s, layers * again * constants.layer_host_s + constants.microbatch_host_s


def _layer(given: _Given) -> float:
    """Returns what a layer's forward and backward take on a GPU."""
    shape, tokens, parts, again = given.shape, given.tokens, given.grid.tensor, given.batch.recomputes
    width = shape.width
    own, head, heads = width / parts, width / shape.heads, given.batch.samples * shape.heads / parts
    products_s = (
        given.product_s(tokens, width, 3 * own)
        + given.product_s(tokens, own, width)
        + given.product_s(tokens, width, 4 * own)
        + given.product_s(tokens, 4 * own, width)
        + given.product_s(shape.context, head, shape.context, count=heads)
        + given.product_s(shape.context, shape.context, head, count=heads)
    )
    scores = heads * shape.context**2
    passes = [
        replicated * tokens * width + divided * tokens * own + of_scores * scores
        for replicated, divided, of_scores in zip(_REPLICATED, _DIVIDED, _SCORES, strict=True)
    ]
    other_s = given.pass_s(_HALF * ((1 + again) * passes[0] + passes[1]) + _ADD_BYTES * 12 * width * own)
    reduce_s = 0.0
    if parts > 1:
        ring_s = given.wiring.tensor.reduce_s(given.boundary_bytes, parts)
        reduce_s = (4 + 2 * again) * (ring_s + given.constants.wait_s * math.log2(parts))
    return (3 + again) * products_s + other_s + reduce_s


def _larger(one_s: float, other_s: float) -> float:
    """Returns the larger of two times that hide each other, a little more where they are about equal."""
    most = max(one_s, other_s)
    return float(most * (1 + (min(one_s, other_s) / most) ** _SHARPNESS) ** (1 / _SHARPNESS))
