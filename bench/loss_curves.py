"""Loss curves of `train` in bf16 beside loops that a user would write, on the same samples of the standard library.

    python bench/loss_curves.py [--quick] [--limit-s 150] [--out curves.svg]

Per seed, a GPT begins with the same weights and reads the same batches in every run: a float32 loop, a loop under bf16
autocast, and `train` in bf16 with split masters and moments in float32 or int8. The scatter is that of a second float32
run whose weights start a millionth apart, and of other seeds. `--quick` trains gpt-tiny, for a CPU.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn

from pipedejavu.launch import plan_run
from pipedejavu.launch.backend import RunSetup
from pipedejavu.launch.own_process import OwnProcessBackend
from pipedejavu.launch.run_session import RunSession
from pipedejavu.plan import preset
from pipedejavu.run import TrainOptions
from pipedejavu.run.run_folder import RunFolder
from pipedejavu.source.model_source import open_task
from pipedejavu.source.task import draw

LR, CLIP_NORM, APART = 3e-4, 1.0, 1e-6
REFERENCE, SCATTER = "loop, float32", "loop, float32, weights a millionth apart"
COLORS = {
    REFERENCE: "#333333",
    "loop, bf16 autocast": "#1f77b4",
    "train, bf16": "#d62728",
    "train, bf16, int8 moments": "#2ca02c",
}


@dataclass(frozen=True)
class Setup:
    """What all runs have in common."""

    model: str
    batch: int
    context: int
    steps: int
    device: torch.device

    @property
    def tail(self) -> int:
        """The last steps whose mean is compared: a sixth."""
        return max(1, self.steps // 6)

    def options(self, seed: int, precision: str) -> TrainOptions:
        """Returns the options of a run of `train`."""
        return TrainOptions(
            model=self.model, data="stdlib", context=self.context, steps=self.steps, seed=seed, lr=LR,
            clip_norm=CLIP_NORM, precision=precision, compile="off", check_model=False, measure_budget_s=0.0,
            checkpoint_every=0,
        )  # fmt: skip


@dataclass
class Curves:
    """The losses of all runs so far: by run, then by seed."""

    losses: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def add(self, name: str, seed: int, losses: list[float]) -> None:
        """Adds a run."""
        self.losses.setdefault(name, {})[seed] = losses

    def last(self, name: str, tail: int) -> list[float]:
        """Returns the mean loss of the last steps of each seed."""
        return [mean(losses[-tail:]) for losses in self.losses[name].values()]

    def apart(self, name: str, other: str) -> list[float]:
        """Returns the root mean square of the difference of two runs, of each seed that both have."""
        pairs = ((losses, self.losses[other].get(seed)) for seed, losses in self.losses[name].items())
        return [rms([a - b for a, b in zip(one, two, strict=True)]) for one, two in pairs if two is not None]


def rms(values: list[float]) -> float:
    """Returns the root mean square."""
    return mean(value * value for value in values) ** 0.5


def loop(setup: Setup, seed: int, *, is_bf16: bool = False, apart: float = 0.0) -> list[float]:
    """Trains in a plain loop: torch's AdamW, clipping, and autocast for bf16; returns the loss of each step."""
    torch.backends.cuda.matmul.allow_tf32 = False
    options = setup.options(seed, "fp32")
    task = open_task(setup.model, seed=seed, data="stdlib", context=setup.context)
    model = nn.Sequential(*(unit for _, unit in task.model.units()))
    noise = torch.Generator().manual_seed(seed + 5)
    with torch.no_grad():
        for p in model.parameters() if apart else ():
            p.mul_(1 + apart * torch.randn(p.shape, generator=noise))
    model.to(setup.device).train()
    is_fused = setup.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=options.weight_decay, fused=is_fused)
    losses = []
    for n in range(setup.steps):
        inputs, targets = draw(task.data, seed, range(n * setup.batch, (n + 1) * setup.batch))
        count, inputs, targets = task.count(targets), inputs.to(setup.device), targets.to(setup.device)
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=is_bf16):
            loss = task.loss(model(inputs), targets) / count
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def train(setup: Setup, seed: int, precision: str) -> list[float]:
    """Trains as `pipedejavu train` does with one worker, in this process; returns the loss of each step."""
    plan = preset("ddp").at(workers=1, microbatches=1, samples=setup.batch)
    options, program, _ = plan_run(setup.options(seed, precision), plan, devices="auto")
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        RunSession(run, OwnProcessBackend(is_forced=True), RunSetup(options, program, None)).train()
        rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


RUNS: dict[str, Callable[[Setup, int], list[float]]] = {
    REFERENCE: loop,
    "train, bf16": lambda setup, seed: train(setup, seed, "bf16"),
    "loop, bf16 autocast": lambda setup, seed: loop(setup, seed, is_bf16=True),
    "train, bf16, int8 moments": lambda setup, seed: train(setup, seed, "bf16, int8 moments"),
}


