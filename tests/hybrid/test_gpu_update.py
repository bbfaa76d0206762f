"""The grid of placements on a GPU, its kernel beside the host's pass, late streams, and memory beside its forecast."""

import gc
import itertools
import os
import random
import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products; read when CUDA starts

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.optim import native
from pipedejavu.optim.arithmetic import AdamState, join, scalars_of, split, update_
from pipedejavu.optim.gpu_update import UnitUpdate, _kernel, addresses_of, state_in, state_layout
from pipedejavu.optim.moment_format import MOMENT_FORMATS, MomentFormat, widened, write_moments, zero_moments
from pipedejavu.optim.native import HostUpdate, NativeTask
from pipedejavu.runtime import block_offload
from pipedejavu.runtime.lane import StreamLane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

STEPS, UNITS = 20, 6
GRID = list(
    itertools.product(
        range(UNITS + 1),
        (None, 1, 2, 3),
        (None, 0.5, 1e9),
        (True, False),
        (torch.bfloat16, torch.float32),
        (False, True),
    )
)
Case = tuple[int, int | None, float | None, bool, torch.dtype, bool]


# --- one arithmetic


def wild(numel: int, generator: torch.Generator) -> Tensor:
    """Returns values of every magnitude, denormal ones and zeros among them."""
    value = torch.ldexp(
        torch.randn(numel, generator=generator), torch.randint(-149, 127, (numel,), generator=generator)
    )
    return torch.where(torch.rand(numel, generator=generator) < 0.05, 0.0, value)


def tame(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=generator)


def as_bits(state: AdamState) -> list[Tensor]:
    """Returns master and moments as integers on the CPU; all NaNs are one."""
    master = state.weight if state.low is None else join(state.weight, state.low)
    moments = state.moments
    found = [master.cpu(), widened(moments.m, moments.m_scale).cpu(), widened(moments.v, moments.v_scale).cpu()]
    return [t.where(~t.isnan(), torch.full_like(t, torch.nan)).view(torch.int32) for t in found]


def on(device: str, state: AdamState) -> AdamState:
    return AdamState(*(None if tensor is None else tensor.to(device, copy=True) for tensor in state))  # type: ignore[arg-type]


@pytest.mark.parametrize("moments", MOMENT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["split", "float32"])
@pytest.mark.parametrize("is_wild", [False, True], ids=["tame", "wild"])
@pytest.mark.parametrize(
    "s",
    [
        scalars_of(1, 1e-3, (0.9, 0.999), 1e-8, 0.01, 1.0),
        scalars_of(100_000, 3e-4, (0.9, 0.95), 1e-8, 0.1, 0.0371),
        scalars_of(2, 1.0, (0.0, 0.0), 0.0, 0.0, 1.0),
        scalars_of(3, 1e-38, (0.9, 0.999), 1e-38, 1e-3, 1e-30),
        scalars_of(3, 1e30, (0.999, 0.9999), 1e20, 1e-30, 1e15),
    ],
    ids=["first", "late", "no eps", "tiny", "huge"],
)
def test_kernel_torch_and_native_pass_give_the_same_bits(
    s: Any, is_wild: bool, dtype: torch.dtype, moments: MomentFormat
) -> None:
    assert _kernel() is not None, "Triton is missing"
    draw = wild if is_wild else tame
    sizes = (1, 1023, 1025, 300_001), (4096, 16, 0, 2**20 + 16), (5,) * 17
    for size in sizes:
        generator = torch.Generator().manual_seed(sum(size))
        gradients, starts = [], []
        for numel in size:
            weight, low = draw(numel, generator), None
            if dtype == torch.bfloat16:
                weight, low = split(weight)
            gradients.append(draw(numel, generator).to(dtype))
            state = AdamState(weight, low, *zero_moments(moments, numel))
            write_moments(draw(numel, generator), draw(numel, generator).abs(), state.moments, numel)
            starts.append(state)
        expected = [on("cpu", start) for start in starts]
        by_torch, by_kernel, by_stream = ([on("cuda", start) for start in starts] for _ in range(3))
        for gradient, reference, other in zip(gradients, expected, by_torch, strict=True):
            update_(s, gradient, reference, reference)
            update_(s, gradient.cuda(), other, other)
        there = [gradient.cuda() for gradient in gradients]
        weights = [state.weight for state in by_kernel]
        addresses = [addresses_of(state) for state in by_kernel]
        UnitUpdate(weights, addresses, moments).prepare([s] * len(size), there)(s.scale)
        update_streamed(s, there, by_stream, moments)
        for found, who in ((by_torch, "torch on the GPU"), (by_kernel, "the kernel"), (by_stream, "streamed state")):
            for reference, other in zip(expected, found, strict=True):
                assert all(a.equal(b) for a, b in zip(as_bits(reference), as_bits(other), strict=True)), who
        if native.library() is not None:
            update = HostUpdate(4, is_native=True)
            update([NativeTask(s, g, state, state) for g, state in zip(gradients, starts, strict=True)])
            update.close()
            for reference, other in zip(expected, starts, strict=True):
                assert all(a.equal(b) for a, b in zip(as_bits(reference), as_bits(other), strict=True)), "the native"


