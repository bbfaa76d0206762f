"""A GPU and the CPU beside it: samples a second of each alone, of both on shares of a batch, and as a pipeline.

    python bench/coarse.py [--models vgg19 mlp gpt] [--devices auto|cpu] [--quick]

Three models: VGG19 on images of CIFAR-10's shape (batch 128), an MLP on 60,000 of MNIST's shape (batch 100), and a GPT
of ten layers with a context of 1,000, a vocabulary of 10,000, one head and dropout 0.2 (batch 8); Adam(0.001)
throughout, in float32. Every row is a run of `pipedejavu train` in processes of its own. "coarse" is a replica on the
GPU and one on the CPU: with shares that are forced, and with the one that the plan chooses from what it measured, which
may be none; "1f1b" is two stages, GPU then CPU, in four microbatches. Times are medians over the steps of a run.

Rows with an audit were replayed in float64; the limit is two learning rates for each update, what AdamW can turn around
where a gradient is nearly zero. The GPT's audits are runs of their own without dropout, as a GPU draws other masks.
With `--devices cpu` another CPU worker stands in for the GPU; `--quick` makes batches and steps small.
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

LR, WARM_UP, PIPELINE = 0.001, 3, 4
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


MODELS = {
    "vgg19": Model("vgg19", "cifar10:{}", 128, (1 / 32, 1 / 8), (60, 8, 15), "vgg19"),
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
    model: str
    plan: tuple[str, ...]
    samples: int
    microbatches: int
    steps: int
    is_audited: bool = False
    is_told: bool = False
    """Whether what the plan decided is printed."""


def rows(model: Model, devices: str) -> list[Row]:
    alone = ("--plan", "preset:ddp", "--workers", "1")
    coarse, fast = ("--plan", "preset:coarse", "--workers", "1"), "gpu" if devices == "auto" else "cpu"
    on_gpu, on_cpu, both = model.steps
    can_audit = model.audited == model.name
    pipeline = (("--plan", "preset:1f1b", "--workers", "2", "--devices", devices), model.batch // PIPELINE, PIPELINE)
    made = [
        Row(f"{fast.upper()} alone", model.name, (*alone, "--devices", fast), model.batch, 1, on_gpu),
        Row("CPU alone", model.name, (*alone, "--devices", "cpu"), model.batch, 1, on_cpu),
    ]
    for share in model.shares:
        forced = (*coarse, "--cpu-share", str(share), "--devices", devices)
        is_last = share == model.shares[-1]
        made.append(Row(f"coarse, CPU {share:.1%}", model.name, forced, model.batch, 1, both, can_audit and is_last))
    made.append(
        Row("coarse, chosen", model.name, (*coarse, "--devices", devices), model.batch, 1, on_gpu, is_told=True)
    )
    made.append(Row("1f1b GPU→CPU", model.name, *pipeline, both, can_audit))
    if not can_audit:
        forced = (*coarse, "--cpu-share", str(model.shares[-1]), "--devices", devices)
        made.append(Row("coarse, audit only", model.audited, forced, model.batch, 1, 2, True))
        made.append(Row("1f1b, audit only", model.audited, *pipeline, 2, True))
    return made


@dataclass(frozen=True)
class Done:
    samples_per_s: float
    parts: str
    predicted_s: float
    measured_s: float
    difference: float | None
    decisions: list[str]


def run(row: Row, data: str, folder: Path) -> Done:
    sizes = ("--samples", str(row.samples), "--microbatches", str(row.microbatches), "--steps", str(row.steps))
    command = [sys.executable, "-m", "pipedejavu", "train", f"zoo:{row.model}", *row.plan, *sizes]
    command += ["--data", data, "--lr", str(LR), "--run-dir", str(folder), "--json", *["--audit"] * row.is_audited]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    summary = json.loads(done.stdout)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ends = [line["elapsed_s"] for line in lines if "loss" in line]
    steps_s = [after - before for before, after in pairwise(ends)][WARM_UP:] or ends[-1:]
    plan = json.loads((folder / "plan.json").read_text())
    shares = plan["feed"].get("shares") or ()
    batch = row.samples * row.microbatches
    return Done(
        samples_per_s=batch / median(steps_s),
        parts=" + ".join(str(round(share * batch)) for share in shares),
        predicted_s=summary["predicted_s"],
        measured_s=summary["measured_s"],
        difference=summary["audit"]["largest_difference"] if row.is_audited else None,
        decisions=[f"{d['axis']}: {d['choice']} ({d['reason']})" for d in plan["decisions"]],
    )


def report(model: Model, devices: str, data: Path, folder: Path) -> bool:
    """Prints the rows of a model; returns whether every audit is within its limit."""
    print(f"\n{model.name}, batch {model.batch}")
    print(
        f"  {'':22}{'samples/s':>10} {'to first':>9} {'GPU + CPU':>10} {'forecast':>9} {'measured':>9}  audit (limit)"
    )
    first, is_right = 0.0, True
    for number, row in enumerate(rows(model, devices)):
        done = run(row, model.data.format(data), folder / f"{model.name}-{number}")
        first = first or done.samples_per_s
        audit = ""
        if done.difference is not None:
            limit = 2 * LR * row.steps
            is_right &= done.difference <= limit
            audit = f"{done.difference:.2g} ({limit:.2g})"
        rate = f"{done.samples_per_s:>10.1f} {done.samples_per_s / first:>9.3f}"
        rate = " " * 20 if "only" in row.label else rate
        times = " ".join(f"{1000 * time_s:>6.4g} ms" for time_s in (done.predicted_s, done.measured_s))
        print(f"  {row.label:22}{rate} {done.parts:>10} {times}  {audit}", flush=True)
        if row.is_told:
            print(*(f"    {line}" for line in done.decisions if line.startswith("feed")), sep="\n", flush=True)
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--devices", choices=("auto", "cpu"), default="auto" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small batches and few steps")
    asked = parser.parse_args()
    start, is_right = time.perf_counter(), True
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        write_data(data)
        for name in asked.models:
            model = MODELS[name]
            if asked.quick:
                model = replace(model, batch=8, shares=(1 / 8, 1 / 2), steps=(6, 6, 6))
            is_right &= report(model, asked.devices, data, Path(folder))
    print(f"\nall audits within their limits: {'yes' if is_right else 'NO'} ({time.perf_counter() - start:.0f} s)")
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
