"""Builds the machine from a survey's rounds: every figure that the simulator uses, and the measurements behind it.

This is pure arithmetic and touches no hardware. Figures that combine several trials (the line through times by size,
the overlap factors) are computed per round, so that they have a spread of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from pipedejavu.facts import Device, Host, Link, Machine, Measurement, Overlap, Survey
from pipedejavu.probe.host import HostFacts
from pipedejavu.probe.machine_shape import ASSUMED_LINK_BYTES_PER_S, ASSUMED_LINK_LATENCY_S
from pipedejavu.probe.series import Series, TimedTrial, Unit, fit_line, rates, summarise

DUPLEX = 0.75
"""If each direction keeps this share of its rate while both are in use, they count as two wires, else as one."""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU as its driver describes it."""

    name: str
    kind: str
    memory_bytes: int
    free_bytes: int
    """Free memory while this process has a context."""
    context_bytes: int | None
    """Memory that the context of one more process takes; None if unknown."""


@dataclass(frozen=True)
class Findings:
    """Results of a survey."""

    host: HostFacts
    gpus: tuple[GpuFacts, ...]
    free_bytes: tuple[int, ...]
    """Free host memory at the start and at the end."""
    trials: tuple[TimedTrial, ...]
    times_s: Series
    unknown: tuple[str, ...]
    disturbance: str = ""


@dataclass(frozen=True)
class Circumstances:
    """When a survey was made, with which software, and how long it took."""

    date: str
    versions: Mapping[str, str]
    time_s: float


def build_machine(name: str, findings: Findings, when: Circumstances) -> Machine:
    """Returns the surveyed machine."""
    book = _Book(findings)
    host = findings.host
    devices = [_cpu(book, name), *(_gpu(book, name, gpu) for gpu in findings.gpus)]
    links = [link for gpu in findings.gpus for link in _host_links(book, gpu.name)]
    if len(findings.gpus) > 1:
        links.append(_gpu_link(book))
    links.append(_process_link(book))
    overlap = _overlap(book)
    described = Host(
        name=name,
        cores=host.cores,
        processor=host.processor,
        sockets=host.sockets,
        numa_nodes=host.numa_nodes,
        instruction_sets=host.instruction_sets,
        disk_read_bytes_per_s=book.value("disk", "read"),
        disk_write_bytes_per_s=book.value("disk", "write"),
    )
    survey = Survey(
        date=when.date,
        versions=dict(when.versions),
        time_s=when.time_s,
        measurements=tuple(book.measurements),
        unknown=(*findings.unknown, *book.unknown),
        disturbance=findings.disturbance,
    )
    return Machine(
        name=name, hosts=(described,), devices=tuple(devices), links=tuple(links), overlap=overlap, survey=survey
    )


class _Book:
    """All measurements: those of single trials, and those computed from several."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.known = [trial for trial in findings.trials if trial.name in findings.times_s]
        self.measurements = [
            summarise(t.subject, t.what, t.setting, t.unit, rates(t, findings.times_s)) for t in self.known
        ]
        self.unknown: list[str] = []

    def trials(self, subject: str, what: str, part: str = "") -> list[TimedTrial]:
        """Returns the trials of a subject whose setting begins with `part`."""
        return [t for t in self.known if (t.subject, t.what) == (subject, what) and t.setting.startswith(part)]

    def messages(self, subject: str, transport: str) -> list[TimedTrial]:
        """Returns the trials of single messages, whose settings are their sizes."""
        return [trial for trial in self.trials(subject, transport) if trial.setting[0].isdigit()]

    def note(self, subject: str, what: str, setting: str, unit: Unit, values: Sequence[float]) -> float:
        """Records a figure computed from several trials; returns its value."""
        self.measurements.append(summarise(subject, what, setting, unit, values))
        return self.measurements[-1].value

    def state(self, subject: str, setting: str, size_bytes: int) -> None:
        """Records a size that the system states, without a spread."""
        row = Measurement(subject=subject, what="memory", setting=setting, unit="B", value=float(size_bytes))
        self.measurements.append(row)

    def value(self, subject: str, what: str, part: str = "") -> float:
        """Returns the highest value of the matching measurements, or zero."""
        return max((m.value for m in self._of(subject, what, part)), default=0.0)

    def best(self, subject: str, what: str, part: str = "") -> Measurement | None:
        """Returns the matching measurement with the highest value, or None."""
        return max(self._of(subject, what, part), key=lambda m: m.value, default=None)

    def _of(self, subject: str, what: str, part: str) -> list[Measurement]:
        rows = self.measurements
        return [m for m in rows if (m.subject, m.what) == (subject, what) and m.setting.startswith(part)]

    def line(self, subject: str, what: str, sizes: Sequence[TimedTrial]) -> tuple[float, float] | None:
        """Returns a link's latency and bandwidth, fitted in each round to the times of all sizes."""
        if len(sizes) < 2:
            return None
        columns = [self.findings.times_s[trial.name] for trial in sizes]
        amounts = [int(trial.amount) for trial in sizes]
        lines = [fit_line(dict(zip(amounts, row, strict=True))) for row in zip(*columns, strict=True)]
        latency_s = self.note(subject, "latency", what, "s", [line.latency_s for line in lines])
        return latency_s, self.note(subject, "bandwidth", what, "B/s", [line.bytes_per_s for line in lines])

    def ratio(self, subject: str, what: str, setting: str, over: TimedTrial, under: TimedTrial) -> float:
        """Returns how many times longer one trial takes than another, compared within each round."""
        times = self.findings.times_s
        pairs = zip(times[over.name], times[under.name], strict=True)
        size = over.amount / under.amount
        return self.note(subject, what, setting, "×", [a / b / size for a, b in pairs])


