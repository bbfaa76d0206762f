"""Profiles of GPT models from their shape alone: arithmetic on sizes, without a model, weights or torch.

Note [time on a GPU]. A unit takes the longer of its GPU's time and of its host's time to issue the work. The GPU's time
is that of its matrix products, and of all other passes over memory: activations, attention scores, logits, and the
gradients of weights. A member of a tensor-parallel group computes products with fewer columns or rows, and passes over
replicated activations as one device does; its host issues as many kernels. Weights, activations and gradients have
16 bits, optimizer state has 32; each layer is recomputed as a whole, if at all.

On a CPU, and on a GPU that does not state the rate of its memory, a unit takes its operations and its output's bytes at
the rates of the device.
"""

from collections.abc import Callable
from typing import NamedTuple

from pydantic import Field

from pipedejavu.facts import Cost, Device, Machine, Profile, Record, Unit, UnitTime
from pipedejavu.program.tp_group import tp_kind
from pipedejavu.zoo.gpt_shape import Shape, read_shape

EFFICIENCY = 0.4
"""Share of a device's stated rate that training is assumed to reach, if the machine does not say."""
REFERENCE = 0.44
"""Efficiency that machines state for an A100; others reach shares of their matrix rate in proportion to theirs."""
FITTED_KIND, FITTED_ERROR, OTHER_ERROR = "a100", 0.1, 0.2
"""The kind of device that the constants are fitted to, and the error of forecasts on it and on others: the standard
deviation of the logarithm of measured over forecast. That of the A100 is of rows left out of a fit; others are off by a
factor of 1.2 on average (docs/forecast.md)."""
TP_SIZES = (2, 4, 8, 16)
"""Sizes of tensor-parallel groups with times of their own."""


class GptConstants(Record):
    """Fitted constants of a GPU and its host; the defaults are from published runs on A100 (`bench/published.py`)."""

    matrix: float = Field(default=0.85, gt=0)
    """Share of the stated matrix rate that large products reach on a device of efficiency `REFERENCE`."""
    memory: float = Field(default=1.0, gt=0)
    """Share of the stated memory rate that all other kernels reach."""
    product_s: float = Field(default=4e-6, ge=0)
    """Time of a matrix product apart from its arithmetic and its bytes."""
    logit_bytes: float = Field(default=175.0, ge=0)
    """Bytes per logit that the loss and its backward read and write, apart from the head's products."""
    layer_host_s: float = Field(default=2.57e-3, ge=0)
    """Time of the host to issue a layer's forward and backward; a recomputed forward adds a third."""
    microbatch_host_s: float = Field(default=4.0e-3, ge=0)
    """Time of the host to fetch a microbatch, and to issue everything but its layers."""


_WEIGHT_BYTES, _GRADIENT_BYTES, _OPTIMIZER_BYTES = 2, 2, 12
"""Bytes per parameter: bf16 weight and gradient; fp32 master weight and two moments."""
_HALF = 2
"""Bytes per number of activations."""
_REPLICATED, _DIVIDED, _SCORES = (11, 19), (14, 28), (4.5, 5.5)
"""Passes of a layer's forward and backward over replicated activations (norms, dropout, residual sums), over divided
ones (biases, GELU of four times the width, transpositions), and over attention scores (softmax, dropout and its mask).
Each read and each write counts once."""
_EMBEDDING = (4, 4)
"""Passes of the embedding's forward and backward over its output."""
_ADD_BYTES = 10
"""Bytes per parameter to accumulate a gradient: read it in 16 bits, read and write the sum in 32."""
_UPDATE_BYTES = 42
"""Bytes per parameter of an update: unscaling, the norm, AdamW in 32 bits (28 of them), and the 16-bit weight."""
_PLAIN_UPDATE_BYTES = 28
_SAVED_REPLICATED, _SAVED_DIVIDED, _SAVED_SCORES, _SAVED_LOGITS = 10, 24, 5, 6
"""Bytes saved for the backward: per replicated and per divided activation of a layer, per attention score (the softmax,
dropout's mask and its output), and per logit (in 32 bits for the loss, and in 16 for the head's backward)."""
_NO_RATE = 1e9
"""Rate of a device that states none."""


