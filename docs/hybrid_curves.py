"""Draws docs/img/hybrid-curves.svg: the loss under torch.optim.AdamW and under HybridAdamW, on the same batches.

python docs/hybrid_curves.py

The zoo's gpt-tiny in bf16 reads the standard library's text for 200 steps, three times: torch's AdamW on float32
masters with clip_grad_norm_, HybridAdamW with all state on the host, and HybridAdamW with a window of one block.
"""

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path

import torch
from torch import nn

from pipedejavu.hybrid import HybridAdamW
from pipedejavu.zoo import Task, build, order

PICTURE = Path(__file__).parent / "img" / "hybrid-curves.svg"
STEPS, SAMPLES = 200, 4
LR, CLIP_NORM = 3e-4, 1.0
SPREAD = 1e-6
"""Relative; a few roundings of float32. bf16 weights round differently from then on, and the runs part."""

Step = Callable[[], None]


def with_torch(model: nn.Module, spread: float = 0.0) -> tuple[Step, Step]:
    """Returns a step of torch's AdamW on float32 masters of the bf16 weights; nothing is left to do at the end.

    `spread` moves each master at the start, relative to its value.
    """
    noise = torch.Generator().manual_seed(5)
    masters = [
        (p.detach().float() * (1 + spread * torch.randn(p.shape, generator=noise))).requires_grad_()
        for p in model.parameters()
    ]
    optimizer = torch.optim.AdamW(masters, lr=LR)

    def step() -> None:
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP_NORM)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)

    return step, lambda: None


def on_host(model: nn.Module) -> tuple[Step, Step]:
    """Returns a step of HybridAdamW whose state rests in host memory, and what ends it."""
    optimizer = HybridAdamW(model, lr=LR, clip_norm=CLIP_NORM, gpu_units=0, window=None)
    return optimizer.step, optimizer.close


def through_window(model: nn.Module) -> tuple[Step, Step]:
    """Returns a step of HybridAdamW with one block on the device at a time, and its end."""
    optimizer = HybridAdamW(model, lr=LR, clip_norm=CLIP_NORM, gpu_units=0, window=1)
    return optimizer.step, optimizer.close


RUNS = (
    ("torch.optim.AdamW, float32 masters, clip_grad_norm_", with_torch),
    ("HybridAdamW, all state on the host", on_host),
    ("HybridAdamW, window of 1", through_window),
)


