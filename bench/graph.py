"""GraphSAGE on one graph: PyG alone, a GPU alone, a CPU alone, and both together in three ways.

    python bench/graph.py [--edges 10000000] [--batch 4096] [--fanout 10,5] [--updates 120] [--quick] [--out FOLDER]

One process makes a power-law graph in memory-mapped files, with 256 features per node, and trains the same model on it
with the same fan-outs, batches, learning rate and number of updates in every row:

    PyG                     torch_geometric's layers in a plain loop: loader processes sample and gather, pinned memory
    GPU alone               the engine; the host samples and gathers two batches ahead, the GPU does all of the model
    CPU alone               the same on the CPU
    shares                  hybrid training: GPU and CPU each train on a share of the target nodes
    host aggregates         the CPU does the first aggregation of the model, whose rows the GPU then trains on
    host aggregates, shares both

Neighbours are loaded by NeighborLoader if pyg-lib or torch-sparse is installed, which it needs; otherwise by loader
processes with this package's sampler, and the row says so. Features and edges are in host memory in every row. Times
are of all updates after the first round, accuracies of the test nodes after the last update. Stage times of an update
are those of the loader's threads, which overlap, and of the last round's spans; PyG's are those of its host. Without a
GPU a CPU worker stands in for it.
"""

import argparse
import json
import math
import os
import shutil
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, get_worker_info

from pipedejavu.engine import AdamW, Job, Threads
from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Span, Unit, UnitTime
from pipedejavu.graph_data import CsrGraph, open_power_law, parse_fanouts
from pipedejavu.plan import Feed, Order, Place, Plan, Reduce
from pipedejavu.profile import cut_model
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.share import divide
from pipedejavu.source.task import SampleOrder
from pipedejavu.zoo import Task
from pipedejavu.zoo.graph_net import GraphNet, GraphNetSize
from pipedejavu.zoo.graph_sample import GraphSamples
from pipedejavu.zoo.loss import cross_entropy

LR, SEED, ROUND = 3e-3, 0, 8
CORES = len(os.sched_getaffinity(0))
HAS_GPU = torch.cuda.is_available()
GPU = torch.device("cuda" if HAS_GPU else "cpu")
SHARED, SHARED_BYTES = Path("/dev/shm"), 8 << 30
"""Where loader processes leave batches, and what they and the graph need there."""
STAGES = ("sample", "gather", "copy", "train", "sync", "update")


@dataclass(frozen=True)
class Setting:
    graph: CsrGraph
    fanouts: tuple[int, ...]
    batch: int
    updates: int
    hidden: int

    @property
    def per_epoch(self) -> float:
        return len(self.graph.train) / self.batch


@dataclass
class Row:
    label: str
    epochs_per_s: float
    accuracy: float
    stages_ms: dict[str, float]
    spans: tuple[Span, ...] = ()


def size_of(setting: Setting, on_host: bool) -> GraphNetSize:
    graph = setting.graph
    return GraphNetSize(
        fanouts=setting.fanouts, features=graph.num_features, classes=graph.num_classes, hidden=setting.hidden,
        aggregates_on_host=on_host,
    )  # fmt: skip


def task_of(setting: Setting, on_host: bool) -> Task:
    size = size_of(setting, on_host)
    data = GraphSamples(setting.graph, setting.graph.train, size.form(), SEED)
    return Task(name="sage", model=GraphNet(size, seed=SEED), loss=cross_entropy, count=len, data=data)


def program_of(plan: Plan, units: list[tuple[str, nn.Module]]) -> Program:
    """The program of a plan with forced shares, so that its profile needs no measured times."""
    cost = UnitTime(forward=Cost(per_sample_s=1e-6), backward=Cost(per_sample_s=2e-6))
    profile = []
    for name, module in units:
        size = sum(4 * p.numel() for p in module.parameters())
        profile.append(
            Unit(name=name, times={"gpu": cost, "cpu": cost}, parameter_bytes=size, gradient_bytes=size,
                 optimizer_bytes=2 * size, activation_bytes=4.0, boundary_bytes=4.0)
        )  # fmt: skip
    gpu = Device(
        name="gpu0", kind="gpu", type="gpu" if HAS_GPU else "cpu", host="h", memory_bytes=2**36, reserved_bytes=0
    )
    cpu = Device(name="cpu0", kind="cpu", type="cpu", host="h", memory_bytes=2**36, reserved_bytes=0)
    machine = Machine(name="m", hosts=(Host(name="h"),), devices=(gpu, cpu), links=(Link(bytes_per_s=1e10),))
    return compile_plan(plan, Profile(name="sage", units=tuple(profile)), machine, fold=False)


