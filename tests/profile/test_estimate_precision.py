"""Estimates in the precision that runs: bytes as measured, rates of the format, and kernels that a compiler fuses."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import AdamW
from pipedejavu.facts import read_machine
from pipedejavu.plan import Plan, Precision
from pipedejavu.planner.precision_choice import SPLIT, estimated_precision
from pipedejavu.planner.unit_update import updates_of
from pipedejavu.profile import (
    UnitSample,
    estimate_units,
    known_efficiencies,
    make_meta_model,
    make_mode,
    measure_profile,
    read_rates,
)
from pipedejavu.profile.operator_meter import OperatorMeter, OperatorWork, fused

PRECISIONS = [Precision(), SPLIT, Precision(compute="bf16", masters="fp32")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))


def units():
    torch.manual_seed(0)
    return [("embedding", nn.Embedding(11, 8)), ("one", Block()), ("two", Block()), ("head", nn.Linear(8, 11))]


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def estimated(precision: Precision, rates):
    chain, mode = units(), make_mode()
    for _, module in chain:
        make_meta_model(module, mode)
    with mode:
        tokens = torch.zeros(4, 5, dtype=torch.int64)
    return estimate_units("net", [UnitSample(chain, tokens, tokens, loss)], (), rates, lambda _: None, precision)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_bytes_are_those_that_are_measured(precision: Precision) -> None:
    rates = read_rates(read_machine("a100"), known_efficiencies(), 0.4)
    tokens = torch.zeros(4, 5, dtype=torch.int64)
    sample = UnitSample(units(), tokens, tokens, loss)
    update = updates_of(AdamW(lr=0.1), precision)
    real = measure_profile("net", [sample], (), {"cpu": torch.device("cpu")}, update, precision=precision)
    found = estimated(precision, rates)
    assert found.precision == real.precision == str(precision)
    for one, other in zip(real.units, found.units, strict=True):
        # Torch's rule for shapes gives the two statistics of a norm of bf16 values 2 bytes; its kernel keeps float32.
        assert one.activation_bytes - other.activation_bytes in (0.0, 2 * 2 * 5)
        rest = {"times": {}, "activation_bytes": 0.0, "activation_parts": ()}
        assert one.replace(**rest) == other.replace(**rest)


def test_rates_of_a_gpu_are_those_of_the_format_and_updates_move_the_bytes_of_the_state() -> None:
    machine, known = read_machine("a100"), known_efficiencies()
    rates = {compute: read_rates(machine, known, 0.4, compute) for compute in ("bf16", "fp16", "tf32", "fp32")}
    (kind,) = (kind for kind in rates["bf16"] if not kind.startswith("cpu"))
    whole = rates["bf16"][kind].flop_per_s
    shares = [rates[compute][kind].flop_per_s / whole for compute in ("fp16", "tf32", "fp32")]
    assert shares == [1, 1 / 2, 1 / 16]
    assert len({rate[kind].bytes_per_s for rate in rates.values()}) == 1
    (plain, split) = (estimated(p, rates["bf16"]).units[1] for p in PRECISIONS[:2])
    reached = rates["bf16"][kind].bytes_per_s * known["gpu"].share("update")
    moved = [reached * (u.times[kind].update_s - known["gpu"].launch_s["forward"]) for u in (plain, split)]
    numbers, small = plain.num_parameters, 8 + 8 + 32 + 8  # norms and biases stay float32
    assert moved[0] == pytest.approx(28 * numbers)
    assert moved[1] == pytest.approx(28 * numbers)  # 2 × (2 + 10) and a sum of 4 bytes
    assert small < numbers


def test_the_precision_of_an_estimate_is_what_a_run_would_take() -> None:
    def chosen(machine: str, asked: str = "auto") -> Plan:
        return estimated_precision(asked, read_machine(machine))

    assert chosen("a100").precision == SPLIT
    assert chosen("4xh100").precision == SPLIT
    assert chosen("v100").precision == Precision()
    assert "is not known to compute bf16" in chosen("v100").decisions[0].reason
    assert chosen("epyc-7763").precision == Precision()
    assert chosen("a100", "tf32").precision.compute == "tf32"
    assert not chosen("a100", "tf32").decisions


def counted(function, *tensors) -> list[OperatorWork]:
    meter = OperatorMeter(nn.Module())
    with meter.part("forward"):
        result = function(*tensors)
    del result
    return meter.parts["forward"]


def test_a_chain_of_elementwise_operations_is_one_kernel() -> None:
    x = torch.ones(64, 16)
    works = counted(lambda x: ((x + 1).relu() * 2).sigmoid(), x)
    assert len(works) == 4
    (kernel,) = fused(works)
    assert kernel.class_ == "elementwise"
    assert kernel.size_bytes <= x.nbytes + 4 * x.nbytes
    # What is read again inside alone is not written: of four results, the last one is.
    assert kernel.size_bytes == 2 * x.nbytes


def test_products_are_kernels_of_their_own_and_their_inputs_are_written() -> None:
    x, w = torch.ones(64, 16), torch.ones(16, 16)
    works = fused(counted(lambda x, w: ((x + 1).relu() @ w).tanh() * 2, x, w))
    assert [work.class_ for work in works] == ["elementwise", "matmul", "elementwise"]
    assert works[1].flop == 2 * 64 * 16 * 16
    assert [work.size_bytes for work in works] == [2 * x.nbytes, 2 * x.nbytes + w.nbytes, 2 * x.nbytes]
