"""Scores forecasts of GPTs by their shape against iteration times that others published, on rows not fitted to.

    python bench/published.py FIT.csv                        # leaves out one width and number of GPUs at a time
    python bench/published.py FIT.csv --score OTHER.csv …    # fits to all of FIT.csv, and scores other files
    python bench/published.py FIT.csv --shipped              # fits nothing, and scores the constants as shipped
    … --machine "64x(8xa100-80gb), 800Gb/s"                  # the machine that the rows were measured on
    … --kept                                                 # the rows of FIT.csv keep activations
    … --any-batch                                            # ranks rows of all batches together, per sample

A row becomes a plan (1F1B, layers in equal runs, every layer recomputed, tensor-parallel groups on neighbouring GPUs),
and the plan is compiled for the profile of its shape and simulated, as `pipedejavu plan` does. The file has a header
and the columns of vTrain's published measurements: GPUs, global batch, micro batch, hidden size, attention heads,
layers, sequence length, tensor, data and pipeline parallelism, iteration time in ms.
"""

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from pipedejavu.facts import InputError, Machine, Record, read_file, read_machine
from pipedejavu.facts.cluster import SUM_START_S
from pipedejavu.plan import Cut, Feed, Order, Place, Plan, Reduce
from pipedejavu.search.candidate_plan import PlanningProblem
from pipedejavu.search.ranking import time_plan
from pipedejavu.zoo.gpt_profile import FITTED_ERROR, GptConstants, profile_of
from pipedejavu.zoo.gpt_shape import Shape

COLUMNS = ("gpus", "batch", "micro", "width", "heads", "layers", "context", "tensor", "data", "pipeline", "time_ms")
TRIES, NUDGE, CONVERGED = 40, 1e-3, 1e-4
CLIFF = 0.05
"""Errors beyond this count by their size and no longer by its square, so that single rows do not decide."""
NORMAL_80 = 1.2816
"""80 % of a normal distribution lies within this many standard deviations of its mean."""
LEAST = 3
"""Rows of a group whose ranks are compared."""


class Constants(Record):
    """What is fitted: the rest is known from datasheets and from measurements of collectives alone."""

    memory: float = GptConstants().memory
    logit_bytes: float = GptConstants().logit_bytes
    layer_host_s: float = GptConstants().layer_host_s
    microbatch_host_s: float = GptConstants().microbatch_host_s
    sum_start_s: float = SUM_START_S

    def shape_constants(self) -> GptConstants:
        return GptConstants(**self.model_dump(exclude={"sum_start_s"}))


START = Constants(memory=0.8, logit_bytes=50, layer_host_s=3e-3, microbatch_host_s=1e-3, sum_start_s=1e-4)
"""Where the search begins: round numbers, so that nothing is known of rows that are held out."""