def plan_of(setting: Setting, cpu_share: float) -> Plan:
    """A plan for the GPU alone, the CPU alone, or shares of both, with two batches ahead."""
    feed = Feed(kind="microbatch", samples=setting.batch)
    place, reduce = Place(devices=("gpu0",) if cpu_share == 0 else ("cpu0",)), Reduce()
    if 0 < cpu_share < 1:
        feed = Feed(kind="share", samples=setting.batch, shares=(1 - cpu_share, cpu_share))
        place, reduce = Place(cpu_replicas=1, devices=("gpu0", "cpu0")), Reduce(wire="all-reduce")
    return Plan(name="graph", place=place, feed=feed, order=Order(prefetch=2), reduce=reduce, steps=ROUND)


def train(setting: Setting, label: str, cpu_share: float, on_host: bool) -> Row:
    """Trains with the engine."""
    task = task_of(setting, on_host)
    assert isinstance(task.data, GraphSamples)
    task.data.pins = HAS_GPU and cpu_share < 1
    # A trainer on the CPU and the loader share the cores.
    loaders = CORES - 1 if cpu_share == 0 else max(1, CORES // 2)
    task.data.num_threads = max(1, loaders)
    torch.set_num_threads(max(1, CORES - loaders))
    units = list(task.model.units())  # type: ignore[operator]
    program = program_of(plan_of(setting, cpu_share), units)
    cut = cut_model(task.model, None)
    job = Job(units=cut.units, loss=task.loss, optimizer=AdamW(lr=LR, weight_decay=0.0), seed=SEED)
    batches = SampleOrder(task, cut, program.sizes, SEED)
    batches.keep(8)
    threads = Threads(program, job, batches)
    threads.run()
    drawn, sampled, gathered = task.data.num_drawn, task.data.sample_s, task.data.gather_s
    start, spans = time.perf_counter(), tuple[Span, ...]()
    for _ in range(setting.updates // ROUND - 1):
        spans = threads.run()
    took = time.perf_counter() - start
    weights = threads.outcome().weights[0, 0]
    threads.close()
    task.model.load_state_dict({name: weight.cpu() for name, weight in weights.items()})
    count = max(1, task.data.num_drawn - drawn)
    per_update = len(program.sizes) * 1e3 / count
    stages = {
        "sample": (task.data.sample_s - sampled) * per_update,
        "gather": (task.data.gather_s - gathered) * per_update,
    }
    return Row(
        label, (setting.updates - ROUND) / took / setting.per_epoch, accuracy(setting, task.model, on_host),
        stages | stage_times(spans), spans,
    )  # fmt: skip


def stage_times(spans: tuple[Span, ...]) -> dict[str, float]:
    """The longest worker's time per update in each stage, in ms."""
    kinds = {"FETCH": "copy", "F": "train", "B": "train", "REDUCE": "sync", "UPDATE": "update"}
    sums: dict[tuple[str, int], float] = defaultdict(float)
    for span in spans:
        kind = next((kinds[k] for k in ("FETCH", "REDUCE", "UPDATE", "F", "B") if span.action.startswith(k)), None)
        if kind is not None:
            sums[kind, span.worker] += (span.end_s - span.start_s) * 1e3 / ROUND
    return {kind: max((s for (k, _), s in sums.items() if k == kind), default=0.0) for kind in STAGES[2:]}


def accuracy(setting: Setting, model: nn.Module, on_host: bool) -> float:
    """The share of test nodes that the model classifies correctly."""
    nodes = setting.graph.test[:10_000]
    data = GraphSamples(setting.graph, nodes, size_of(setting, on_host).form(), SEED)
    data.num_threads = CORES
    model, right = model.to(GPU), 0
    with torch.no_grad():
        for first in range(0, len(nodes), setting.batch):
            inputs, targets = data.batch(range(first, min(len(nodes), first + setting.batch)))
            right += int((model(tuple(t.to(GPU) for t in inputs)).argmax(1).cpu() == targets).sum())
    return right / len(nodes)


class PygSage(nn.Module):
    """The network of PyG's examples."""

    def __init__(self, setting: Setting):
        super().__init__()
        from torch_geometric.nn import SAGEConv

        graph, count = setting.graph, len(setting.fanouts)
        widths = [graph.num_features, *[setting.hidden] * (count - 1), graph.num_classes]
        self.layers = nn.ModuleList(SAGEConv(*widths[n : n + 2]) for n in range(count))

    def forward(self, x: Tensor, edges: list[Tensor], counts: list[int]) -> Tensor:
        """Takes the edges of each layer and how many rows it makes; without counts, one set of edges for all layers."""
        for n, layer in enumerate(self.layers):
            x = layer((x, x[: counts[n]]), edges[n]) if counts else layer(x, edges[0])
            if n < len(self.layers) - 1:
                x = functional.relu(x)
        return x


def twins(layer: Any, unit: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters of a SAGEConv, each with that of the unit."""
    pairs = [(layer.lin_l.weight, unit.neighbours.weight), (layer.lin_l.bias, unit.neighbours.bias)]
    return [*pairs, (layer.lin_r.weight, unit.own.weight)]


Batch = tuple[Tensor, list[Tensor], list[int], Tensor]


class Collate:
    """Samples and gathers a batch in a loader process, as edges for PyG."""

    def __init__(self, data: GraphSamples):
        self.data, self.step = data, 0

    def __call__(self, indices: list[int]) -> Batch:
        """Returns features, the edges of each layer and its number of rows, and classes."""
        self.data.num_threads = 1 if get_worker_info() else CORES
        self.step += 1
        (x, *blocks), targets = self.data.drawn(indices, hash((self.step, *indices[:2])) % (1 << 62))
        pairs = zip(blocks[::2], blocks[1::2], strict=True)
        edges = [torch.stack([i, torch.repeat_interleave(torch.arange(len(p) - 1), p.diff())]) for p, i in pairs]
        return x, edges, [len(p) - 1 for p in blocks[::2]], targets


def has_shared_memory() -> bool:
    """Whether the graph and the batches of loader processes fit into shared memory."""
    return SHARED.is_dir() and shutil.disk_usage(SHARED).free >= SHARED_BYTES


def pyg_batches(setting: Setting) -> tuple[str, Callable[[], Iterator[Batch]]]:
    """Returns what loads, and a function that yields one epoch."""
    graph = setting.graph
    workers = max(1, CORES // 2) if has_shared_memory() or setting.batch < 1024 else 0
    try:
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader
        from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

        if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
            raise ImportError("NeighborLoader needs pyg-lib or torch-sparse")
    except ImportError:
        data = GraphSamples(graph, graph.train, size_of(setting, on_host=False).form(), SEED)
        loader = DataLoader(
            range(len(data)), setting.batch, shuffle=True, num_workers=workers, collate_fn=Collate(data),
            pin_memory=HAS_GPU, persistent_workers=workers > 0,
        )  # fmt: skip
        return f"PyG, {workers} loaders with our sampler", lambda: iter(loader)
    rows = torch.repeat_interleave(torch.arange(graph.num_nodes), torch.from_numpy(graph.indptr).diff())
    whole = Data(
        x=torch.from_numpy(graph.features), y=torch.from_numpy(graph.labels),
        edge_index=torch.stack([torch.from_numpy(graph.indices).long(), rows]),
    )  # fmt: skip
    neighbours = NeighborLoader(
        whole, list(setting.fanouts), torch.from_numpy(graph.train), batch_size=setting.batch, shuffle=True,
        num_workers=workers, persistent_workers=workers > 0, filter_per_worker=True,
    )  # fmt: skip

    def epoch() -> Iterator[Batch]:
        for part in neighbours:
            yield part.x, [part.edge_index], [], part.y[: part.batch_size]

    return f"PyG, NeighborLoader × {workers}", epoch


def train_pyg(setting: Setting) -> Row:
    """Trains with torch_geometric's layers in a plain loop."""
    torch.set_num_threads(max(1, CORES // 2))
    label, epoch = pyg_batches(setting)
    torch.manual_seed(SEED)
    task = task_of(setting, on_host=False)
    model = PygSage(setting).to(GPU)
    units = [unit for _, unit in task.model.units()]  # type: ignore[operator]
    for layer, unit in zip(model.layers, units, strict=True):  # the same start
        for theirs, ours in twins(layer, unit):
            theirs.data.copy_(ours)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    done, start, seconds = 0, 0.0, defaultdict[str, float](float)
    while done < setting.updates:
        before = time.perf_counter()
        for x, edges, counts, targets in epoch():
            loaded = time.perf_counter()
            x, edges = x.to(GPU, non_blocking=True), [e.to(GPU, non_blocking=True) for e in edges]
            optimizer.zero_grad()
            functional.cross_entropy(model(x, edges, counts)[: len(targets)], targets.to(GPU)).backward()
            optimizer.step()
            done += 1
            if done > ROUND:
                seconds["wait"] += loaded - before
                seconds["train"] += time.perf_counter() - loaded
            if done in (ROUND, setting.updates) and HAS_GPU:
                torch.cuda.synchronize()
            if done == ROUND:
                start = time.perf_counter()
            if done == setting.updates:
                break
            before = time.perf_counter()
    took = time.perf_counter() - start
    stages = {name: 1e3 * s / (setting.updates - ROUND) for name, s in seconds.items()}
    for layer, unit in zip(model.layers, units, strict=True):
        for theirs, ours in twins(layer, unit):
            ours.data.copy_(theirs)
    return Row(
        label, (setting.updates - ROUND) / took / setting.per_epoch, accuracy(setting, task.model, False), stages
    )


def report(rows: list[Row], pyg: Row | None, alone: list[Row]) -> None:
    """Prints all rows with their ratios."""
    best = max((row.epochs_per_s for row in alone), default=math.nan)
    beside = pyg.epochs_per_s if pyg else math.nan
    print(f"\n{'':36}{'epochs/s':>9} {'× PyG':>7} {'× best alone':>13} {'accuracy':>9}   per update, ms")
    for row in rows:
        stages = "  ".join(f"{name} {row.stages_ms[name]:.1f}" for name in row.stages_ms)
        ratios = f"{row.epochs_per_s / beside:>7.2f} {row.epochs_per_s / best:>13.2f}"
        print(f"{row.label:36}{row.epochs_per_s:>9.3f} {ratios} {row.accuracy:>9.1%}   {stages}")


def write_timeline(rows: list[Row], folder: Path) -> None:
    """Writes the spans of each row's last round."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row.spans:
            first = min(span.start_s for span in row.spans)
            lines = [
                {**span._asdict(), "start_s": span.start_s - first, "end_s": span.end_s - first} for span in row.spans
            ]
            (folder / f"{row.label.replace(' ', '-').replace(',', '')}.json").write_text(json.dumps(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--fanout", default="10,5")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--quick", action="store_true", help="10^5 edges and few updates")
    parser.add_argument("--out", type=Path, default=None, help="folder for the spans of the last rounds")
    asked = parser.parse_args()
    edges, batch, updates = (100_000, 128, 3 * ROUND) if asked.quick else (asked.edges, asked.batch, asked.updates)
    with tempfile.TemporaryDirectory(dir=None if asked.quick or not has_shared_memory() else SHARED) as root:
        started = time.perf_counter()
        graph = open_power_law(edges, Path(root), seed=SEED)
        setting = Setting(graph, parse_fanouts(asked.fanout), batch, updates, asked.hidden)
        native = (
            "native"
            if GraphSamples(graph, graph.train, size_of(setting, True).form(), 0).sampler.is_native
            else "numpy"
        )
        print(
            f"{graph.num_nodes:,} nodes, {len(graph.indices):,} edges, {graph.num_features} features, made in"
            f" {time.perf_counter() - started:.1f} s; batches of {batch}, fan-outs {asked.fanout},"
            f" {setting.per_epoch:.1f} updates per epoch, {updates} updates; {native} sampler; {CORES} cores,"
            f" {torch.cuda.get_device_name() if HAS_GPU else 'no GPU, a CPU worker stands in for it'}",
            flush=True,
        )  # fmt: skip
        run = partial(train, setting)
        pyg = told("PyG", partial(train_pyg, setting))
        gpu = told("GPU alone", partial(run, "GPU alone", 0.0, on_host=False))
        cpu = told("CPU alone", partial(run, "CPU alone", 1.0, on_host=False))
        ahead = told("host aggregates", partial(run, "host aggregates", 0.0, on_host=True))
        cpu_ahead = told(
            "CPU alone, loader aggregates", partial(run, "CPU alone, loader aggregates", 1.0, on_host=True)
        )
        both = both_ahead = None
        if gpu and cpu:
            both = told("shares", partial(run, *shared("shares", gpu, cpu, batch), on_host=False))
        if ahead and cpu_ahead:
            label = "host aggregates, shares"
            both_ahead = told(label, partial(run, *shared(label, ahead, cpu_ahead, batch), on_host=True))
        rows = [row for row in (pyg, gpu, cpu, cpu_ahead, both, ahead, both_ahead) if row]
        report(rows, pyg, [row for row in (gpu, cpu, cpu_ahead) if row])
        if asked.out:
            write_timeline(rows, asked.out)
        print(f"{time.perf_counter() - started:.0f} s in all")


def told(label: str, make: Callable[[], Row]) -> Row | None:
    """Makes a row and prints its speed; a row that fails says why, and the others go on."""
    try:
        row = make()
    except Exception:
        print(f"  {label} failed", flush=True)
        traceback.print_exc()
        return None
    print(f"  {row.label}: {row.epochs_per_s:.3f} epochs/s", flush=True)
    return row


def shared(label: str, gpu: Row, cpu: Row, batch: int) -> tuple[str, float]:
    """Returns a label and the CPU's share, in proportion to the speeds alone."""
    count = max(1, divide(batch, [gpu.epochs_per_s, cpu.epochs_per_s])[1])
    return f"{label}, CPU {count} of {batch}", count / batch


if __name__ == "__main__":
    main()
