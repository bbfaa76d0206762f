"""Measures single operators on this machine's devices and prints one CSV, a row for each: needs torch alone.

    python bench/operators.py > rows.csv       # under a minute; --devices cpu or gpu for one of them

Devices are the CPU with one thread, the CPU with all of them, and the first GPU. Shapes suit the type of device: a run
takes from microseconds, where launching counts, to milliseconds. Runs take turns on copies of their tensors that are
larger than caches together, and keep their results as long, as in a model. `flop` and `bytes` are what the operations
between tensors do, by the rules of `profile --estimate`. `time_s` is what the fastest quarter of visits stays below, as
interruptions only ever slow; `spread` is how far the middle visit lies above it, as a part of it. `flop_per_s` and
`bytes_per_s` are the device's own rates: its best product in the row's type, and its best copy.

`docs/forecast.md` says what is learnt from the rows.
"""

import argparse
import csv
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

BUDGET_S = 18.0
"""For all rows together, beside what making their tensors takes."""
WARM_UPS = {"cpu": 1, "gpu": 3}
"""Runs before any is timed: kernels are loaded, algorithms chosen."""
COLD_BYTES, MOST_COPIES = 32 << 20, 8
"""What copies of a row's tensors read and write together, where so many copies do."""
SWEEPS, FEWEST, MOST = 2, 3, 100
"""Over all rows, and visits of a row in each: at least so many, and no more."""
VISIT_S = 1e-3
"""About what the runs of a visit take together."""
COLUMNS = ("device", "type", "dtype", "operator", "pass", "shape", "flop", "bytes", "time_s", "spread")
RATES = ("flop_per_s", "bytes_per_s")
FREE = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")
"""Operations beside views that touch no bytes."""

Shape = tuple[int, ...]
SHAPES: dict[str, dict[str, tuple[Shape, ...]]] = {
    "cpu": {
        "matmul": ((64, 256, 256), (256, 512, 512), (512, 512, 2048), (128, 2048, 2048), (768, 768, 768)),
        "conv": ((2, 16, 32, 32), (2, 64, 64, 28), (2, 128, 128, 14), (2, 32, 32, 56)),
        "attention": ((2, 4, 128, 64), (2, 8, 256, 64), (1, 4, 512, 64)),
        "norm": ((64, 256), (512, 768), (2048, 1024)),
        "elementwise": ((1 << 14,), (1 << 18,), (1 << 22,)),
        "add": ((1 << 14,), (1 << 18,), (1 << 22,)),
        "copy": ((1 << 25,),),
        "embedding": ((512, 1024, 256), (1024, 32768, 768)),
        "softmax": ((256, 1024), (256, 32768)),
        "loss": ((256, 1024), (256, 32768)),
        "update": ((1 << 14,), (1 << 18,), (1 << 22,)),
    },
    "gpu": {
        "matmul": (
            (512, 1024, 1024),
            (2048, 2048, 2048),
            (1024, 8192, 1024),
            (8192, 2048, 8192),
            (8192, 8192, 8192),
        ),
        "conv": ((8, 64, 64, 56), (32, 64, 128, 56), (64, 256, 256, 28), (128, 512, 512, 14)),
        "attention": ((4, 12, 512, 64), (8, 16, 1024, 64), (4, 32, 2048, 128)),
        "norm": ((1024, 768), (8192, 2048), (16384, 8192)),
        "elementwise": ((1 << 18,), (1 << 23,), (1 << 27,)),
        "add": ((1 << 18,), (1 << 23,), (1 << 27,)),
        "copy": ((1 << 28,),),
        "embedding": ((4096, 32768, 768), (16384, 50304, 4096)),
        "softmax": ((1024, 1024), (4096, 50304)),
        "loss": ((1024, 1024), (4096, 50304)),
        "update": ((1 << 18,), (1 << 23,), (1 << 27,)),
    },
}
"""By type of device and operator; `make` says what the numbers are."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BACKWARD_FLOP = {"attention": 2.5}
"""Of a backward for each of the forward, where it is not 2: attention makes its scores again."""


class Case(NamedTuple):
    """One operator at one shape: what is run, on which tensors, and its forward's operations."""

    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    flop: float = 0.0