class Row(NamedTuple):
    """A published run."""

    gpus: int
    batch: int
    micro: int
    shape: Shape
    tensor: int
    data: int
    pipeline: int
    is_recomputed: bool
    machine: Machine
    time_s: float

    @property
    def group(self) -> tuple[object, ...]:
        """What rows share that differ only in their division over GPUs."""
        return self.gpus, self.batch, self.micro, self.shape

    def plan(self) -> Plan:
        """Returns Megatron's plan: tensor-parallel groups take neighbouring GPUs, then replicas, then stages."""
        names, layers = [device.name for device in self.machine.devices], self.shape.layers
        even, more = divmod(layers, self.pipeline)
        ends = [(n + 1) * even + min(n + 1, more) for n in range(self.pipeline)]
        devices = (
            names[shard + self.tensor * (replica + self.data * stage)]
            for replica in range(self.data)
            for stage in range(self.pipeline)
            for shard in range(self.tensor)
        )
        return Plan(
            cut=Cut(kind="chain", bounds=tuple(1 + end for end in ends[:-1])) if self.pipeline > 1 else Cut(),
            place=Place(
                workers=self.pipeline,
                replicas=self.data,
                stage_shards=(self.tensor,) * self.pipeline if self.tensor > 1 else None,
                devices=tuple(devices),
            ),
            feed=Feed(microbatches=self.batch // (self.micro * self.data), samples=self.micro),
            order=Order(
                kind="1f1b" if self.pipeline > 1 else "step",
                recompute_units=tuple(range(1, layers + 1)) if self.is_recomputed else None,
            ),
            reduce=Reduce(wire="all-reduce" if self.data > 1 else "none"),
        )

    def forecast_s(self, constants: Constants) -> float:
        """Returns the simulated time of the iteration."""
        machine = with_start(self.machine, constants.sum_start_s)
        profile = profile_of("shape", self.shape, machine, constants.shape_constants())
        timed = time_plan(self.plan(), PlanningProblem(profile, machine, ()), 0.0)
        if isinstance(timed, str):
            raise InputError(f"a row cannot be simulated: {timed}")
        return timed.time_s


@cache
def _links_with_start(links: tuple[Any, ...], start_s: float) -> tuple[Any, ...]:
    return tuple(link.replace(sum_start_s=start_s) for link in links)


def with_start(machine: Machine, start_s: float) -> Machine:
    """Returns the machine with another time to start an all-reduce."""
    return machine.replace(links=_links_with_start(machine.links, start_s))


def read_rows(path: str, machine: Machine, *, vocabulary: int = 51200, is_recomputed: bool = True) -> list[Row]:
    try:
        lines = list(csv.reader(read_file(path).decode("utf-8").splitlines()))[1:]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    machines: dict[int, Machine] = {}
    rows, crossing = [], 0
    per_host = sum(device.host == machine.devices[0].host for device in machine.devices)
    for number, line in enumerate(lines, 2):
        values = dict(zip(COLUMNS, map(_number, line), strict=False))
        if len(line) != len(COLUMNS) or None in values.values():
            raise InputError(
                f"{path}, line {number}: expected {len(COLUMNS)} positive numbers, found {','.join(line)!r}"
            )
        size = {name: int(value or 0) for name, value in values.items()}
        gpus, tensor, data, pipeline = (size[name] for name in ("gpus", "tensor", "data", "pipeline"))
        if tensor * data * pipeline != gpus or size["batch"] % (size["micro"] * data):
            raise InputError(
                f"{path}, line {number}: {tensor * data * pipeline} workers on {gpus} GPUs, batch {size['batch']} as"
                f" microbatches of {size['micro']} on {data} replicas; these do not go together"
            )
        if gpus > len(machine.devices):
            raise InputError(
                f"{path}, line {number}: {gpus} GPUs, and the machine has {len(machine.devices)}; name a larger one"
            )
        if tensor > per_host:
            crossing += 1
            continue
        if gpus not in machines:
            machines[gpus] = machine.replace(devices=machine.devices[:gpus])
        shape = Shape(size["layers"], size["width"], size["heads"], size["context"], vocabulary)
        divided = (tensor, data, pipeline, is_recomputed, machines[gpus])
        rows.append(Row(gpus, size["batch"], size["micro"], shape, *divided, (values["time_ms"] or 0.0) / 1000))
    if len(rows) < 2:
        raise InputError(f"{path} has {len(rows)} rows; give at least 2")
    if crossing:
        print(f"{path}: {crossing} rows with tensor-parallel groups over several hosts are left out")
    return rows


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def calibrate(rows: Sequence[Row]) -> Constants:
    """Returns the constants that minimise errors of logarithms, by Levenberg and Marquardt."""
    best, damping, count = START, 1.0, len(Constants.model_fields)
    errors = _errors(rows, best)
    slopes = None
    for _ in range(TRIES):
        if slopes is None:
            slopes = np.stack([(_errors(rows, _moved(best, n, -NUDGE)) - errors) / -NUDGE for n in range(count)], 1)
        weighed = slopes.T / np.sqrt(1 + (errors / CLIFF) ** 2)
        step = np.linalg.solve(weighed @ slopes + damping * np.eye(count), -weighed @ errors)
        tried = best
        for n, length in enumerate(step):
            tried = _moved(tried, n, length)
        found = _errors(rows, tried)
        gain = 1 - _loss(found) / _loss(errors)
        if gain > 0:
            best, errors, damping, slopes = tried, found, damping / 10, None
            if gain < CONVERGED:
                break
        else:
            damping *= 10
    return best


def _moved(constants: Constants, index: int, step: float) -> Constants:
    """Returns constants one of which is larger by the factor exp(`step`)."""
    name = [*Constants.model_fields][index]
    value = getattr(constants, name) * math.exp(max(-1.0, min(1.0, step)))
    return constants.replace(**{name: min(1.0, value) if name == "memory" else value})


def _errors(rows: Sequence[Row], constants: Constants) -> Any:
    return np.array([math.log(row.forecast_s(constants) / row.time_s) for row in rows])


def _loss(errors: Any) -> float:
    """Returns the sum of errors that count by their square up to a cliff, and by their size beyond."""
    return float((np.sqrt(1 + (errors / CLIFF) ** 2) - 1).sum())


class Score(NamedTuple):
    """How far forecasts are off, and how they rank rows that differ only in their division over GPUs."""

    mean: float
    median: float
    worst: float
    bias: float
    groups: int
    rank: float
    regret: float
    worst_regret: float
    covered: float
    """Share of the rows within the 80 % interval of the forecast."""

    def __str__(self) -> str:
        text = (
            f"mean {self.mean:.1%}, median {self.median:.1%}, worst {self.worst:.0%}, bias {self.bias:+.1%},"
            f" {self.covered:.0%} within the 80 % interval"
        )
        if not self.groups:
            return text
        return (
            f"{text}; {self.groups} groups: Spearman {self.rank:.2f}, regret {self.regret:.1%}, at worst"
            f" {self.worst_regret:.0%}"
        )


Forecasts = Sequence[tuple[Row, float]]


def score(forecasts: Forecasts, *, any_batch: bool = False) -> Score:
    errors = [time_s / row.time_s - 1 for row, time_s in forecasts]
    groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for row, time_s in forecasts:
        group, size = ((row.gpus, row.shape), row.batch) if any_batch else (row.group, 1)
        groups[group].append((row.time_s / size, time_s / size))
    ranks, regrets = [], []
    for pairs in (pairs for pairs in groups.values() if len(pairs) >= LEAST):
        real, forecast = zip(*pairs, strict=True)
        if len({*forecast}) > 1 and len({*real}) > 1:
            ranks.append(correlation(order(real), order(forecast)))
        regrets.append(min(pairs, key=lambda pair: pair[1])[0] / min(real) - 1)
    sizes = [abs(error) for error in errors]
    return Score(
        mean(sizes),
        median(sizes),
        max(sizes),
        mean(errors),
        len(regrets),
        mean(ranks or [0.0]),
        mean(regrets or [0.0]),
        max(regrets or [0.0]),
        mean(abs(math.log1p(error)) <= NORMAL_80 * FITTED_ERROR for error in errors),
    )


def order(values: Sequence[float]) -> list[float]:
    """Returns ranks; equal values share the mean of theirs."""
    places: dict[float, list[int]] = defaultdict(list)
    for rank, value in enumerate(sorted(values)):
        places[value].append(rank)
    return [mean(places[value]) for value in values]


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    mean_a, mean_b = mean(a), mean(b)
    together = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return together / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))


