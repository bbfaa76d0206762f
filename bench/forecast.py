"""The forecast, verified: forecasts beside real steps, of time and of memory, over models and plans.

    python bench/forecast.py [--limit 200]            # on a CPU: seven models, six presets, two batches; run it again
    python bench/forecast.py --models mlp,gpt-tiny    # some of them; what was run before is not run again
    python bench/forecast.py --gpu [--cases llama-125m,vgg19] [--limit 300]
    python bench/forecast.py --gpu --edge             # the largest batch that runs under a cap, beside the forecast's
    python bench/forecast.py --gpu --tiny             # the same code on tiny models and a CPU, in a minute
    python bench/forecast.py --tables                 # prints the tables of what has been run

Everything that is measured is written to `--out` as it comes (cpu.jsonl, gpu.jsonl, edge.jsonl), so a run that was
stopped goes on where it was. The tables give median and worst error of step time and peak memory, Spearman's rank
correlation over the plans of a model, top-1 regret, and on a CPU the noise floor: the same plan, run again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from statistic import regret, spearman, summary

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_gpu(options: argparse.Namespace) -> None:
    """Runs the models that are left, each in a process of its own, until the time is over."""
    import forecast_gpu as gpu

    started, known = time.perf_counter(), gpu.TINY if options.tiny else gpu.MODELS
    for name in options.cases.split(",") if options.cases else known:
        if name not in known:
            raise SystemExit(f"there is no case '{name}'; there are {', '.join(known)}")
        done = {row["case"] for row in read_rows(options.out / "gpu.jsonl")}
        places = (None, *known[name].budgets)
        if all(gpu.case_key(name, recomputes, place) in done for recomputes in (True, False) for place in places):
            continue
        left_s = options.limit - (time.perf_counter() - started)
        if left_s < 10:
            print(f"{options.limit:.0f} s are over; run it again for the rest", flush=True)
            break
        command = [sys.executable, __file__, "--out", str(options.out), "--one", name]
        try:
            code = subprocess.run([*command, *(["--tiny"] if options.tiny else [])], timeout=left_s).returncode
        except subprocess.TimeoutExpired:
            print(f"{name} was stopped after {left_s:.0f} s; what it has measured is kept", flush=True)
            break
        if code:
            print(f"{name} ended with {code}", flush=True)


def run_cpu(options: argparse.Namespace) -> None:
    """Runs the models that are left on CPU workers, until the time is over."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no worker is to see a GPU
    import forecast_cpu as cpu

    from pipedejavu.facts import keep_heap

    keep_heap()  # the model is measured here, as the workers will run it
    started = time.perf_counter()
    for name in options.models.split(",") if options.models else cpu.MODELS:
        if name not in cpu.MODELS:
            raise SystemExit(f"there is no model '{name}'; there are {', '.join(cpu.MODELS)}")
        presets = tuple(options.presets.split(",")) if options.presets else cpu.PRESETS
        if not cpu.run_model(name, options.out, presets, options.limit - (time.perf_counter() - started)):
            print(f"{options.limit:.0f} s are over; run it again for the rest", flush=True)
            break


def print_cpu(rows: Sequence[Row]) -> None:
    first = [row for row in rows if row["turn"] == 0]
    for title, key in (
        ("model", lambda row: row["model"]),
        ("preset", lambda row: row["preset"]),
        ("", lambda _: "all"),
    ):
        print_errors(title, first, key, ("step_s",))
    print_bounds(first)
    print_growth(first)
    print_ranks(first, lambda row: f"{row['model']}, {row['batch']} samples")
    known = {(row["model"], row["batch"], row["preset"]): row for row in first}
    again = [(known[row["model"], row["batch"], row["preset"]], row) for row in rows if row["turn"]]
    for what in ("step_s", "peak"):
        pairs = [(one["measured"][what], other["measured"][what]) for one, other in again]
        if pairs:
            s = summary(pairs)
            print(
                f"the same plan again, {what}: {s['count']:.0f} plans, median {s['median']:.1%}, worst {s['worst']:.1%}"
            )


def print_bounds(rows: Sequence[Row]) -> None:
    """Prints how many steps lie within the bounds that are meant to hold nine of ten."""
    found = [(row["forecast"]["low_s"], row["measured"]["step_s"], row["forecast"]["high_s"]) for row in rows]
    held = sum(low <= step <= high for low, step, high in found)
    wide = median((high - low) / (high + low) for low, _, high in found)
    print(f"\nwithin the stated bounds: {held} of {len(found)} steps; the bounds are ± {wide:.1%} in the median")


