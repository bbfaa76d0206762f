"""Forecasts of whole jobs beside real ones: how many of the 80 % intervals hold, learning only from earlier jobs.

    python bench/job_forecast.py                       # 40 jobs of a few seconds each; run it again to go on
    python bench/job_forecast.py --runs 40 --seed 1    # other jobs
    python bench/job_forecast.py --score out/job_forecast/0.jsonl    # what jobs that have run would be forecast now

A job is a `train` process with a random model, plan, batch and number of updates, on CPU workers. All jobs of a series
share a cache that is empty at first, so the first has no earlier one to learn from. Each writes its forecast to its run
folder before it starts. `--score` forecasts the recorded jobs again, each from those before it.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from math import log
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
MODELS = {
    "mlp": ((64, 256), (50, 400)),
    "vgg-small": ((8, 16), (10, 50)),
    "resnet18": ((4, 8), (3, 6)),
    "gpt-tiny": ((4, 8), (8, 40)),
    "bert-tiny": ((4, 8), (12, 80)),
    "seq2seq-tiny": ((4, 8), (12, 80)),
    "moe-tiny": ((4, 8), (4, 16)),
}
"""Batches, and the fewest and most updates of a job, which take 1 to 5 s on two idle cores."""
PLANS = ("whole", "ddp", "gpipe", "1f1b", "pipedream-2bw")
"""Presets, over two workers but for `whole`."""
MICROBATCHES = 4


def case(source: random.Random) -> list[str]:
    """Returns the options of a random job."""
    model = source.choice(list(MODELS))
    batches, (fewest, most) = MODELS[model]
    batch, steps = source.choice(batches), round(fewest * (most / fewest) ** source.random())
    plan = source.choice(PLANS)
    workers = 1 if plan == "whole" else 2
    pieces = 1 if plan in ("whole", "ddp") else MICROBATCHES
    samples = batch // (workers if plan == "ddp" else pieces)
    name = "ddp" if plan == "whole" else plan
    sizes = [f"--workers={workers}", f"--microbatches={pieces}", f"--samples={samples}", f"--steps={steps}"]
    return [f"zoo:{model}", f"--plan=preset:{name}", *sizes, "--devices=cpu", "--measure-budget=2"]


def run_case(options: Sequence[str], cache: Path) -> Row:
    """Runs a job in a process of its own; returns the record that it leaves in its run folder."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "pipedejavu", "train", *options, f"--run-dir={run_dir}", "--json"]
        environment = os.environ | {"XDG_CACHE_HOME": str(cache.resolve())}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        row: Row = json.loads((run_dir / "forecast.json").read_text())
    return row


def run_series(number: int, seed: int, folder: Path) -> list[Row]:
    """Runs the jobs of a series that are left."""
    path, source = folder / f"{seed}.jsonl", random.Random(seed)
    rows = read_rows(path)
    for position in range(number):
        options = case(source)
        if position < len(rows):
            continue
        rows.append(run_case(options, folder / f"cache-{seed}"))
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(describe(rows[-1]), flush=True)
    return rows


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def describe(row: Row) -> str:
    chance, measured_s = row["chance"], row["measured_s"]
    word = "held" if is_held(row) else "below" if measured_s < chance["low_s"] else "above"
    return (
        f"{row['model']:13} {row['plan']:24} {row['batch']:4} × {row['steps']:4}: {chance['low_s']:6.1f} to"
        f" {chance['high_s']:6.1f} s, took {measured_s:6.1f} s, {word}"
    )


def is_held(row: Row) -> bool:
    return bool(row["chance"]["low_s"] <= row["measured_s"] <= row["chance"]["high_s"])


def forecast_again(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with the forecasts that this version makes of them, each from the rows before it."""
    from pipedejavu.run import JobRecord
    from pipedejavu.simulate import job_chance

    again, past = [], []
    for row in rows:
        record = JobRecord.from_json(json.dumps(row))
        chance = job_chance(record.key, record.step_s, record.scale, record.steps, past)
        again.append({**row, "chance": chance.model_dump()})
        past += [record.past] if record.past else []
    return again


def print_score(rows: Sequence[Row]) -> None:
    """Prints how many intervals held, how wide they are, and how far off the medians."""
    print(f"\n{'jobs':14} {'held':>9} {'below':>6} {'above':>6} {'high ÷ low':>11} {'median off by':>14}")
    for name, part in (("all", rows), ("the first 4", rows[:4]), ("later ones", rows[4:])):
        if not part:
            continue
        below = sum(row["measured_s"] < row["chance"]["low_s"] for row in part)
        held = sum(map(is_held, part))
        width = median(row["chance"]["high_s"] / row["chance"]["low_s"] for row in part)
        off = median(abs(log(row["measured_s"] / row["chance"]["time_s"])) for row in part)
        share = f"{held} of {len(part)}"
        print(f"{name:14} {share:>9} {below:6} {len(part) - held - below:6} {width:11.2f} {off:13.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/job_forecast"), help="folder for what is measured")
    parser.add_argument("--score", type=Path, nargs="*", help="series that have run")
    options = parser.parse_args()
    if options.score:
        for path in options.score:
            print_score(forecast_again(read_rows(path)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    print_score(run_series(options.runs, options.seed, options.out))


if __name__ == "__main__":
    main()
