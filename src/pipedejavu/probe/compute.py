"""Trials of one device: matrix products, a transformer block, memory and the optimizer, on CPU and GPU alike."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.probe.series import TimedTrial


class Scale(NamedTuple):
    """Sizes for a type of device: each run takes milliseconds, longer than a launch and shorter than a second."""

    squares: tuple[int, ...]
    square_dtypes: tuple[str, ...]
    tall: tuple[int, int, int]
    """Tokens × width × four times the width, as in a transformer."""
    tall_dtypes: tuple[str, ...]
    block: tuple[int, int, int]
    """Sequences × context × width."""
    block_dtypes: tuple[str, ...]


_CPU, _GPU = ("float32", "bfloat16"), ("float32", "tf32", "float16", "bfloat16")
SCALES = {
    "few cores": Scale((256, 512, 1024), ("float32",), (512, 512, 2048), _CPU, (1, 128, 256), ("float32",)),
    "many cores": Scale((512, 1024, 2048), _CPU, (1024, 1024, 4096), _CPU, (1, 256, 1024), ("float32",)),
    "gpu": Scale(
        (1024, 2048, 4096, 8192), _GPU, (16384, 4096, 16384), _GPU, (8, 2048, 2048), ("float32", "float16", "bfloat16")
    ),
}
MANY_CORES = 8
HEAD_WIDTH = 64
MEMORY_BYTES, MOST_MEMORY_BYTES = 64 << 20, 1 << 30
"""Size of the copied tensor per CPU thread, and the largest size, which a GPU uses; larger than caches."""
PARAMETERS, MOST_PARAMETERS = 4 << 20, 64 << 20
"""Parameters that the optimizer updates, likewise; each has 16 bytes."""
LARGEST_SHARE = 1 / 16
"""Share of the free memory that one tensor may take."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class ComputeDevice:
    """A device that this process can use, with its name in the machine."""

    name: str
    device: torch.device
    free_bytes: int
    threads: int = 1
    """Threads of a CPU, used by all trials except those that vary the number of threads."""
    kept: dict[str, Any] = field(default_factory=dict, compare=False)
    """Tensors and modules of the trials, made when first needed; `clear` frees them."""

    def made(self, key: str, make: Callable[[], Made]) -> Made:
        """Returns the object called `key`; calls `make` the first time."""
        if key not in self.kept:
            self.kept[key] = make()
        item: Made = self.kept[key]
        return item

    @property
    def scale(self) -> Scale:
        """The sizes for this device."""
        if self.device.type != "cpu":
            return SCALES["gpu"]
        return SCALES["many cores" if self.threads >= MANY_CORES else "few cores"]

    def scaled(self, each: int, most: int) -> int:
        """Returns `each` times the threads of a CPU (at least two), limited to `most`; `most` for a GPU."""
        return min(max(2, self.threads) * each, most) if self.device.type == "cpu" else most

    def clear(self) -> None:
        """Frees all memory."""
        self.kept.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def timed(device: torch.device, work: Callable[[], object], count: int, *, waits: bool = True) -> float:
    """Returns the seconds that `count` runs take on a device; with `waits` it first synchronizes the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            work()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if waits:
            torch.cuda.synchronize(device)
        first.record()
        for _ in range(count):
            work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Sets the number of torch's threads inside the `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compute_trials(probed: ComputeDevice) -> list[TimedTrial]:
    """Returns all trials of one device."""
    scale = probed.scale
    trials = [_matrix(probed, (n, n, n), dtype) for dtype in scale.square_dtypes for n in scale.squares]
    trials += [_matrix(probed, scale.tall, dtype) for dtype in scale.tall_dtypes]
    if probed.device.type == "cpu" and probed.threads > 1:
        trials.append(_matrix(probed, (scale.squares[-1],) * 3, "float32", threads=1))
    # One thread too: if other threads are busy, the many small operations of a block wait for them.
    threads = sorted({1, probed.threads}) if probed.device.type == "cpu" else [1]
    trials += [_block(probed, dtype, count) for dtype in scale.block_dtypes for count in threads]
    trials.append(_memory(probed))
    return trials + [_update(probed, count) for count in thread_counts(probed)]


def thread_counts(probed: ComputeDevice) -> list[int]:
    """Returns the powers of two up to a CPU's threads, and that number itself; [1] for a GPU."""
    if probed.device.type != "cpu":
        return [1]
    return sorted({min(1 << n, probed.threads) for n in range(probed.threads.bit_length() + 1)})