def update_streamed(s: Any, gradients: list[Tensor], states: list[AdamState], moments: MomentFormat) -> None:
    """Updates states whose moments and low halves lie in one memory."""
    weights = [state.weight for state in states]
    starts = [0, *accumulate(state_layout(weight, moments)[1] for weight in weights)]
    memory = torch.zeros(starts[-1], dtype=torch.uint8, device="cuda")
    views = [state_in(memory, weight, start, moments) for weight, start in zip(weights, starts[:-1], strict=True)]
    for view, state in zip(views, states, strict=True):
        copy(state, view)
    places = [addresses_of(view) for view in views]
    base = memory.data_ptr()
    offsets = [tuple(address and address - base for address in place) for place in places]
    update = UnitUpdate(weights, offsets, moments)  # type: ignore[arg-type]
    update.prepare([s] * len(states), gradients, base)(s.scale)
    for view, state in zip(views, states, strict=True):
        copy(view, state)


def test_the_kernel_leaves_parameters_without_a_gradient_alone() -> None:
    states = [AdamState(torch.ones(n, device="cuda"), None, *torch.ones(2, n, device="cuda")) for n in (7, 2048, 31)]
    s = scalars_of(1, 1e-3, (0.9, 0.999), 1e-8, 0.01, 1.0)
    update = UnitUpdate([state.weight for state in states], [addresses_of(state) for state in states])
    update.prepare([s, None, s], [torch.ones(7, device="cuda"), None, torch.ones(31, device="cuda")])(s.scale)
    assert [bool((state.weight == 1).all()) for state in states] == [False, True, False]


def copy(source: AdamState, target: AdamState) -> None:
    for a, b in zip(source, target, strict=True):
        if a is not None and b is not None:
            b.copy_(a)


# --- placements


def name(case: Case) -> str:
    units, window, clip, speculates, dtype, checkpoints = case
    words = [f"{units} on the GPU", f"window {window}", f"clip {clip}", str(dtype).removeprefix("torch.")]
    return ", ".join([*words, *["speculative"] * speculates, *["checkpointed"] * checkpoints])


def check(lab: Any, bits: Any, compare: Any, case: Case, moments: MomentFormat = "fp32") -> None:
    units, window, clip_norm, speculates, dtype, checkpoints = case
    model = lab.net(dtype, checkpoints=checkpoints)
    optimizer = lab.hybrid(
        model, clip_norm=clip_norm, gpu_units=units, window=window, speculate=speculates, moments=moments
    )
    lab.train(model, optimizer, range(STEPS))
    compare(bits(optimizer, model), lab.plain_bits(dtype, clip_norm, STEPS, moments))


@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("case", GRID[::97], ids=name)
def test_some_placements_agree_bit_for_bit_with_moments_of_fewer_bits(
    case: Case, moments: MomentFormat, cuda_lab: Any, bits: Any, compare: Any
) -> None:
    check(cuda_lab, bits, compare, case, moments)


@pytest.mark.parametrize("case", GRID[::41], ids=name)
def test_some_placements_agree_bit_for_bit(case: Case, cuda_lab: Any, bits: Any, compare: Any) -> None:
    check(cuda_lab, bits, compare, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=name)
def test_all_placements_agree_bit_for_bit(case: Case, cuda_lab: Any, bits: Any, compare: Any) -> None:
    check(cuda_lab, bits, compare, case)


@pytest.mark.parametrize("window", [1, 2])
def test_a_model_that_was_never_whole_on_the_gpu_agrees(window: int, cuda_lab: Any, bits: Any, compare: Any) -> None:
    model = cuda_lab.net().cpu()
    optimizer = cuda_lab.hybrid(model, clip_norm=0.5, window=window, device="cuda")
    cuda_lab.train(model, optimizer, range(STEPS))
    compare(bits(optimizer, model), cuda_lab.plain_bits(torch.bfloat16, 0.5, STEPS))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_training_continues_bit_for_bit_after_a_load(
    clip_norm: float | None, cuda_lab: Any, bits: Any, compare: Any
) -> None:
    model = cuda_lab.net()
    optimizer = cuda_lab.hybrid(model, clip_norm=clip_norm, gpu_units=2)
    cuda_lab.train(model, optimizer, range(6))
    other = cuda_lab.net()
    second = cuda_lab.hybrid(other, clip_norm=clip_norm, gpu_units=4, window=1)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(optimizer.state_dict())
    cuda_lab.train(other, second, range(6, STEPS))
    compare(bits(second, other), cuda_lab.plain_bits(torch.bfloat16, clip_norm, STEPS))