class Place(NamedTuple):
    name: str
    device: torch.device
    threads: int

    @property
    def type(self) -> str:
        return "cpu" if self.device.type == "cpu" else "gpu"


def make(operator: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    """Returns an operator on tensors of a shape."""

    def random(*sizes: int) -> Tensor:
        if device.type == "cpu":  # whose times do not depend on values, and which is slow at making them
            return torch.full(sizes, 0.1, dtype=dtype, requires_grad=True)
        return torch.randn(*sizes, device=device, dtype=dtype, requires_grad=True)

    def numbers(count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), device=device)

    match operator, shape:
        case "matmul", (m, k, n):
            return Case(torch.mm, (random(m, k), random(k, n)), 2.0 * m * k * n)
        case "conv", (batch, channels, filters, side):
            inputs = random(batch, channels, side, side), random(filters, channels, 3, 3)
            flop = 2.0 * batch * filters * channels * 9 * side * side
            return Case(lambda x, w: functional.conv2d(x, w, padding=1), inputs, flop)
        case "attention", (batch, heads, context, width):
            inputs = tuple(random(batch, heads, context, width) for _ in range(3))
            flop = 4.0 * batch * heads * context * context * width
            return Case(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, flop)
        case "norm", (rows, width):
            inputs = random(rows, width), random(width), random(width)
            return Case(lambda x, w, b: functional.layer_norm(x, (width,), w, b), inputs)
        case "elementwise", (count,):
            return Case(functional.gelu, (random(count),))
        case "add", (count,):
            return Case(lambda x, y: torch.add(x, y, alpha=0.5), (random(count), random(count)))
        case "copy", (count,):
            source = random(count).detach()
            return Case(torch.empty_like(source).copy_, (source,))
        case "embedding", (tokens, rows, width):
            return Case(functional.embedding, (numbers(tokens, rows), random(rows, width)))
        case "softmax", (rows, classes):
            return Case(lambda x: functional.softmax(x, -1), (random(rows, classes),))
        case "loss", (rows, classes):
            return Case(functional.cross_entropy, (random(rows, classes), numbers(rows, classes)))
    raise AssertionError(f"no operator {operator} of {len(shape)} sizes")


def runs_of(operator: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Any, float]]:
    """Yields the passes of an operator: a name, what runs it, and its operations."""
    if operator == "update":
        if dtype == torch.float32:
            yield "forward", _update(shape[0], device), 0.0
        return
    case = make(operator, shape, dtype, device)
    yield "forward", lambda: case.run(*case.inputs), case.flop
    wanted = [x for x in case.inputs if x.requires_grad]
    if wanted:
        output = case.run(*case.inputs)
        seed = torch.ones_like(output)
        flop = BACKWARD_FLOP.get(operator, 2.0) * case.flop
        yield "backward", lambda: torch.autograd.grad(output, wanted, seed, retain_graph=True), flop


