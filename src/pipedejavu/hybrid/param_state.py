"""The optimizer state of one parameter, and its gradient on its way to the update."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipedejavu.optim.arithmetic import AdamState
from pipedejavu.optim.moment_format import MomentFormat
from pipedejavu.optim.state_parts import state_parts
from pipedejavu.runtime.lane_event import LaneEvent


@dataclass(eq=False)
class ParamState:
    """The optimizer state of one parameter."""

    name: str
    parameter: nn.Parameter
    group: Mapping[str, Any]
    """Its parameter group in the optimizer, whose learning rate a scheduler may change."""
    slot: int
    """Its index among the norms of all gradients."""
    moments: MomentFormat = "fp32"
    """The format in which its moments rest."""
    start: int = 0
    """Offset in bytes of its state in memory that holds the state of the whole unit."""
    step: int = 0
    """Updates that were applied."""
    arrived: int = 0
    """Backward passes since the last step that gave it a gradient."""
    gradient: Tensor | None = None
    """Its gradient in host memory."""
    wide_sum: Tensor | None = None
    """The sum of its bf16 gradients in float32, on the device; None if autograd adds them up in the model."""
    state: AdamState | None = None
    shadow: AdamState | None = None
    """A second copy of its state, which speculative updates write."""
    out: LaneEvent | None = None
    """The end of the copy of its gradient to host memory."""
    _weight: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Its values in the model, one-dimensional; cached, because making a view holds up the compute lane."""
        data = self.parameter.data
        if self._weight is None or self._weight.data_ptr() != data.data_ptr():
            self._weight = data.view(-1)
        return self._weight

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return self.parameter.numel()

    @property
    def state_bytes(self) -> int:
        """The bytes of its state alone in memory."""
        return sum(dtype.itemsize * count for dtype, count in state_parts(self.parameter, self.moments))

    def setting(self) -> tuple[float, tuple[float, float], float, float]:
        """Returns the present learning rate, betas, eps and weight decay."""
        return float(self.group["lr"]), tuple(self.group["betas"]), self.group["eps"], self.group["weight_decay"]


def gradients_of(params: Iterable[ParamState]) -> dict[ParamState, Tensor]:
    """Returns the gradients that parameters have on the device."""
    gradients = {param: param.parameter.grad if param.wide_sum is None else param.wide_sum for param in params}
    return {param: gradient for param, gradient in gradients.items() if gradient is not None}