def _cpu(book: _Book, host: str) -> Device:
    findings = book.findings
    free = book.note("cpu", "memory", "free", "B", findings.free_bytes)
    book.state("cpu", "total", findings.host.memory_bytes)
    flop_per_s = book.value("cpu", "matrix", "float32")
    return Device(
        name="cpu",
        kind="cpu",
        type="cpu",
        host=host,
        memory_bytes=findings.host.memory_bytes,
        reserved_bytes=max(0, findings.host.memory_bytes - round(free)),
        flop_per_s=flop_per_s,
        memory_bytes_per_s=book.value("cpu", "memory", "copy"),
        efficiency=_efficiency(book, "cpu", "float32", flop_per_s),
        parameters_per_s=book.value("cpu", "update"),
        most_workers=findings.host.cores,
    )


def _gpu(book: _Book, host: str, gpu: GpuFacts) -> Device:
    book.state(gpu.name, "total", gpu.memory_bytes)
    book.state(gpu.name, "free", gpu.free_bytes)
    if gpu.context_bytes is not None:
        book.state(gpu.name, "context", gpu.context_bytes)
    best = book.best(gpu.name, "matrix")
    dtype = best.setting.split()[0].replace("tf32", "float32") if best else ""
    return Device(
        name=gpu.name,
        kind=gpu.kind,
        type="gpu",
        host=host,
        memory_bytes=gpu.memory_bytes,
        reserved_bytes=max(0, gpu.memory_bytes - gpu.free_bytes),
        flop_per_s=best.value if best else 0.0,
        memory_bytes_per_s=book.value(gpu.name, "memory", "copy"),
        efficiency=_efficiency(book, gpu.name, dtype, best.value if best else 0.0),
        parameters_per_s=book.value(gpu.name, "update"),
    )


def _efficiency(book: _Book, device: str, dtype: str, flop_per_s: float) -> float | None:
    """Returns the share of the best matrix rate that a transformer block reaches in training."""
    block = book.best(device, "block", dtype)
    if not block or not flop_per_s:
        return None
    share, spread = block.value / flop_per_s, block.spread / flop_per_s
    row = block.replace(what="efficiency", setting=dtype, unit="×", value=share, spread=spread)
    book.measurements.append(row)
    return min(1.0, share)


def _process_link(book: _Book) -> Link:
    """Returns the link between processes through shared memory, as workers of one host use it."""
    lines = {kind: book.line("cpu>cpu", kind, book.messages("cpu>cpu", kind)) for kind in ("gloo", "shared memory")}
    line = lines["shared memory"]
    if line is None:
        book.unknown.append("cpu>cpu: messages between processes were not measured; their link is assumed")
        line = (ASSUMED_LINK_LATENCY_S, ASSUMED_LINK_BYTES_PER_S)
    sums = book.line("cpu>cpu", "memory sum", book.messages("cpu>cpu", "memory sum"))
    if sums is None:
        book.unknown.append("cpu>cpu: sums of processes were not measured; they take what their messages take")
        return Link(latency_s=line[0], bytes_per_s=line[1])
    # An all-reduce over two takes two rounds of a ring; in both together each process sends all of its bytes once.
    return Link(latency_s=line[0], bytes_per_s=line[1], sum_latency_s=sums[0] / 2, sum_bytes_per_s=sums[1])


