"""Scores the closed form of a GPT's step against iteration times that others published, on rows it was not fitted to.

    python bench/published.py FILE.csv                        # calibrates on one half of the rows, scores the other
    python bench/published.py FILE.csv --splits 50            # for more random halves
    python bench/published.py FILE.csv --all                  # calibrates on all rows: the constants that are shipped
    python bench/published.py FILE.csv --constants shipped    # fits nothing and scores all rows
    … --machine "64x(8xa100-80gb), 800Gb/s"                   # where rows of several nodes were measured

The file has a header and the columns of vTrain's published measurements: GPUs, global batch, micro batch, hidden size,
attention heads, layers, sequence length, tensor, data and pipeline parallelism, iteration time in ms. Halves are drawn
by a seed, and each has its part of every number of GPUs, width and tensor parallelism. Then the constants of smaller
rows are tried on larger ones: fewer GPUs on more, less tensor parallelism on more, narrow models on wide ones.
`docs/forecast.md` says what the model is.
"""

import argparse
import csv
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from pipedejavu.facts import InputError, Machine, read_file, read_machine
from pipedejavu.simulate.gpt_estimate import GptBatch, GptConstants, GptShape, estimate_gpt
from pipedejavu.simulate.wiring import Grid, Wiring, wire

COLUMNS = ("gpus", "batch", "micro", "width", "heads", "layers", "context", "tensor", "data", "pipeline", "time_ms")
FITTED = ("memory", "logit_bytes", "layer_host_s", "microbatch_host_s", "wait_s")
"""The others are what datasheets and libraries are known to reach."""
START = GptConstants(memory=0.8, logit_bytes=50, layer_host_s=3e-3, microbatch_host_s=1e-3, wait_s=1e-4)
"""Where the search begins: round numbers, so that nothing is known of rows that are held out."""
TRIES, NUDGE = 60, 1e-3
CLIFF = 0.05
"""Errors beyond this count by their size and no longer by its square, so that single rows do not decide."""


class Row(NamedTuple):
    shape: GptShape
    grid: Grid
    batch: GptBatch
    wiring: Wiring
    time_s: float

    def error(self, constants: GptConstants) -> float:
        """Returns how far the estimate lies from the published time, as a part of it."""
        step = estimate_gpt(self.shape, self.grid, self.batch, self.wiring, constants)
        return step.total_s / self.time_s - 1


def read_rows(path: str, machine: Machine, *, recomputes: bool) -> list[Row]:
    try:
        lines = list(csv.reader(read_file(path).decode("utf-8").splitlines()))[1:]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    wirings: dict[Grid, Wiring] = {}
    rows = []
    for number, line in enumerate(lines, 2):
        values = dict(zip(COLUMNS, map(_number, line), strict=False))
        if len(line) != len(COLUMNS) or None in values.values():
            raise InputError(
                f"{path}, line {number}: expected {len(COLUMNS)} positive numbers, found {','.join(line)!r}"
            )
        size = {name: int(value or 0) for name, value in values.items()}
        grid = Grid(size["tensor"], size["data"], size["pipeline"])
        micro, left = divmod(size["batch"], size["micro"] * size["data"])
        if grid.size != size["gpus"] or left or not micro:
            raise InputError(
                f"{path}, line {number}: {grid.size} workers on {size['gpus']} GPUs, batch {size['batch']} as"
                f" microbatches of {size['micro']} on {size['data']} replicas; these do not go together"
            )
        if grid not in wirings:
            wirings[grid] = wire(grid, machine)
        shape = GptShape(size["layers"], size["width"], size["heads"], size["context"])
        batch = GptBatch(size["micro"], micro, recomputes)
        rows.append(Row(shape, grid, batch, wirings[grid], (values["time_ms"] or 0.0) / 1000))
    if len(rows) < 2:
        raise InputError(f"{path} has {len(rows)} rows; give at least 2")
    return rows


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def calibrate(rows: Sequence[Row]) -> GptConstants:
    """Returns the constants that minimise errors of logarithms, by Levenberg and Marquardt."""
    best, damping = START, 1.0
    errors = _errors(rows, best)
    for _ in range(TRIES):
        slopes = np.stack([(_errors(rows, _moved(best, n, NUDGE)) - errors) / NUDGE for n in range(len(FITTED))], 1)
        weighed = slopes.T / np.sqrt(1 + (errors / CLIFF) ** 2)
        step = np.linalg.solve(weighed @ slopes + damping * np.eye(len(FITTED)), -weighed @ errors)
        tried = best
        for n, length in enumerate(step):
            tried = _moved(tried, n, length)
        found = _errors(rows, tried)
        if _loss(found) < _loss(errors):
            best, errors, damping = tried, found, damping / 3
        else:
            damping *= 4
    return best


