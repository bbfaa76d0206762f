"""Ten forward passes of a GPT of ten layers, on each kind of device of this machine.

The published setting: one attention head, a context of 1,000 tokens, a vocabulary of 10,000 and dropout 0.2, on an
Intel i7 with 16 cores and a GTX 1650 (table 6.3). Neither width nor number of sequences is published; the zoo's
model of this name has a width of 512, and one sequence is passed. Tokens lie on the device from the start.
"""

import platform
from statistics import median
from typing import Any

import torch

from pipedejavu.profile.forward_pass import time_forward_passes
from pipedejavu.report import Compared, Curve, ExperimentFindings, FindingsTable, LineChart
from pipedejavu.reproduce.experiment import Setting
from pipedejavu.zoo import build

PASSES = 10
PUBLISHED_MS = {
    "cpu": (2294.58, 2196.16, 2132.47, 2135.54, 2144.50, 2150.73, 2132.31, 2127.77, 2129.92, 2493.66),
    "cuda": (654.86, 431.97, 138.63, 88.55, 60.75, 57.23, 66.65, 62.63, 64.13, 98.29),
}
"""Table 6.3."""
_SIZES: dict[str, dict[str, Any]] = {
    "quick": {"layers": 2, "context": 64, "width": 64, "heads": 1},
    "laptop": {},
    "full": {},
}


def run(setting: Setting) -> ExperimentFindings:
    """Times the passes on the CPU and, if there is one, on the GPU."""
    torch.manual_seed(setting.seed)
    task = build("gpt-10-layers", seed=setting.seed, data="random:1", **_SIZES[setting.scale])
    tokens = task.data.batch([0])[0]
    times_ms = {}
    for device in ("cpu", *["cuda"] * torch.cuda.is_available()):
        setting.report(f"{PASSES} forward passes on {device}")
        passes_s = time_forward_passes(task.model.train(), tokens, torch.device(device), PASSES)  # dropout is on
        times_ms[device] = [1e3 * time_s for time_s in passes_s]
    rows = []
    for n in range(PASSES):
        cells = [f"{times_ms[d][n]:.2f}" if d in times_ms else "–" for d in PUBLISHED_MS]
        rows.append((f"{n + 1}", *(text for d, cell in zip(PUBLISHED_MS, cells, strict=True)
                                   for text in (cell, f"{PUBLISHED_MS[d][n]:.2f}"))))  # fmt: skip
    heads = ("Pass", "CPU today, ms", "CPU published, ms", "GPU today, ms", "GPU published, ms")
    numbers = sum(p.numel() for p in task.model.parameters())
    sizes = [
        f"{len([n for n, _ in task.model.named_children() if n.startswith('block')])} layers",
        f"{tokens.shape[1]} tokens",
    ]
    notes = [] if "cuda" in times_ms else ["This machine has no GPU, so the GPU's column is empty."]
    notes.append("Width and number of sequences are not published, so ratios of passes compare, and times do not.")
    if setting.scale == "quick":
        notes.append("A quick run has a smaller model; its times say only that the experiment runs.")
    processor = platform.processor() or platform.machine()
    return ExperimentFindings(
        "", "", "How long does a forward pass take on each device, and how much longer is the first?",
        [("model", f"GPT, {', '.join(sizes)}, {numbers:,} parameters, dropout on"), ("sequences", "1"),
         ("CPU", f"{processor}, {(count := torch.get_num_threads())} thread{'s' * (count > 1)}"),
         ("GPU", torch.cuda.get_device_name() if "cuda" in times_ms else "none")],
        _compared(times_ms), [_chart(times_ms)], [FindingsTable("Each pass", heads, rows)], (), notes,
    )  # fmt: skip


def _compared(times_ms: dict[str, list[float]]) -> list[Compared]:
    rows = []
    for device, published in PUBLISHED_MS.items():
        name = {"cpu": "CPU", "cuda": "GPU"}[device]
        today = times_ms.get(device)
        middle = f"{median(today):.1f} ms" if today else "–"
        first = f"{today[0] / median(today):.2f}" if today else "–"
        rows.append(Compared(f"{name}: median of {PASSES} passes", middle, f"{median(published):.1f} ms"))
        rows.append(Compared(f"{name}: first pass ÷ median", first, f"{published[0] / median(published):.2f}",
                             "the first pass also loads kernels and memory"))  # fmt: skip
    both = {d: median(times_ms[d]) for d in times_ms}
    ratio = f"{both['cpu'] / both['cuda']:.1f}" if len(both) > 1 else "–"
    known = median(PUBLISHED_MS["cpu"]) / median(PUBLISHED_MS["cuda"])
    return [*rows, Compared("CPU ÷ GPU, medians", ratio, f"{known:.1f}")]


def _chart(times_ms: dict[str, list[float]]) -> LineChart:
    names = {"cpu": "CPU", "cuda": "GPU"}
    curves = [Curve(f"{names[d]}, today", [*enumerate(times_ms[d], start=1)]) for d in times_ms]
    curves += [Curve(f"{names[d]}, published", [*enumerate(ms, start=1)]) for d, ms in PUBLISHED_MS.items()]
    return LineChart("Forward passes", "pass", "milliseconds", curves, has_log_y=True)
