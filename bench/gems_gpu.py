"""GEMS with state on the host beside GPipe and plain offload, on one GPU that two workers share.

    python bench/gems_gpu.py [--model gpt-1.3b] [--batch 8] [--microbatches 4] [--steps 10]

Every row is a run of `pipedejavu train` in bf16; the workers of a row share the GPU and pass tensors by CUDA IPC. So
the rows show what each design holds, and what its order costs where the GPU's time is shared; two GPUs would compute
side by side. "sum" is what all workers of a row held at their peaks.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

from pipedejavu.plan import Plan, preset
from pipedejavu.run import RunFolder

GIB = 2**30
WARM_UP = 3


def designs(microbatches: int, batch: int) -> dict[str, Plan]:
    """Returns the plans by their titles; the first is the one that others are compared with."""
    sizes = {"microbatches": microbatches, "samples": batch // microbatches}
    gems = preset("gems-master").at(workers=2, **sizes)
    eager = gems.order.replace(is_eager=True)
    gpipe = preset("gpipe").at(workers=2, **sizes)
    alone = preset("ddp").at(workers=1, **sizes)
    return {
        "one worker, all on the GPU": alone,
        "one worker, state on the host": alone.replace(keep=alone.keep.replace(kind="split")),
        "GPipe": gpipe,
        "GPipe, state on the host": gpipe.replace(keep=gpipe.keep.replace(kind="split")),
        "GEMS-master": gems,
        "GEMS-master, state on the host": gems.replace(keep=gems.keep.replace(kind="split"), order=eager),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-1.3b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--devices", default="shared-gpu")
    parser.add_argument("--only", nargs="*", default=[""], help="words of which a row's title must have one")
    parser.add_argument("--timeout", type=int, default=90, help="seconds per row")
    asked = parser.parse_args()
    print(f"{asked.model}, {asked.batch} samples in {asked.microbatches} microbatches, {asked.steps} steps")
    print(f"  {'':32}{'samples/s':>10}{'ratio':>7}{'largest':>10}{'sum':>10}{'forecast':>11}{'step':>11}")
    first = 0.0
    for title, plan in designs(asked.microbatches, asked.batch).items():
        if not any(word in title for word in asked.only):
            continue
        with tempfile.TemporaryDirectory() as name:
            try:
                rate, peaks, summary = train(plan, Path(name), asked)
            except (subprocess.TimeoutExpired, RuntimeError) as error:
                print(f"  {title:32}{str(error)[-600:]}", flush=True)
                continue
        first = first or rate
        memory = f"{max(peaks) / GIB:>6.2f} GiB{sum(peaks) / GIB:>6.2f} GiB"
        times = f"{summary['predicted_s']:>9.4f} s{summary['measured_s']:>9.4f} s"
        print(f"  {title:32}{rate:>10.2f}{rate / first:>7.2f}{memory}{times}", flush=True)


def train(plan: Plan, folder: Path, asked: argparse.Namespace) -> tuple[float, list[int], dict[str, float]]:
    """Runs one plan; returns samples per second, the peak bytes of each worker, and the summary."""
    (folder / "plan.json").write_text(plan.to_json())
    command = [sys.executable, "-m", "pipedejavu", "train", f"zoo:{asked.model}", "--plan", str(folder / "plan.json")]
    command += ["--devices", asked.devices, "--steps", str(asked.steps), "--run-dir", str(folder / "run"), "--json"]
    command += ["--compile", "off", "--checkpoint-every", "0", "--measure-budget", "5", "--no-check-model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=asked.timeout)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"code {done.returncode}")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    ends = [row["elapsed_s"] for row in rows if "loss" in row]
    step_s = median([after - before for before, after in pairwise(ends)][WARM_UP:])
    workers = json.loads(RunFolder(folder / "run").measured.read_text())["workers"]
    return asked.batch / step_s, [worker["peak_bytes"] for worker in workers], json.loads(done.stdout)


if __name__ == "__main__":
    main()