def test_a_model_that_moves_after_the_optimizer_was_made_is_noticed(cuda_lab: Any) -> None:
    model = cuda_lab.net().cpu()
    cuda_lab.hybrid(model, clip_norm=1.0)
    model.cuda()
    with pytest.raises(InputError, match=r"^HybridAdamW was made for cpu, and the model is on cuda:0; move it first$"):
        model.loss(cuda_lab.tokens(0)).backward()


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_what_blocks_keep_changes_no_bit(
    activations: Any, window: int | None, cuda_lab: Any, bits: Any, compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_offload, "MIN_BYTES", 0)
    model = cuda_lab.net()
    optimizer = cuda_lab.hybrid(model, clip_norm=0.5, gpu_units=1, window=window, activations=activations)
    cuda_lab.train(model, optimizer, range(STEPS))
    compare(bits(optimizer, model), cuda_lab.plain_bits(torch.bfloat16, 0.5, STEPS))


# --- late lanes


def sleep(draw: random.Random) -> None:
    """Keeps the current stream busy for up to about two milliseconds."""
    torch.cuda._sleep(draw.choice([1, 1, 500_000, 4_000_000]))


@pytest.mark.parametrize("late", ["copy-in", "copy-out", "host", "fetch", "compute", "all"])
@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e9])
def test_late_lanes_give_the_same_bits(
    clip_norm: float | None, window: int | None, late: str, cuda_lab: Any, bits: Any, compare: Any
) -> None:
    draw = random.Random(5)
    model = cuda_lab.net()
    optimizer = cuda_lab.hybrid(model, clip_norm=clip_norm, gpu_units=2, window=window)
    for lane in optimizer._lanes.all:
        if late in (lane.name, "all"):
            is_stream = isinstance(lane, StreamLane)
            lane.delay = (lambda: sleep(draw)) if is_stream else (lambda: time.sleep(draw.choice([0, 0.001, 0.004])))
    if late in ("compute", "all"):
        for module in model.modules():
            module.register_forward_hook(lambda *_: sleep(draw))
    cuda_lab.train(model, optimizer, range(STEPS))
    compare(bits(optimizer, model), cuda_lab.plain_bits(torch.bfloat16, clip_norm, STEPS))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_gradient_of_nan_is_left_out_though_its_copy_is_late(
    clip_norm: float | None, cuda_lab: Any, bits: Any, compare: Any, plain_optimizer: Any
) -> None:
    first, second = cuda_lab.net(), cuda_lab.net()
    reference = plain_optimizer(first, clip_norm=clip_norm)
    hybrid = cuda_lab.hybrid(second, clip_norm=clip_norm, gpu_units=0, window=None)
    hybrid._lanes.copy_out.delay = lambda: torch.cuda._sleep(8_000_000)
    for model, optimizer in ((first, reference), (second, hybrid)):
        for n in range(5):
            (model.loss(cuda_lab.tokens(n)) * (float("nan") if n == 2 else 1.0)).backward()
            optimizer.step()
    compare(bits(reference, first), bits(hybrid, second))
    assert hybrid.num_skipped == reference.num_skipped == 1


# --- memory


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    """About 100 million parameters in twelve blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


@pytest.fixture
def empty_gpu() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_units": 0},
        {"gpu_units": 6},
        {},
        {"gpu_units": 0, "clip_norm": None},
        {"gpu_budget": 1_500_000_000},
    ],
    ids=["none", "half", "all", "none, no clip", "1.5 GB"],
)
@pytest.mark.usefixtures("empty_gpu")
def test_peak_memory_is_within_three_percent_of_the_plan(options: dict[str, Any], cuda_lab: Any) -> None:
    torch.use_deterministic_algorithms(False)
    model = Deep().cuda().bfloat16()
    optimizer = cuda_lab.hybrid(model, **{"clip_norm": 1.0, "window": None, **options})
    peaks = []
    for _ in range(8):
        torch.cuda.reset_peak_memory_stats()
        model(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)).backward()
        optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated())  # with cuBLAS's workspace, which the first step sees too
    assert optimizer.plan is not None
    forecast = optimizer.plan.gpu_bytes
    print(f"peaks {peaks}, forecast {forecast}, places {optimizer.plan.places}")
    assert max(peaks[2:]) == pytest.approx(forecast, rel=0.03)
    assert max(peaks[2:]) <= options.get("gpu_budget", 2**62)
