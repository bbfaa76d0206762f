"""What a plan is forecast to hold is what a step really holds: all memory that operations make, counted as it goes."""

import weakref
from itertools import accumulate

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.analysis import verify
from pipedejavu.analysis.size import Sizes
from pipedejavu.engine import AdamW
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.recompute_span import Saved, backward_input, with_loss
from pipedejavu.facts import Device, Host, Link, Machine, Profile
from pipedejavu.plan import Plan, preset
from pipedejavu.planner.unit_update import updates_of
from pipedejavu.profile import UnitSample, measure_profile
from pipedejavu.profile.operator_count import count_step
from pipedejavu.profile.operator_meter import OperatorMeter
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import Prediction, simulate

SAMPLES, WIDTH, CLASSES = 300, 40, 500
CPU = torch.device("cpu")


class Block(nn.Module):
    """A residual whose inside is wider than what it hands on."""

    def __init__(self, inside: int):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inside), nn.Linear(inside, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


def chain(widths: tuple[int, ...], classes: int = CLASSES) -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    blocks = [(f"block{n}", Block(width)) for n, width in enumerate(widths)]
    return [("start", nn.Linear(7, WIDTH)), *blocks, ("end", nn.Linear(WIDTH, classes))]


def measured(units: list[tuple[str, nn.Module]]) -> Profile:
    unit_sample = UnitSample(units, torch.randn(SAMPLES, 7), torch.zeros(SAMPLES, dtype=torch.int64), loss)
    return measure_profile("chain", [unit_sample], (), {"cpu": CPU, "gpu": CPU}, updates_of(AdamW(lr=0.1)))


def program_of(profile: Profile, plan: Plan, kind: str = "cpu") -> Program:
    device = Device(name="it", kind=kind, type=kind, host="h", memory_bytes=2**40)
    machine = Machine(name="m", hosts=(Host(name="h"),), devices=(device,), links=(Link(bytes_per_s=1e9),))
    return compile_plan(plan, profile, machine)


def forecast(profile: Profile, kind: str = "cpu", microbatches: int = 1) -> Prediction:
    plan = preset("ddp").at(workers=1, samples=SAMPLES, microbatches=microbatches)
    program = program_of(profile, plan, kind)
    return simulate(program, verify(program))


@pytest.mark.parametrize("classes", [CLASSES, 2])
@pytest.mark.parametrize("widths", [(80, 80), (400, 40, 40), (40, 40, 400)])
def test_the_peak_of_a_step_is_that_of_the_whole_model(widths: tuple[int, ...], classes: int) -> None:
    units = chain(widths, classes)
    profile = measured(units)
    whole = nn.Sequential(*(module for _, module in units))
    sample, target = torch.randn(SAMPLES, 7), torch.zeros(SAMPLES, dtype=torch.int64)
    counted = count_step(whole, sample, lambda output: loss(output, target), is_first=True)
    gradients = sum(p.nbytes for p in whole.parameters())
    real = counted.saved_bytes + max(counted.forward_work_bytes, counted.backward_work_bytes)
    (worker,) = forecast(profile).workers
    activations = worker.peak_bytes - 3 * gradients
    # Of the gradients of weights, which come in between, all are there at most and none at least; and what a unit is
    # given by the next one may go, in the whole model, while the unit still works.
    given = 4 * SAMPLES * WIDTH
    assert real <= activations + 16
    assert activations <= real + gradients + given + 16


def test_gradients_come_as_activations_go() -> None:
    """The peak is in the last block's backward; of two microbatches the second has all gradients there already."""
    profile = measured(chain((400, 400, 400), classes=2))
    (one,), (two,) = (forecast(profile, microbatches=n).workers for n in (1, 2))
    earlier = sum(unit.gradient_bytes for unit in profile.units[:3])
    largest = max(size for unit in profile.units for size in unit.parameter_parts)
    assert two.peak_bytes - one.peak_bytes == pytest.approx(earlier + largest)


def test_a_gpu_rounds_up_and_reserves() -> None:
    profile = measured(chain((400, 400)))
    (on_cpu,), (on_gpu,) = (forecast(profile, kind).workers for kind in ("cpu", "gpu"))
    assert on_cpu.reserved_bytes is None
    assert on_gpu.peak_bytes < on_gpu.allocated_bytes < on_gpu.reserved_bytes
    count = sum(4 * len(unit.parameter_parts) + len(unit.activation_parts) for unit in profile.units)
    assert on_gpu.allocated_bytes <= on_gpu.peak_bytes + 512 * (count + 1)


class Held:
    """A tensor that a graph holds."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()


def held_bytes(saved: Saved, held: weakref.WeakSet[Held], others: list[torch.Tensor]) -> int:
    """Returns the bytes of all memory that waits for a backward, apart from that of others."""
    tensors = [*(h.tensor for h in held), *(t for recompute_span in saved for t in recompute_span.inputs)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    known = {t.untyped_storage().data_ptr() for t in others}
    return sum(size for place, size in storages.items() if place not in known)


@pytest.mark.parametrize("again", [(0,), (1,), (2,), (0, 2), (1, 2), (3,), (0, 3), (1, 3)])
@pytest.mark.parametrize("shares_outputs", [False, True])
def test_between_its_passes_a_piece_holds_what_is_forecast(again: tuple[int, ...], shares_outputs: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(7 if n == 0 else WIDTH, WIDTH), nn.Tanh()) for n in range(3)]
    tanh = [*((f"layer{n}", layer) for n, layer in enumerate(layers)), ("end", nn.Linear(WIDTH, CLASSES))]
    units = tanh if shares_outputs else chain((80, 120))
    plan = preset("gpipe").at(workers=1, samples=SAMPLES, microbatches=1)
    program = program_of(measured(units), plan.replace(order=plan.order.replace(recompute_units=again)))
    runner = PieceRunner([(n, name, module) for n, (name, module) in enumerate(units)], 0, program.recomputed[0])
    weights = {name: weight.clone().requires_grad_() for name, weight in runner.initial.items()}
    x, held, sizes = torch.randn(SAMPLES, 7), weakref.WeakSet[Held](), Sizes(program)
    targets = torch.zeros(SAMPLES, dtype=torch.int64)

    def keep(tensor: torch.Tensor) -> Held:
        held.add(found := Held(tensor))
        return found

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda found: found.tensor):
        output, saved = runner.forward(weights, x, 0, is_first=True)
        saved = with_loss(saved, loss(output, targets))
        del output
        samples = [x] * (0 in again)  # which the first unit has not saved yet
        assert held_bytes(saved, held, [*weights.values(), *samples]) == round(sizes.kept[0] * SAMPLES)
        output, saved = runner.forward_again(weights, saved, 0)
        saved = with_loss(saved, loss(output, targets)) if 3 in again else saved
        del output
        assert held_bytes(saved, held, [*weights.values()]) == round(sizes.saved[0] * SAMPLES)
    assert sizes.kept[0] < sizes.saved[0]


def halved(units: list[tuple[str, nn.Module]]) -> tuple[Program, int]:
    """Returns the program of two stages whose backwards are split, and the piece that ends in the loss."""
    plan = preset("zb-h1").at(workers=2, samples=SAMPLES, microbatches=2)
    devices = tuple(Device(name=f"d{n}", kind="cpu", type="cpu", host="h", memory_bytes=2**40) for n in range(2))
    machine = Machine(name="m", hosts=(Host(name="h"),), devices=devices, links=(Link(bytes_per_s=1e9),))
    return compile_plan(plan.replace(cut=plan.cut.replace(bounds=(1,))), measured(units), machine), 1


@pytest.mark.parametrize("widths", [(80, 80), (400, 40), (40, 400)])
def test_between_the_halves_of_a_backward_a_piece_holds_what_is_forecast(widths: tuple[int, ...]) -> None:
    """Operands of products and the gradients of their outputs; the peak of the first half is forecast from above."""
    units = chain(widths)
    program, piece = halved(units)
    sizes, mine = Sizes(program), program.pieces[piece].units
    assert list(mine) == [1, 2, 3]
    whole = nn.Sequential(*(units[n][1] for n in mine))
    runner = PieceRunner([(n, *units[n]) for n in mine], 0, ())
    weights = {name: weight.clone().requires_grad_() for name, weight in runner.initial.items()}
    x = torch.randn(SAMPLES, WIDTH).requires_grad_()
    targets = torch.zeros(SAMPLES, dtype=torch.int64)
    meter = OperatorMeter(whole)
    with meter.part("forward"):
        output, saved = runner.forward(weights, x, 0)
        saved = with_loss(saved, loss(output, targets))
        del output
    with meter.part("input"):
        gradients, half = backward_input(saved, (torch.ones(()),))
        del saved
    owned = {t.untyped_storage().data_ptr() for t in weights.values()}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for p in half.pending for t in p.tensors}
    # Biases and norms have their gradients already; they do not grow with the samples.
    early = sum(weight.nbytes for weight in weights.values() if weight.dim() == 1)
    real = sum(size for place, size in kept.items() if place not in owned)
    pending = sizes.pending[piece]
    assert pending is not None
    assert abs(real - pending * SAMPLES) <= early
    assert real > 0
    assert pending != sizes.saved[piece]
    peak = max(accumulate(size for _, size in meter.changes["input"]))
    action = next(a for a in program.workers[1].actions if a.kind == "I")
    forecast_peak = gradients[0].nbytes + sizes.workspace(action, is_first=False)
    assert peak <= forecast_peak + 16
    assert forecast_peak <= peak + 2 * gradients[0].nbytes + early + 16


def test_the_memory_of_a_zero_bubble_plan_counts_what_its_halves_hold() -> None:
    """A profile that does not know it assumes that all saved tensors wait for the second half."""
    units = chain((80, 80))
    program, _ = halved(units)
    plain = program.profile.replace(units=tuple(u.replace(pending_bytes=None) for u in program.profile.units))
    heavy = tuple(u.replace(pending_bytes=4 * (u.pending_bytes or 0.0)) for u in program.profile.units)

    def peak(profile: Profile) -> float:
        other = compile_plan(program.plan, profile, program.machine)
        return simulate(other, verify(other)).workers[1].peak_bytes

    known, unknown, most = peak(program.profile), peak(plain), peak(program.profile.replace(units=heavy))
    assert known != unknown
    assert most > known