def print_growth(rows: Sequence[Row]) -> None:
    """Prints by how much peaks differ between the two batches: what libraries take of a process falls away."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["preset"]), []).append(row)
    print(f"\n{'more memory of the larger batch':40} {'forecast':>10} {'measured':>10}")
    for (model, name), own in found.items():
        if len(own) == 2:
            ours, real = (own[1][origin]["peak"] - own[0][origin]["peak"] for origin in ("forecast", "measured"))
            print(f"{model + ', ' + name:40} {ours / 1e6:7.1f} MB {real / 1e6:7.1f} MB")


def print_gpu(rows: Sequence[Row]) -> None:
    good = [row for row in rows if "measured" in row]
    print(f"\n{len(good)} cases on a GPU, {len(rows) - len(good)} failed")
    for title, key in (
        ("model", lambda row: row["model"]),
        ("state", lambda row: "all on the GPU" if row["place"] is None else f"{row['place']:.0%} of the state"),
        ("activations", lambda row: "recompute" if row["recomputes"] else "keep"),
        ("", lambda _: "all"),
    ):
        print_errors(title, good, key, ("step_s", "allocated", "reserved"))
    print_ranks(good, lambda row: row["model"])


def pairs_of(rows: Iterable[Row], what: str) -> list[tuple[float, float]]:
    found = [(row["forecast"].get(what), row["measured"].get(what)) for row in rows]
    return [(ours, real) for ours, real in found if ours and real]


def print_errors(title: str, rows: Sequence[Row], key: Callable[[Row], str], whats: Sequence[str]) -> None:
    """Prints the errors of each group of rows: median and worst without sign, and the median with."""
    print(f"\n{title:28}" + "".join(f"{what + ': n':>16} {'median':>7} {'worst':>7} {'bias':>7}" for what in whats))
    for name in dict.fromkeys(map(key, rows)):
        own = [row for row in rows if key(row) == name]
        text = f"{name:28}"
        for what in whats:
            pairs = pairs_of(own, what)
            if pairs:
                s = summary(pairs)
                text += f"{s['count']:16.0f} {s['median']:7.1%} {s['worst']:7.1%} {s['bias']:+7.1%}"
            else:
                text += f"{'–':>16} {'':23}"
        print(text)


def print_ranks(rows: Sequence[Row], key: Callable[[Row], str]) -> None:
    """Prints rank correlation and regret over the plans of each group: of the favourite, and of the first three."""
    print(f"\n{'plans of':40} {'n':>3} {'Spearman':>9} {'regret':>8} {'of three':>8}")
    for name in dict.fromkeys(map(key, rows)):
        pairs = pairs_of([row for row in rows if key(row) == name], "step_s")
        if len(pairs) > 1:
            rank = spearman(pairs)
            told = "–" if rank is None else f"{rank:.2f}"
            print(f"{name:40} {len(pairs):3} {told:>9} {regret(pairs):8.1%} {regret(pairs, tries=3):8.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/forecast"), help="folder for what is measured")
    parser.add_argument("--models", default="", help="models of the CPU's part, by commas")
    parser.add_argument("--presets", default="", help="presets of the CPU's part, by commas")
    parser.add_argument("--gpu", action="store_true", help="the GPU's part")
    parser.add_argument("--cases", default="", help="models of the GPU's part, by commas")
    parser.add_argument("--edge", action="store_true", help="the largest batch under a cap of GPU memory")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which no more is begun")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU in place of a GPU")
    parser.add_argument("--tables", action="store_true", help="only print what has been run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one:
        import forecast_gpu as gpu

        done = {row["case"] for row in read_rows(options.out / "gpu.jsonl")}
        gpu.run_model(options.one, options.out, options.tiny, done)
        return
    if options.edge:
        import forecast_gpu as gpu

        for name in options.cases.split(",") if options.cases else gpu.EDGES:
            gpu.run_edge(name, options.out, options.tiny)
        return
    if not options.tables:
        if options.gpu:
            run_gpu(options)
        else:
            run_cpu(options)
    rows = read_rows(options.out / "cpu.jsonl")
    if rows:
        print_cpu(rows)
    rows = read_rows(options.out / "gpu.jsonl")
    if rows:
        print_gpu(rows)


if __name__ == "__main__":
    main()
