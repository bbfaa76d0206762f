"""A GPU and the CPU beside it: samples a second of each alone, of both on shares of a batch, and as a pipeline.

    python bench/coarse.py [--models vgg19 mlp gpt] [--only alone,chosen,1f1b,audit] [--folder DIR] [--quick]

Three models: VGG19 on images of CIFAR-10's shape (batch 128), an MLP on 60,000 of MNIST's shape (batch 100), and a GPT
of ten layers with a context of 1,000, a vocabulary of 10,000, one head and dropout 0.2 (batch 8); Adam(0.001)
throughout, in float32. Every row is a run of `pipedejavu train` in processes of its own. "coarse" is a replica on the
GPU and one on the CPU: with shares that are forced, and with the one that the plan chooses from what it measured, which
may be none; "late" is the same with a late share, whose weights are an update older; "1f1b" is two stages, GPU then
CPU, in four microbatches. Times are medians over the steps of a run.

Then the three plans are audited for each model, with SGD and without dropout, as AdamW turns rounding into whole steps
where a gradient is nearly zero, and a GPU draws other masks than the replay: the largest difference of a weight from
the float64 replay must be less than a hundredth of the largest distance that a weight has moved; a lost sample would be
more. VGG19 is audited in float64: its BatchNorms make so much of rounding that in float32 plain training fails as well.
With `--slowed N` only VGG19 is run, on a GPU that repeats the work of every unit (slow_gpu.py), so N times as slow:
`--slowed 3` makes an H200 about five times as fast as 16 cores, the ratio of a GTX 1650, and the CPU's share pays.
With `--devices cpu` another CPU worker stands in for the GPU; `--quick` makes batches and steps small.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from slow_gpu import FACTOR

from pipedejavu.zoo import build

LR, WARM_UP, PIPELINE = 0.001, 3, 4
AUDIT_STEPS, AUDIT_LR, AUDIT_LIMIT = 3, 0.05, 0.01
MNIST_SAMPLES, CIFAR_SAMPLES = 60_000, 10_000


@dataclass(frozen=True)
class Model:
    name: str
    """In the zoo."""
    data: str
    batch: int
    shares: tuple[float, ...]
    """For the CPU, forced."""
    steps: tuple[int, int, int]
    """Of the GPU alone, of the CPU alone, and of both."""
    audited: str
    """Its twin without dropout, or itself."""
    audit_dtype: str = "float32"
    source: str = ""
    """A plan's file in place of the zoo's model and data."""


MODELS = {
    "vgg19": Model("vgg19", "cifar10:{}", 128, (1 / 32, 1 / 8), (60, 8, 15), "vgg19", "float64"),
    "mlp": Model("mlp", "mnist:{}", 100, (1 / 20, 1 / 4), (600, 600, 300), "mlp"),
    "gpt": Model("gpt-10-layers", "stdlib", 8, (1 / 8, 1 / 4), (30, 6, 10), "gpt-10-layers-no-dropout"),
}


def write_data(folder: Path) -> None:
    """Writes random images in the files that MNIST and CIFAR-10 come in."""
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (MNIST_SAMPLES, 28 * 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (MNIST_SAMPLES,), dtype=torch.uint8)
    head = struct.pack(">4B3I", 0, 0, 8, 3, MNIST_SAMPLES, 28, 28)
    (folder / "train-images-idx3-ubyte").write_bytes(head + pixels.numpy().tobytes())
    (folder / "train-labels-idx1-ubyte").write_bytes(
        struct.pack(">4BI", 0, 0, 8, 1, MNIST_SAMPLES) + labels.numpy().tobytes()
    )
    records = torch.randint(0, 256, (CIFAR_SAMPLES, 1 + 3 * 32 * 32), dtype=torch.uint8)
    records[:, 0] %= 10
    (folder / "data_batch_1.bin").write_bytes(records.numpy().tobytes())


@dataclass(frozen=True)
class Row:
    label: str
    plan: tuple[str, ...]
    microbatches: int
    steps: int


def rows(model: Model, devices: str) -> list[Row]:
    alone = ("--plan", "preset:ddp", "--workers", "1")
    coarse, late = (("--plan", f"preset:{p}", "--workers", "1", "--devices", devices) for p in ("coarse", "late-share"))
    fast, label = ("gpu", "GPU alone") if devices == "auto" else ("cpu", "stand-in alone")
    on_gpu, on_cpu, both = model.steps
    return [
        Row(label, (*alone, "--devices", fast), 1, on_gpu),
        Row("CPU alone", (*alone, "--devices", "cpu"), 1, on_cpu),
        *(Row(f"coarse, CPU {s:.1%}", (*coarse, "--cpu-share", str(s)), 1, both) for s in model.shares),
        *(Row(f"late, CPU {s:.1%}", (*late, "--cpu-share", str(s)), 1, both) for s in model.shares),
        Row(CHOSEN[0], coarse, 1, on_gpu),
        Row(CHOSEN[1], late, 1, on_gpu),
        Row("1f1b GPU→CPU", ("--plan", "preset:1f1b", "--workers", "2", "--devices", devices), PIPELINE, both),
    ]


CHOSEN = ("coarse, chosen", "late, chosen")


def audited_rows(model: Model, devices: str) -> list[Row]:
    """Returns the plan with each share that is forced last, and the pipeline."""
    last = f"{model.shares[-1]:.1%}"
    return [row for row in rows(model, devices) if row.label.endswith(last) or row.label.startswith("1f1b")]


def train(name: str, row: Row, model: Model, data: str, folder: Path, *more: str) -> dict[str, Any]:
    """Runs a row to its end; returns its summary."""
    sizes = ("--samples", str(model.batch // row.microbatches), "--microbatches", str(row.microbatches))
    source = (model.source,) if model.source else (f"zoo:{name}", "--data", data)
    command = [sys.executable, "-m", "pipedejavu", "train", *source, *row.plan, *sizes, "--steps", str(row.steps)]
    command += ["--run-dir", str(folder), "--json", *more]
    if "--dtype" not in more:
        command += ["--precision", "fp32"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def report(model: Model, rows: list[Row], data: str, folder: Path) -> None:
    """Prints rows of a model."""
    print(f"\n{model.name}, batch {model.batch}")
    print(f"  {'':20}{'samples/s':>10} {'to first':>9} {'GPU + CPU':>12} {'forecast':>11} {'measured':>11}")
    first = 0.0
    for row in rows:
        place = folder / f"{model.name} {row.label}".replace(" ", "-")
        summary = train(model.name, row, model, data, place, "--lr", str(LR))
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        ends = [line["elapsed_s"] for line in lines if "loss" in line]
        rate = model.batch / median([after - before for before, after in pairwise(ends)][WARM_UP:])
        first = first or rate
        plan = json.loads((place / "plan.json").read_text())
        shares = [plan.get("feed", {}).get("shares") or (), *(line["shares"] for line in lines if "shares" in line)]
        parts = " + ".join(str(round(share * model.batch)) for share in shares[-1])
        times = " ".join(f"{1000 * summary[key]:>8.4g} ms" for key in ("predicted_s", "measured_s"))
        print(f"  {row.label:20}{rate:>10.1f} {rate / first:>9.3f} {parts:>12} {times}", flush=True)
        if row.label in CHOSEN:
            (found,) = (d for d in plan["decisions"] if d["axis"] == "feed")
            print(f"    at first {found['choice']}: {found['reason']}", flush=True)


def audit(model: Model, row: Row, data: str, folder: Path) -> str:
    """Trains a few steps and replays them; returns a line that ends with 'right' or 'WRONG'."""
    place = folder / f"{model.name}-audit-{row.label.split()[0].strip(',')}"
    short = replace(row, steps=AUDIT_STEPS)
    more = ("--optimizer", "sgd", "--lr", str(AUDIT_LR), "--dtype", model.audit_dtype, "--audit")
    audited = train(model.audited, short, model, data, place, *more)["audit"]
    difference, label = audited["largest_difference"], f"{model.audited}, {row.label}"
    if model.source:
        return f"  {label:46} {audited['sentence']}: {'right' if audited['verdict'] == 'passed' else 'WRONG'}"
    trained, before = load_file(place / "model.safetensors"), build(model.audited, seed=0, data=data).model.state_dict()
    moved = max(float((weight - before[name]).abs().max()) for name, weight in trained.items())
    is_right = difference < AUDIT_LIMIT * moved
    label = f"{model.audited}, {row.label}"
    return f"  {label:46} {difference:.2g} where weights moved {moved:.2g}: {'right' if is_right else 'WRONG'}"


def slowed(factor: int, is_quick: bool) -> Model:
    """Returns VGG19 on a GPU that is so many times as slow, as a model of the rows and audits."""
    os.environ[FACTOR] = str(factor)
    function = "vgg_small" if is_quick else "vgg19"
    source = f"{Path(__file__).with_name('slow_gpu.py')}:{function}"
    return replace(MODELS["vgg19"], name=f"{function} on a GPU {factor} times as slow", shares=(1 / 8,), source=source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--devices", choices=("auto", "cpu"), default="auto" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="words that a row's name must have one of, by comma, or 'audit'")
    parser.add_argument("--audits-at-once", type=int, default=3)
    parser.add_argument("--slowed", type=int, default=0, metavar="N", help="VGG19 on a GPU that is N times as slow")
    parser.add_argument("--folder", type=Path, help="where the runs are left, for `pipedejavu compare`")
    parser.add_argument("--quick", action="store_true", help="small batches and few steps")
    asked = parser.parse_args()
    start = time.perf_counter()
    models = [MODELS[name] for name in asked.models]
    if asked.slowed:
        models = [slowed(asked.slowed, asked.quick)]
    if asked.quick:
        models = [replace(model, batch=8, shares=(1 / 8, 1 / 2), steps=(6, 6, 6)) for model in models]
    words = asked.only.split(",")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(asked.audits_at_once) as pool:
        folder = asked.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        write_data(Path(name))
        for model in models:
            kept = [row for row in rows(model, asked.devices) if any(word in row.label for word in words)]
            report(model, kept, model.data.format(name), folder)
        if "audit" not in words and asked.only:
            return
        print(f"\naudits of {AUDIT_STEPS} steps of SGD: largest difference from the float64 replay", flush=True)
        asks = [(model, row) for model in models for row in audited_rows(model, asked.devices)]
        lines = [*pool.map(lambda ask: audit(*ask, ask[0].data.format(name), folder), asks)]
    print(*lines, f"({time.perf_counter() - start:.0f} s)", sep="\n")
    sys.exit(any(line.endswith("WRONG") for line in lines))


if __name__ == "__main__":
    main()