def copies_of(
    operator: str, shape: Shape, dtype: torch.dtype, device: torch.device
) -> list[tuple[str, Sequence[Callable[[], object]], float]]:
    """Returns the passes of an operator, each with what runs it on several copies of its tensors."""
    first = list(runs_of(operator, shape, dtype, device))
    if not first:
        return []
    size_bytes = count_bytes(operator, shape, dtype, first[0][1])
    more = [list(runs_of(operator, shape, dtype, device)) for _ in range(min(MOST_COPIES, COLD_BYTES // size_bytes))]
    return [(name, [run, *(copy[n][1] for copy in more)], flop) for n, (name, run, flop) in enumerate(first)]


def taking_turns(runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Returns what runs one after the other, and keeps each result until its turn comes again."""
    kept, turn = deque[object](maxlen=len(runs)), cycle(runs)
    return lambda: kept.append(next(turn)())


def _update(count: int, device: torch.device) -> Callable[[], object]:
    weight = torch.nn.Parameter(torch.ones(count, device=device))
    weight.grad = torch.full_like(weight, 1e-3)
    return torch.optim.AdamW([weight], lr=1e-6, fused=True).step


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view and func._overloadpacket.__name__ not in FREE:
            read, made = (_sizes(tree) for tree in ((args, kwargs), output))
            if func._overloadpacket is torch.ops.aten.embedding:
                read[0] = min(read[0], sum(made))  # of a table only the rows that are asked for
            self.size_bytes += sum(read) + sum(made)
        return output


def _sizes(tree: Any) -> list[int]:
    return [leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def count_bytes(operator: str, shape: Shape, dtype: torch.dtype, run: Callable[[], object]) -> int:
    """Returns what one run reads and writes; AdamW reads four tensors of float32 and writes three."""
    if operator in ("update", "copy"):
        return {"update": 7, "copy": 2}[operator] * dtype.itemsize * shape[0]
    with Traffic() as traffic:
        run()
    return traffic.size_bytes


def time_runs(place: Place, run: Callable[[], object], count: int) -> float:
    """Returns the seconds of one of `count` runs, one behind the other."""
    if place.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(place.device)
    first.record()
    for _ in range(count):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000 / count


def time_visits(place: Place, run: Callable[[], object], budget_s: float) -> list[float]:
    """Returns a run's seconds in each of several visits."""
    for _ in range(WARM_UPS[place.type]):
        time_runs(place, run, 1)
    count = max(1, min(100, round(VISIT_S / time_runs(place, run, 1))))
    start, times = time.perf_counter(), list[float]()
    while len(times) < FEWEST or (time.perf_counter() - start < budget_s and len(times) < MOST):
        times.append(time_runs(place, run, count))
    return times


def measure(place: Place, budget_s: float) -> list[dict[str, Any]]:
    """Returns the rows of one device; sweeps over all of them, so that a disturbance meets some visits alone."""
    torch.set_num_threads(place.threads)
    cases = [(dtype, name, shape) for dtype in DTYPES for name, own in SHAPES[place.type].items() for shape in own]
    share_s = budget_s / (2 * SWEEPS * len(cases))
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    times: dict[tuple[object, ...], list[float]] = {}
    for _ in range(SWEEPS):
        for dtype, operator, shape in cases:
            for pass_, runs, flop in copies_of(operator, shape, DTYPES[dtype], place.device):
                size_bytes = count_bytes(operator, shape, DTYPES[dtype], runs[0])
                run = taking_turns(runs)
                key = place.name, place.type, dtype, operator, pass_, "x".join(map(str, shape)), flop, size_bytes
                times.setdefault(key, []).extend(time_visits(place, run, share_s))
                fast, middle, _ = quantiles(times[key], n=4, method="inclusive")
                rows[key] = dict(zip(COLUMNS, (*key, fast, middle / fast - 1), strict=True))
    for row in rows.values():
        same = [r for r in rows.values() if r["operator"] == "matmul" and r["dtype"] == row["dtype"]]
        copies = [r for r in rows.values() if r["operator"] == "copy"]
        row["flop_per_s"] = max(r["flop"] / r["time_s"] for r in same)
        row["bytes_per_s"] = max(r["bytes"] / r["time_s"] for r in copies)
    return list(rows.values())


def places(asked: str) -> list[Place]:
    found = []
    if asked != "gpu":
        most = torch.get_num_threads()
        name = slug(next(iter(re.findall(r"^model name\s*:\s*(.*)", read_cpu(), re.M)), "cpu"))
        found += [Place(f"{name}/{n}", torch.device("cpu"), n) for n in sorted({1, most})]
    if asked != "cpu" and torch.cuda.is_available():
        found.append(Place(slug(torch.cuda.get_device_name(0)), torch.device("cuda", 0), torch.get_num_threads()))
    if not found:
        sys.exit("there is no GPU here; leave out --devices gpu")
    return found


def read_cpu() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text("utf-8") if path.exists() else ""


def slug(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", name.lower())).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", choices=("all", "cpu", "gpu"), default="all")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all rows")
    asked = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # as for products, so that float32 means it
    writer = csv.DictWriter(sys.stdout, (*COLUMNS, *RATES), lineterminator="\n")
    writer.writeheader()
    start, here = time.perf_counter(), places(asked.devices)
    for place in here:
        for row in measure(place, asked.budget / len(here)):
            writer.writerow({name: f"{v:.6g}" if isinstance(v, float) else v for name, v in row.items()})
        sys.stdout.flush()
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