def _moved(constants: GptConstants, index: int, step: float) -> GptConstants:
    """Returns constants one of which is a part larger."""
    name = FITTED[index]
    value = getattr(constants, name) * math.exp(max(-1.0, min(1.0, step)))
    return constants.replace(**{name: min(1.0, value) if name == "memory" else value})


def _errors(rows: Sequence[Row], constants: GptConstants) -> Any:
    return np.array([math.log1p(row.error(constants)) for row in rows])


def _loss(errors: Any) -> float:
    """Returns the sum of errors that count by their square up to a cliff, and by their size beyond."""
    return float(np.sqrt(1 + (errors / CLIFF) ** 2).sum())


def halves(rows: Sequence[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Returns two halves with equal parts of each number of GPUs, width and tensor parallelism."""
    groups: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.grid.size, row.shape.width, row.grid.tensor].append(row)
    chance, parts = random.Random(seed), ([], [])
    flip = 0
    for key in sorted(groups):
        own = groups[key]
        chance.shuffle(own)
        for row in own:  # over groups of odd size the halves take turns
            parts[flip].append(row)
            flip = 1 - flip
    return parts


class Score(NamedTuple):
    mean: float
    median: float
    worst: float
    bias: float
    rank: float

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.2%}, median {self.median:.2%}, worst {self.worst:.1%}, bias {self.bias:+.1%},"
            f" rank correlation {self.rank:.4f}"
        )


def score(rows: Sequence[Row], constants: GptConstants) -> Score:
    errors = [row.error(constants) for row in rows]
    sizes = [abs(error) for error in errors]
    times = [row.time_s for row in rows]
    ranks = correlation(order(times), order([t * (1 + e) for t, e in zip(times, errors, strict=True)]))
    return Score(mean(sizes), median(sizes), max(sizes), mean(errors), ranks)


def order(values: Sequence[float]) -> list[float]:
    places = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    for rank, place in enumerate(places):
        found[place] = float(rank)
    return found


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    mean_a, mean_b = mean(a), mean(b)
    together = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return together / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))


SIZES: dict[str, Callable[[Row], int]] = {
    "GPUs": lambda row: row.grid.size,
    "tensor": lambda row: row.grid.tensor,
    "data": lambda row: row.grid.data,
    "pipeline": lambda row: row.grid.pipeline,
    "micro batch": lambda row: row.batch.samples,
    "width": lambda row: row.shape.width,
}


def print_groups(rows: Sequence[Row], constants: GptConstants) -> None:
    for name, key in SIZES.items():
        cells = []
        for value in sorted({key(row) for row in rows}):
            own = [row.error(constants) for row in rows if key(row) == value]
            cells.append(f"{value}: {mean(map(abs, own)):.1%} ({mean(own):+.1%}, {len(own)})")
        print(f"  {name:12} {'  '.join(cells)}")


def print_larger(rows: Sequence[Row]) -> None:
    """Fits to the rows below the largest number of something, and scores those of the largest."""
    for name in ("GPUs", "tensor", "width"):
        key = SIZES[name]
        most = max(map(key, rows))
        fitted, held = [row for row in rows if key(row) < most], [row for row in rows if key(row) == most]
        if fitted:
            print(
                f"{name} below {most} fitted ({len(fitted)} rows), {most}: {score(held, calibrate(fitted))}", flush=True
            )


def show(constants: GptConstants) -> str:
    return ", ".join(f"{name} {getattr(constants, name):.4g}" for name in GptConstants.model_fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--machine", default="64x(8xa100-80gb), 800Gb/s", help="what the rows were measured on")
    parser.add_argument("--constants", choices=("calibrated", "shipped"), default="calibrated")
    parser.add_argument("--splits", type=int, default=5, help="random halves beside the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="calibrate on all rows, and say the constants")
    parser.add_argument("--recompute", action="store_true", help="the rows recompute activations")
    asked = parser.parse_args()
    rows = read_rows(asked.file, read_machine(asked.machine), recomputes=asked.recompute)
    if asked.constants == "shipped" or asked.all:
        constants = calibrate(rows) if asked.all else GptConstants()
        print(f"{len(rows)} rows, constants {'fitted to all' if asked.all else 'as shipped'}: {score(rows, constants)}")
        print(f"  {show(constants)}")
        print_groups(rows, constants)
        return
    found = []
    for seed in range(asked.seed, asked.seed + 1 + asked.splits):
        fitted, held = halves(rows, seed)
        constants = calibrate(fitted)
        found.append(score(held, constants))
        print(f"seed {seed}: {len(fitted)} rows fitted, {len(held)} held out: {found[-1]}", flush=True)
        if seed == asked.seed:
            print(f"  fitted rows: {score(fitted, constants)}\n  {show(constants)}")
            print_groups(held, constants)
    means = [one.mean for one in found]
    print_larger(rows)
    print(f"held out, over {len(found)} halves: mean {mean(means):.2%}, {min(means):.2%} to {max(means):.2%}")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"published: {error}")