def _on_threads(probed: ComputeDevice, threads: int, work: Callable[[], object]) -> Callable[[int], float]:
    def time_s(count: int) -> float:
        if probed.device.type != "cpu":
            return timed(probed.device, work, count)
        with using_threads(threads):
            functional.relu(probed.made("few", lambda: torch.ones(1 << 16)))  # wakes the threads
            return timed(probed.device, work, count)

    return time_s


def _matrix(probed: ComputeDevice, shape: tuple[int, int, int], dtype: str, threads: int = 0) -> TimedTrial:
    """Multiplies [m × k] by [k × n]; 'tf32' is float32 with products rounded to TF32."""
    m, k, n = shape
    real = torch.float32 if dtype == "tf32" else getattr(torch, dtype)

    def make(rows: int, columns: int) -> Tensor:
        key = f"matrix {rows}×{columns} {real}"
        return probed.made(key, lambda: torch.randn(rows, columns, device=probed.device).to(real))

    def work() -> None:
        with _tf32() if dtype == "tf32" else nullcontext():
            make(m, k) @ make(k, n)

    shown = f"{dtype} {m}×{k}×{n}" + (f", {threads} threads" if threads else "")
    run = _on_threads(probed, threads or probed.threads, work)
    return TimedTrial(probed.name, "matrix", shown, 2.0 * m * k * n, "FLOP/s", run)


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


class ComputeBlock(nn.Module):
    """A transformer block as in GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Applies attention, then the MLP."""
        batch, context, width = x.shape
        parts = self.mix(self.before(x)).view(batch, context, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, context, width))
        y: Tensor = x + self.narrow(functional.gelu(self.widen(self.between(x))))
        return y


def _block(probed: ComputeDevice, dtype: str, threads: int) -> TimedTrial:
    """Trains a block: forward and backward, three times the FLOP of a forward."""
    most, context, width = probed.scale.block
    batch = max(1, min(most, probed.free_bytes >> 32))
    real = getattr(torch, dtype)

    def work() -> None:
        block = probed.made(f"block {dtype}", lambda: ComputeBlock(width).to(probed.device, real))
        x = probed.made(f"block in {dtype}", lambda: torch.randn(batch, context, width, device=probed.device).to(real))
        block(x).sum().backward()
        block.zero_grad()

    forward = 2.0 * batch * context * (12 * width * width + 2 * context * width)
    shown = f"{dtype} {batch}×{context}×{width}" + (f", {threads} threads" if probed.device.type == "cpu" else "")
    return TimedTrial(probed.name, "block", shown, 3 * forward, "FLOP/s", _on_threads(probed, threads, work))


def _memory(probed: ComputeDevice) -> TimedTrial:
    """Copies a large tensor within the device's memory; bytes read and bytes written both count."""
    size = int(min(probed.scaled(MEMORY_BYTES, MOST_MEMORY_BYTES), LARGEST_SHARE * probed.free_bytes))

    def work() -> None:
        source = probed.made("memory", lambda: torch.ones(size // 4, device=probed.device))
        probed.made("memory copy", lambda: torch.empty_like(source)).copy_(source)

    return TimedTrial(probed.name, "memory", "copy", 2.0 * size, "B/s", _on_threads(probed, probed.threads, work))


def _update(probed: ComputeDevice, threads: int) -> TimedTrial:
    """Updates float32 parameters with torch's fused AdamW."""
    count = int(min(probed.scaled(PARAMETERS, MOST_PARAMETERS), LARGEST_SHARE * probed.free_bytes / 16))

    def make() -> torch.optim.AdamW:
        weight = nn.Parameter(torch.ones(count, device=probed.device))
        weight.grad = torch.full_like(weight, 1e-3)
        return torch.optim.AdamW([weight], lr=1e-6, fused=True)

    def work() -> None:
        probed.made("AdamW", make).step()

    shown = f"AdamW, {threads} threads" if probed.device.type == "cpu" else "AdamW"
    return TimedTrial(probed.name, "update", shown, float(count), "1/s", _on_threads(probed, threads, work))