def estimate_profile(name: str, machine: Machine, constants: GptConstants | None = None) -> Profile:
    """Returns the profile of a shape, by name or as a text, on a machine's kinds of devices."""
    return profile_of(name, read_shape(name), machine, constants)


def profile_of(name: str, shape: Shape, machine: Machine, constants: GptConstants | None = None) -> Profile:
    """Returns the profile of a shape on a machine's kinds of devices."""
    constants = constants or GptConstants()
    kinds = {device.kind: device for device in machine.devices}
    embedding, block, head = (_unit(work, shape, kinds, constants) for work in (_embedding, _block, _head))
    blocks = (block.replace(name=f"block{n}") for n in range(shape.layers))
    return Profile(
        name=name,
        units=(embedding, *blocks, head),
        tp_sizes=tuple(size for size in TP_SIZES if shape.heads % size == 0),
        error={kind: _error(device) for kind, device in kinds.items()},
    )


def _error(device: Device) -> float:
    return FITTED_ERROR if device.kind.startswith(FITTED_KIND) else OTHER_ERROR


class _Product(NamedTuple):
    """Equal matrix products of a forward, per sample: (tokens × inner) by (inner × columns)."""

    inner: float
    columns: float
    rows: float
    number: float = 1.0
    shares_weight: bool = True
    """Whether the right operand is a weight, which all samples share."""

    @property
    def flop(self) -> float:
        """Operations per sample."""
        return 2 * self.number * self.rows * self.inner * self.columns

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weight, read once per microbatch."""
        return _HALF * self.inner * self.columns if self.shares_weight else 0.0

    @property
    def operand_bytes(self) -> float:
        """Bytes per sample of the operands without the weight, and of the result."""
        right = 0.0 if self.shares_weight else self.inner * self.columns
        return _HALF * self.number * (self.rows * (self.inner + self.columns) + right)


class _Work(NamedTuple):
    """What one member of a group computes of a unit."""

    products: tuple[_Product, ...]
    forward_bytes: float
    """Bytes per sample that passes other than products read and write."""
    backward_bytes: float
    parameters: float
    host_s: float
    """Time of the host to issue the forward and the backward."""


def _block(shape: Shape, size: int, constants: GptConstants) -> _Work:
    width, part, head = shape.width, shape.width / size, shape.width / shape.heads
    tokens, heads = shape.context, shape.heads / size
    products = (
        _Product(width, 3 * part, tokens),
        _Product(part, width, tokens),
        _Product(width, 4 * part, tokens),
        _Product(4 * part, width, tokens),
        _Product(head, tokens, tokens, heads, shares_weight=False),
        _Product(tokens, head, tokens, heads, shares_weight=False),
    )
    sizes = tokens * width, tokens * part, heads * tokens**2
    forward, backward = (
        _HALF * sum(passes * size_ for passes, size_ in zip(by_size, sizes, strict=True))
        for by_size in zip(_REPLICATED, _DIVIDED, _SCORES, strict=True)
    )
    return _Work(products, forward, backward, 12 * width * part, constants.layer_host_s)


def _embedding(shape: Shape, size: int, constants: GptConstants) -> _Work:
    values = _HALF * shape.context * shape.width
    forward, backward = (passes * values for passes in _EMBEDDING)
    parameters = (shape.vocabulary / size + shape.context) * shape.width
    return _Work((), forward, backward, parameters, constants.microbatch_host_s / 2)


def _head(shape: Shape, size: int, constants: GptConstants) -> _Work:
    columns = shape.vocabulary / size
    loss = constants.logit_bytes * shape.context * columns
    product = _Product(shape.width, columns, shape.context)
    return _Work((product,), loss / 2, loss / 2, shape.width * columns, constants.microbatch_host_s / 2)


def _unit(
    work_of: Callable[[Shape, int, GptConstants], _Work],
    shape: Shape,
    kinds: dict[str, Device],
    constants: GptConstants,
) -> Unit:
    """Returns a unit with its times on each kind of device, and on groups of each kind of GPU that divide it."""
    whole = work_of(shape, 1, constants)
    gpus = {kind: device for kind, device in kinds.items() if device.type == "gpu"}
    sizes = [size for size in TP_SIZES if shape.heads % size == 0]
    saved, replicated = _saved_bytes(work_of, shape)
    return Unit(
        name=work_of.__name__.removeprefix("_"),
        times={kind: _time(whole, device, shape, constants) for kind, device in kinds.items()},
        tp_times={
            tp_kind(kind, size): _time(work_of(shape, size, constants), device, shape, constants)
            for kind, device in gpus.items()
            for size in sizes
        },
        flop=sum(product.flop for product in whole.products),
        num_parameters=round(whole.parameters),
        num_convolutions=0,
        num_products=len(whole.products),
        parameter_bytes=round(_WEIGHT_BYTES * whole.parameters),
        gradient_bytes=round(_GRADIENT_BYTES * whole.parameters),
        optimizer_bytes=round(_OPTIMIZER_BYTES * whole.parameters),
        activation_bytes=saved + replicated,
        replicated_bytes=replicated,
        boundary_bytes=4.0 * shape.context if work_of is _head else _HALF * shape.context * shape.width,
    )


def _saved_bytes(work_of: object, shape: Shape) -> tuple[float, float]:
    """Returns the bytes per sample that a unit saves in divided and in replicated activations."""
    values = shape.context * shape.width
    if work_of is _block:
        return float(_SAVED_DIVIDED * values + _SAVED_SCORES * shape.heads * shape.context**2), float(
            _SAVED_REPLICATED * values
        )
    if work_of is _head:
        return float(_SAVED_LOGITS * shape.context * shape.vocabulary), 2.0 * _HALF * values
    return 0.0, float(_HALF * values)


def _time(work: _Work, device: Device, shape: Shape, constants: GptConstants) -> UnitTime:
    if device.type != "gpu" or not device.memory_bytes_per_s:
        return _plain_time(work, device, shape)
    share = constants.matrix * (device.efficiency or EFFICIENCY) / REFERENCE
    flop_per_s = min(1.0, share) * (device.flop_per_s or _NO_RATE)
    bytes_per_s = constants.memory * device.memory_bytes_per_s
    products = Cost(
        fixed_s=sum(constants.product_s + product.weight_bytes / bytes_per_s for product in work.products),
        per_sample_s=sum(product.flop / flop_per_s + product.operand_bytes / bytes_per_s for product in work.products),
    )
    forward = products.plus(Cost(per_sample_s=work.forward_bytes / bytes_per_s))
    added = Cost(fixed_s=_ADD_BYTES * work.parameters / bytes_per_s)
    backward = products.plus(products, added, Cost(per_sample_s=work.backward_bytes / bytes_per_s))
    return UnitTime(
        forward=forward.replace(issue_s=work.host_s / 3),
        backward=backward.replace(issue_s=2 * work.host_s / 3),
        weight_backward=products.plus(added).replace(issue_s=work.host_s / 3),
        recompute=forward.replace(issue_s=work.host_s / 3),
        update_s=_update_s(work, device, bytes_per_s / _UPDATE_BYTES),
    )


def _plain_time(work: _Work, device: Device, shape: Shape) -> UnitTime:
    """Returns the times on a device whose efficiency includes passes over memory and the issue of work."""
    flop_per_s = (device.efficiency or EFFICIENCY) * (device.flop_per_s or _NO_RATE)
    bytes_per_s = device.memory_bytes_per_s or _NO_RATE
    copied_bytes = 2 * _HALF * shape.context * shape.width
    forward_s = sum(product.flop for product in work.products) / flop_per_s + copied_bytes / bytes_per_s
    forward = Cost(per_sample_s=forward_s)
    return UnitTime(
        forward=forward,
        backward=forward.times(2.0),
        weight_backward=forward,
        recompute=forward,
        update_s=_update_s(work, device, bytes_per_s / _PLAIN_UPDATE_BYTES),
    )


def _update_s(work: _Work, device: Device, parameters_per_s: float) -> float:
    return work.parameters / (device.parameters_per_s or parameters_per_s)
