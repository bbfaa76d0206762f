"""How units compute in a precision: the autocast that they run under, and which of their weights are bf16.

    weights of two and more dimensions    bf16 with split masters, as autocast would round them for each use
    biases, and weights of norms          float32: they are few, and norms compute in float32
    a model that is bf16 already          as it is, without autocast

Buffers stay as they are. Knows neither optimizers nor programs.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipedejavu.plan import Precision

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


@dataclass(frozen=True)
class ComputeFormat:
    """How the units of one model compute."""

    autocast: torch.dtype | None = None
    """The 16-bit format that units and the loss run under autocast with; None for no autocast."""
    lowers: bool = False
    """Whether float32 weights become bf16."""
    is_split: bool = False
    """Whether bf16 weights have float32 masters, the other half of which is in the optimizer state."""
    sums_wide: bool = True
    """Whether gradients of bf16 weights are added up in float32."""
    precision: Precision = field(default_factory=Precision)
    """The precision of the plan."""

    @classmethod
    def of(cls, precision: Precision, modules: Iterable[nn.Module]) -> "ComputeFormat":
        """Returns how a model's modules compute in a precision."""
        sums_wide = precision.accumulate == "fp32"
        if is_bf16(modules):
            return cls(None, False, precision.is_split, sums_wide, precision)
        return cls(_DTYPES.get(precision.compute), precision.is_split, precision.is_split, sums_wide, precision)

    def context(self, device: torch.device) -> AbstractContextManager[object]:
        """Returns the context in which units and the loss run on a device.

        It keeps no casts of weights, which a pass uses once, so that repeated passes are timed as they run.
        """
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast, cache_enabled=False)

    def weight_bytes(self, module: nn.Module) -> int:
        """Returns the bytes of a module's parameters, as it computes with them."""
        return sum(self.bytes_of(part, p) for part, p in parameters_of(module))

    def bytes_of(self, owner: nn.Module, parameter: Tensor) -> int:
        """Returns the bytes of a parameter of the module `owner`, as it computes with it."""
        return 2 * parameter.numel() if self.is_lowered(owner, parameter) else parameter.nbytes

    def gradient_bytes(self, owner: nn.Module, parameter: Tensor) -> int:
        """Returns the bytes of a sum of a parameter's gradients."""
        size = self.bytes_of(owner, parameter)
        return 2 * size if self.sums_wide and self.has_master(owner, parameter) else size

    def state_bytes(self, owner: nn.Module, parameter: Tensor) -> int:
        """Returns the bytes of AdamW's state of a parameter: two moments, and the low half of a split weight."""
        low_bytes = 2 * parameter.numel() if self.has_master(owner, parameter) else 0
        if not low_bytes and self.precision.moments == "fp32":
            return 2 * parameter.nbytes
        return low_bytes + self.precision.moment_bytes(parameter.numel())

    def has_master(self, owner: nn.Module, parameter: Tensor) -> bool:
        """Whether the optimizer state of a trained parameter holds the other half of its master."""
        is_half = parameter.dtype == torch.bfloat16 or self.is_lowered(owner, parameter)
        return self.is_split and parameter.requires_grad and is_half

    def is_lowered(self, owner: nn.Module, parameter: Tensor) -> bool:
        """Whether a parameter of the module `owner` is computed with as bf16."""
        return (
            self.lowers and parameter.dtype == torch.float32 and parameter.dim() > 1 and not isinstance(owner, _NORMS)
        )


FULL = ComputeFormat()
"""Units compute in the format of their weights."""


def is_bf16(modules: Iterable[nn.Module]) -> bool:
    """Whether a model is bf16 already: some trained parameter is."""
    return any(p.requires_grad and p.dtype == torch.bfloat16 for module in modules for p in module.parameters())


def parameters_of(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yields each parameter of a module once, with the module inside it that owns it."""
    seen = set()
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield part, parameter


def lower_(module: nn.Module, form: ComputeFormat) -> nn.Module:
    """Changes the parameters of a module, in place, to the formats that they are computed with; returns it."""
    for part, parameter in [*parameters_of(module)]:
        if form.is_lowered(part, parameter):
            parameter.data = parameter.data.to(torch.bfloat16)
    return module


def low_names(units: Iterable[tuple[str, nn.Module]], form: ComputeFormat) -> frozenset[str]:
    """Returns the full names of the trained parameters of named units that are computed with as bf16, all of a tie."""
    names = set()
    for unit, module in units:
        for path, part in module.named_modules(prefix=unit, remove_duplicate=False):
            for key, parameter in part._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                if form.has_master(part, parameter):
                    names.add(".".join(filter(None, (path, key))))
    return frozenset(names)


@contextmanager
def allowed_tf32(precision: Precision) -> Iterator[None]:
    """Lets float32 matrix products of this process use TF32 meanwhile, if that is the precision."""
    if precision.compute != "tf32":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