SIZES: dict[str, Callable[[Row], int]] = {
    "GPUs": lambda row: row.gpus,
    "width": lambda row: row.shape.width,
    "tensor": lambda row: row.tensor,
    "data": lambda row: row.data,
    "pipeline": lambda row: row.pipeline,
    "micro batch": lambda row: row.micro,
}


def forecast(rows: Sequence[Row], constants: Constants) -> list[tuple[Row, float]]:
    return [(row, row.forecast_s(constants)) for row in rows]


def print_score(name: str, forecasts: Forecasts, *, any_batch: bool = False) -> None:
    print(f"{name}: {len(forecasts)} rows, {score(forecasts, any_batch=any_batch)}", flush=True)
    for size, key in SIZES.items():
        cells = []
        for value in sorted({key(row) for row, _ in forecasts}):
            errors = [time_s / row.time_s - 1 for row, time_s in forecasts if key(row) == value]
            cells.append(f"{value}: {mean(map(abs, errors)):.1%} ({mean(errors):+.1%}, {len(errors)})")
        print(f"  {size:12} {'  '.join(cells)}")


def left_out(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Returns forecasts of each width and number of GPUs from constants that are fitted to all others."""
    groups: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.shape.width, row.gpus].append(row)
    if len(groups) < 2:
        raise InputError("all rows have one width and number of GPUs; score them from another file's constants")
    found = []
    for key, held in sorted(groups.items()):
        constants = calibrate([row for row in rows if (row.shape.width, row.gpus) != key])
        found += forecast(held, constants)
        print(f"width {key[0]}, {key[1]} GPUs left out: {score(found[-len(held) :])}", flush=True)
    return found


def show(constants: Constants) -> str:
    return ", ".join(f"{name} {getattr(constants, name):.4g}" for name in Constants.model_fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--score", nargs="+", default=(), help="files to score with the constants of the first")
    parser.add_argument("--machine", default="64x(8xa100-80gb), 800Gb/s", help="the machine of the rows")
    parser.add_argument("--vocabulary", type=int, default=51200)
    parser.add_argument("--shipped", action="store_true", help="fit nothing")
    parser.add_argument("--any-batch", action="store_true", help="rank rows of all batches together, per sample")
    parser.add_argument("--kept", action="store_true", help="the rows of the first file keep activations")
    asked = parser.parse_args()
    machine = read_machine(asked.machine)
    rows = read_rows(asked.file, machine, vocabulary=asked.vocabulary, is_recomputed=not asked.kept)
    if not asked.shipped and not asked.score:
        print_score(f"{asked.file}, each group left out once", left_out(rows))
        return
    constants = Constants() if asked.shipped else calibrate(rows)
    print(f"constants {'as shipped' if asked.shipped else f'fitted to {asked.file}'}: {show(constants)}")
    print_score(asked.file, forecast(rows, constants), any_batch=asked.any_batch)
    for path in asked.score:
        others = read_rows(path, machine, vocabulary=asked.vocabulary)
        print_score(path, forecast(others, constants), any_batch=asked.any_batch)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"published: {error}")