def measure(setup: Setup, seeds: int, limit_s: float) -> Curves:
    """Makes all runs, seed by seed, until a next one would end after the limit."""
    started, longest, curves = time.perf_counter(), 0.0, Curves()
    plan = [(name, seed) for seed in range(seeds) for name in RUNS]
    plan.insert(len(RUNS), (SCATTER, 0))
    for name, seed in plan:
        begun = time.perf_counter()
        if begun - started + longest > limit_s:
            print(f"seed {seed}, {name}: left out, as {limit_s:.0f} s are over", flush=True)
            continue
        losses = loop(setup, seed, apart=APART) if name == SCATTER else RUNS[name](setup, seed)
        lasted = time.perf_counter() - begun
        longest = max(longest, lasted)
        curves.add(name, seed, losses)
        print(f"seed {seed}, {name}: {losses[0]:.3f} → {mean(losses[-setup.tail :]):.4f} in {lasted:.1f} s", flush=True)
        gc.collect()
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
    return curves


def print_table(setup: Setup, curves: Curves) -> bool:
    """Prints how far the runs are from the float32 loop; returns whether all agree within the scatter."""
    between, exact = stdev_of(curves.last(REFERENCE, setup.tail)), curves.last(REFERENCE, setup.tail)
    own = curves.apart(SCATTER, REFERENCE) if SCATTER in curves.losses else []
    seeds = between_seeds(curves)
    print(f"\n{setup.model}, {setup.batch}×{setup.context} tokens, {setup.steps} steps, {setup.device}")
    print(
        f"scatter: last {setup.tail} steps ± {between:.4f} between seeds; whole curves {seeds:.4f} apart between seeds"
    )
    if own:
        print(f"         and {own[0]:.4f} apart from a start a millionth apart")
    agree = True
    for name in (run for run in (*RUNS, SCATTER) if run in curves.losses):
        last, apart = curves.last(name, setup.tail), curves.apart(name, REFERENCE)
        shift = mean(a - b for a, b in zip(last, exact, strict=False))
        is_near = abs(shift) <= max(between, abs(own[0]) if own else 0.0) and mean(apart) <= seeds
        agree = agree and is_near
        print(
            f"  {name:42} last {setup.tail}: {', '.join(f'{value:.4f}' for value in last)};"
            f" {shift:+.4f} from float32; RMS of the difference {', '.join(f'{value:.4f}' for value in apart)}"
            f"  {'agrees' if is_near else 'differs'}",
            flush=True,
        )
    print(
        "verdict: all curves agree within the scatter"
        if agree
        else "verdict: some curves differ by more than the scatter"
    )
    return agree


def stdev_of(values: list[float]) -> float:
    """Returns the standard deviation; 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def between_seeds(curves: Curves) -> float:
    """Returns the mean of how far the float32 curves of two seeds are apart; infinity for one seed."""
    known = [*curves.losses[REFERENCE].values()]
    pairs = [(a, b) for n, a in enumerate(known) for b in known[:n]]
    return mean(rms([x - y for x, y in zip(a, b, strict=True)]) for a, b in pairs) if pairs else float("inf")


def draw_chart(setup: Setup, curves: Curves) -> str:
    """Returns an SVG with the curves, each point the mean of neighbouring steps, one line per run and seed."""
    width, height, left, bottom = 900, 460, 60, 40
    window = max(1, setup.steps // 60)
    smooth = {
        (name, seed): [mean(losses[n : n + window]) for n in range(0, len(losses), window)]
        for name, by_seed in curves.losses.items() if name in COLORS for seed, losses in by_seed.items()
    }  # fmt: skip
    least, most = min(map(min, smooth.values())), max(map(max, smooth.values()))

    def at(n: int, loss: float) -> str:
        x = left + (width - left - 20) * n * window / setup.steps
        y = 20 + (height - bottom - 20) * (most - loss) / ((most - least) or 1)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<polyline fill="none" stroke="{COLORS[name]}" stroke-width="1.2" points="'
        + " ".join(at(n, loss) for n, loss in enumerate(points)) + '"/>'
        for (name, _), points in smooth.items()
    ]  # fmt: skip
    for n, (name, color) in enumerate(COLORS.items()):
        parts.append(f'<text x="{width - 250}" y="{40 + 18 * n}" fill="{color}">{name}</text>')
    parts.append(f'<text x="5" y="25">{most:.2f}</text><text x="5" y="{height - bottom}">{least:.2f}</text>')
    parts.append(f'<text x="{left}" y="{height - 10}">loss per token over {setup.steps} steps</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
    return f'{head} font-size="13"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="gpt-tiny, 2 seeds and 20 steps of 64 tokens, for a CPU")
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument(
        "--limit-s", type=float, help="no run begins that would end later; by default 150, and 900 if quick"
    )
    parser.add_argument("--out", type=Path, help="where to write the curves as SVG")
    asked = parser.parse_args()
    setup = Setup(
        model=asked.model or ("gpt-tiny" if asked.quick else "gpt-small"),
        batch=asked.batch or (2 if asked.quick else 8),
        context=asked.context or (32 if asked.quick else 256),
        steps=asked.steps or (20 if asked.quick else 300),
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )
    curves = measure(setup, asked.seeds or (2 if asked.quick else 3), asked.limit_s or (900 if asked.quick else 150))
    print_table(setup, curves)
    if asked.out:
        asked.out.write_text(draw_chart(setup, curves))


if __name__ == "__main__":
    main()
