"""The rates of a device, and the time of counted operations at these rates: a roofline per operation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipedejavu.facts import Device, InputError, Machine, Unit
from pipedejavu.profile.operator_meter import OperatorWork
from pipedejavu.profile.predictor import Efficiency

REACHED = 0.8
"""Share of its stated rates that a device's best products and copies reach; measured rates are reached in full."""

INSIDE = {"cpu": 0.7}
"""Speed of an operator inside a model relative to its speed alone, by type of device. Inside a model its results are
new memory and its caches are cold. Fitted to models of the zoo; 1 for types without such measurements."""


_OF_16_BITS = {"tf32": 1 / 2, "fp32": 1 / 16, "fp64": 1 / 16}
"""A GPU's rate in a precision relative to its rate in 16 bits, which machines state: on GPUs from Ampere on."""


@dataclass(frozen=True)
class Rates:
    """Rates that a kind of device is assumed to reach."""

    flop_per_s: float
    bytes_per_s: float
    efficiency: Efficiency
    parameters_per_s: float = 0.0
    """Parameters that the optimizer updates per second; zero if not known."""

    def time_s(self, works: Iterable[OperatorWork]) -> float:
        """Returns the time of operations that run one after another."""
        launch_s = self.efficiency.launch_s["forward"]
        return sum(launch_s + self._bound_s(work) / self.efficiency.share(work.class_) for work in works)

    def update_s(self, unit: Unit) -> float:
        """Returns the time of an update of a unit's parameters."""
        if self.parameters_per_s:
            return unit.num_parameters / self.parameters_per_s
        # Weights and state are read and written, gradients are read.
        size_bytes = 2 * (unit.parameter_bytes + unit.optimizer_bytes) + unit.gradient_bytes
        return self.time_s([OperatorWork(0, size_bytes, "update")] if unit.optimizer_bytes else [])

    def _bound_s(self, work: OperatorWork) -> float:
        return max(work.flop / self.flop_per_s, work.size_bytes / self.bytes_per_s)


def read_rates(
    machine: Machine, efficiencies: Mapping[str, Efficiency], assumed: float, compute: str = "bf16"
) -> dict[str, Rates]:
    """Returns the rates of each kind of device that states both; raises InputError if none does.

    A GPU states its rate in 16 bits; products of another format `compute` run at a share of it.

    A type of device without a fitted efficiency is assumed to reach the share `assumed` of its arithmetic, and its full
    memory bandwidth.
    """
    rates = {
        device.kind: _rates(device, efficiencies.get(device.type), assumed, 1.0 if machine.survey else REACHED, compute)
        for device in machine.devices
        if device.flop_per_s and device.memory_bytes_per_s
    }
    if not rates:
        names = ", ".join(device.name for device in machine.devices)
        raise InputError(
            f"no time can be estimated: of {names}, none has both flop_per_s and memory_bytes_per_s; add them to the"
            " machine file"
        )
    return rates


def _rates(device: Device, efficiency: Efficiency | None, assumed: float, reached: float, compute: str) -> Rates:
    flop_per_s, bytes_per_s = device.flop_per_s, device.memory_bytes_per_s
    if device.type == "gpu":
        flop_per_s *= _OF_16_BITS.get(compute, 1.0)
    if efficiency is None:
        plain = Efficiency(launch_s={"forward": 0.0}, shares={"elementwise": 1.0})
        return Rates(assumed * flop_per_s, bytes_per_s, plain, device.parameters_per_s)
    share = reached * INSIDE.get(device.type, 1.0)
    return Rates(share * flop_per_s, share * bytes_per_s, efficiency, device.parameters_per_s)