def _host_links(book: _Book, gpu: str) -> list[Link]:
    """Returns the links between a host and one GPU, on one wire or two, as was measured."""
    lines = {}
    for subject in (f"cpu>{gpu}", f"{gpu}>cpu"):
        for memory in ("pageable", "pinned"):
            lines[subject] = book.line(subject, memory, book.trials(subject, "copy", memory))
    wires = _wires(book, gpu)
    links = []
    for subject, wire in zip(lines, wires, strict=True):
        line = lines[subject]
        if line is None:
            book.unknown.append(f"{subject}: copies were not measured; the link is assumed")
            line = (ASSUMED_LINK_LATENCY_S, ASSUMED_LINK_BYTES_PER_S)
        source, target = (end if end == gpu else f"{end}*" for end in subject.split(">"))
        links.append(Link(source=source, target=target, latency_s=line[0], bytes_per_s=line[1], wires=(wire,)))
    return links


def _wires(book: _Book, gpu: str) -> tuple[str, str]:
    both = book.trials(f"cpu<>{gpu}", "copy", "both ways")
    size = both[0].amount / 2 if both else 0
    alone = [t for s in (f"cpu>{gpu}", f"{gpu}>cpu") for t in book.trials(s, "copy", "pinned") if t.amount == size]
    if not both or len(alone) < 2:
        return f"pcie-in:{gpu}", f"pcie-out:{gpu}"
    times = book.findings.times_s
    rows = zip(times[both[0].name], times[alone[0].name], times[alone[1].name], strict=True)
    kept = book.note(f"cpu<>{gpu}", "duplex", "", "×", [max(a, b) / both_s for both_s, a, b in rows])
    return (f"pcie-in:{gpu}", f"pcie-out:{gpu}") if kept >= DUPLEX else (f"pcie:{gpu}", f"pcie:{gpu}")


def _gpu_link(book: _Book) -> Link:
    """Returns the link between GPUs of this host: NCCL's if it was measured, else that of plain copies."""
    line = book.line("gpu0>gpu1", "nccl", book.messages("gpu0>gpu1", "nccl"))
    if line is None:
        names = [gpu.name for gpu in book.findings.gpus]
        peers = [rate for a, b in pairwise(names) if (rate := book.value(f"{a}>{b}", "peer copy"))]
        book.unknown.append("gpu*>gpu*: NCCL was not measured; the link is that of plain copies, its latency assumed")
        line = (ASSUMED_LINK_LATENCY_S, min(peers, default=ASSUMED_LINK_BYTES_PER_S))
    wires = ("gpu-out:{source}", "gpu-in:{target}")
    return Link(source="gpu*", target="gpu*", scope="same-host", latency_s=line[0], bytes_per_s=line[1], wires=wires)


def _overlap(book: _Book) -> Overlap:
    """Returns the overlap factors of the GPUs, or of messages between processes if there is no GPU."""
    factors: dict[str, list[float]] = {"compute": [], "transfer": []}
    for gpu in book.findings.gpus:
        both = f"cpu<>{gpu.name}"
        beside, copy = book.trials(both, "compute", "beside"), book.trials(both, "copy", "beside")
        alone = book.trials(both, "compute", "alone")
        free = [t for t in book.trials(f"cpu>{gpu.name}", "copy", "pinned") if copy and t.amount == copy[0].amount]
        if beside and copy and alone and free:
            factors["compute"].append(book.ratio(both, "overlap", "compute", beside[0], alone[0]))
            factors["transfer"].append(book.ratio(both, "overlap", "transfer", copy[0], free[0]))
    beside, message = book.trials("cpu>cpu", "compute", "beside"), book.trials("cpu>cpu", "shared memory", "beside")
    alone = book.trials("cpu>cpu", "compute", "alone")
    free = [t for t in book.messages("cpu>cpu", "shared memory") if message and t.amount == message[0].amount]
    if beside and message and alone and free:
        cpu = book.ratio("cpu>cpu", "overlap", "compute", beside[0], alone[0])
        wire = book.ratio("cpu>cpu", "overlap", "transfer", message[0], free[0])
        if not book.findings.gpus:
            factors = {"compute": [cpu], "transfer": [wire]}
    if not factors["compute"]:
        book.unknown.append("overlap of compute and transfers: not measured, taken as none")
    return Overlap(**{name: max(1.0, median(ratios)) for name, ratios in factors.items() if ratios})