def train(make: Callable[[nn.Module], tuple[Step, Step]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the loss of each step and the weights at the end; the same start and the same batches for all."""
    task: Task = build("gpt-tiny", seed=0)
    model = nn.Sequential(*(unit for _, unit in task.model.units())).bfloat16()
    step, end = make(model)
    numbers = order(0, 0, len(task.data))
    losses = []
    for n in range(STEPS):
        inputs, targets = task.data.batch(numbers[n * SAMPLES : (n + 1) * SAMPLES])
        loss = task.loss(model(inputs), targets) / task.count(targets)
        loss.backward()  # type: ignore[no-untyped-call]
        step()
        losses.append(float(loss.detach()))
    end()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def main() -> None:
    """Trains, prints how far the runs are apart, and writes the picture."""
    curves, weights = zip(*(train(make) for _, make in RUNS), strict=True)
    for (title, _), curve in zip(RUNS, curves, strict=True):
        gap = max(abs(a - b) for a, b in zip(curve, curves[0], strict=True))
        print(f"{title}: loss {curve[0]:.4f} to {curve[-1]:.4f}, at most {gap:.2e} from the first")
    moved, _ = train(partial(with_torch, spread=SPREAD))
    gap = max(abs(a - b) for a, b in zip(moved, curves[0], strict=True))
    print(f"a yardstick: torch's own run from masters moved by {SPREAD:g} is at most {gap:.2e} from the first")
    are_equal = curves[1] == curves[2] and all(torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
    print(f"both hybrid runs have the same bits: {'yes' if are_equal else 'NO'}")
    PICTURE.write_text(draw([title for title, _ in RUNS], curves), encoding="utf-8")
    print(f"wrote {PICTURE}")


# --- the picture: losses above, differences from the first below

WIDTH, HEIGHT, LEFT, RIGHT = 760, 470, 66, 18
TOP, MIDDLE, BELOW, BOTTOM = 56, 326, 352, 428

STYLE = """
  :root { --card: #ffffff; --ink: #1b222b; --soft: #5c6773; --line: #dfe3e8; --c0: #f2b774; --c1: #2a6fc9;
    --c2: #0d2f66; }
  @media (prefers-color-scheme: dark) { :root { --card: #191e25; --ink: #e4e8ed; --soft: #98a3b0; --line: #2d343d;
    --c0: #b9712a; --c1: #78aef5; --c2: #ffffff; } }
  text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft);
    font-variant-numeric: tabular-nums; }
  .title { font-size: 15px; font-weight: 600; fill: var(--ink); } .name { fill: var(--ink); }
  .grid { stroke: var(--line); } .curve { fill: none; stroke-linejoin: round; stroke-linecap: round; }
  .c0 { stroke: var(--c0); stroke-width: 6; } .c1 { stroke: var(--c1); stroke-width: 2.4; }
  .c2 { stroke: var(--c2); stroke-width: 1.2; stroke-dasharray: 4 5; }
"""


def draw(titles: Sequence[str], curves: Sequence[Sequence[float]]) -> str:
    """Returns the picture as SVG."""
    differences = [[b - a for a, b in zip(curves[0], curve, strict=True)] for curve in curves]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' role="img" aria-labelledby="title">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="var(--card)"></rect>',
        f'<text id="title" class="title" x="{LEFT}" y="28">gpt-tiny in bf16, {STEPS} steps on the standard library’s'
        " text</text>",
        *_panel(curves, TOP, MIDDLE, "loss", _ticks(0.0, max(map(max, curves)))),
        *_panel(differences, BELOW, BOTTOM, "difference", _around_zero(differences)),
        *(_text(f"{n}", _x(n), BOTTOM + 18, "middle") for n in range(0, STEPS + 1, 50)),
        _text("step", _x(STEPS / 2), HEIGHT - 8, "middle"),
        *_legend(titles),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _panel(
    curves: Sequence[Sequence[float]], top: float, bottom: float, name: str, ticks: Sequence[float]
) -> list[str]:
    """Returns one set of axes with all curves, from the lowest tick to the highest."""

    def y(value: float) -> float:
        return bottom - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (bottom - top)

    found = []
    for tick in ticks:
        found.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        found.append(_text(f"{tick:g}".replace("-", "−"), LEFT - 8, y(tick) + 4, "end"))
    middle = (top + bottom) / 2
    label = f'<text x="18" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 18 {middle:.0f})">{name}</text>'
    for number, curve in enumerate(curves):
        points = " ".join(f"{_x(n + 1):.1f},{y(value):.2f}" for n, value in enumerate(curve))
        found.append(f'<polyline class="curve c{number}" points="{points}"/>')
    return [*found, label]


def _legend(titles: Sequence[str]) -> list[str]:
    found, left, top = [], WIDTH - RIGHT - 392, TOP + 14
    found.append(f'<rect x="{left - 12}" y="{top - 14}" width="404" height="72" rx="6" fill="var(--card)"/>')
    for number, title in enumerate(titles):
        y = top + 4 + 22 * number
        found.append(f'<line class="curve c{number}" x1="{left}" x2="{left + 34}" y1="{y}" y2="{y}"/>')
        found.append(f'<text class="name" x="{left + 46}" y="{y + 4}">{escape(title)}</text>')
    return found


def _x(step: float) -> float:
    return LEFT + step / STEPS * (WIDTH - LEFT - RIGHT)


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Returns whole numbers from low to above high."""
    return [float(n) for n in range(int(low), int(high) + 2)]


def _around_zero(curves: Sequence[Sequence[float]]) -> list[float]:
    """Returns a round number that no difference exceeds, below and above zero."""
    largest = max(abs(value) for curve in curves for value in curve)
    scale = 1e-6
    while largest > scale:
        scale *= 2 if f"{scale:e}"[0] in "15" else 2.5
    return [-scale, 0.0, scale]


if __name__ == "__main__":
    main()
