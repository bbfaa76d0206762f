"""Loss curves and update rates of moments in float32, bf16 and int8.

    python bench/moments.py [--steps 300] [--seeds 3] [--model gpt-tiny] [--numel 20000000]

The model is trained in bf16 with split masters by HybridAdamW, on the same batches in every format. The scatter is that
of a second float32 run whose masters start a millionth apart. The update alone is timed on the host, formats in turns.
"""

import argparse
import time
from statistics import mean, median

import torch
from torch import nn

from pipedejavu.hybrid import HybridAdamW
from pipedejavu.optim.arithmetic import AdamState, scalars_of
from pipedejavu.optim.moment_format import MOMENT_FORMATS, MomentFormat, moment_bytes, zero_moments
from pipedejavu.optim.native import HostUpdate, NativeTask
from pipedejavu.zoo import Task, build, order

SAMPLES, LR, CLIP_NORM, SPREAD = 4, 1e-3, 1.0, 1e-6
ROUNDS = 7


def train(name: str, seed: int, steps: int, moments: MomentFormat, spread: float = 0.0) -> list[float]:
    """Returns the loss of each step."""
    task: Task = build(name, seed=seed)
    model = nn.Sequential(*(unit for _, unit in task.model.units()))
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + spread * torch.randn(p.shape, generator=noise))
    optimizer = HybridAdamW(model.bfloat16(), lr=LR, clip_norm=CLIP_NORM, moments=moments)
    numbers, losses = order(seed, 0, len(task.data)), []
    for n in range(steps):
        inputs, targets = task.data.batch(numbers[n * SAMPLES : (n + 1) * SAMPLES])
        loss = task.loss(model(inputs), targets) / task.count(targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    optimizer.close()
    return losses


def compare_curves(name: str, seeds: int, steps: int) -> None:
    """Prints the mean loss of the last sixth of the steps, and the distance of whole curves from float32."""
    tail = max(1, steps // 6)
    print(f"{name}, {steps} steps: mean loss of the last {tail}, and (RMS over all steps) its difference from fp32")
    for seed in range(seeds):
        exact = train(name, seed, steps, "fp32")
        curves = {"fp32, another start": train(name, seed, steps, "fp32", SPREAD)}
        curves |= {form: train(name, seed, steps, form) for form in MOMENT_FORMATS[1:]}
        row = [f"seed {seed}: fp32 {mean(exact[-tail:]):.4f}"]
        for form, losses in curves.items():
            apart = mean((a - b) ** 2 for a, b in zip(losses, exact, strict=True)) ** 0.5
            row.append(f"{form} {mean(losses[-tail:]):.4f} ({apart:.4f})")
        print("; ".join(row), flush=True)


def compare_rates(numel: int) -> None:
    """Prints the time of one update on the host in each format, relative to float32."""
    s = scalars_of(10, 1e-3, (0.9, 0.999), 1e-8, 0.1, 1.0)
    tasks, update = {}, HostUpdate()
    for form in MOMENT_FORMATS:
        weight, low = torch.randn(numel).bfloat16(), torch.zeros(numel, dtype=torch.int16)
        state = AdamState(weight, low, *zero_moments(form, numel))
        tasks[form] = NativeTask(s, torch.randn(numel).bfloat16(), state, state)
    times: dict[str, list[float]] = {form: [] for form in tasks}
    for _ in range(ROUNDS + 1):
        for form, task in tasks.items():
            started = time.perf_counter()
            update([task])
            times[form].append(time.perf_counter() - started)
    update.close()
    usual = {form: median(some[1:]) for form, some in times.items()}
    for form, time_s in usual.items():
        print(
            f"{form}: {numel / time_s / 1e9:.2f} billion parameters/s on {update.num_threads} threads, "
            f"{time_s / usual['fp32']:.2f} of fp32's time; state {4 + moment_bytes(form, numel) / numel:.2f} bytes per"
            " parameter with the weight"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--numel", type=int, default=20_000_000)
    asked = parser.parse_args()
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    compare_rates(asked.numel)
    compare_curves(asked.model, asked.seeds, asked.steps)


if __name__ == "__main__":
    main()
