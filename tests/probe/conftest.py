"""Findings that were never measured: what a survey would find on machines of known rates."""

from collections.abc import Callable, Sequence

import pytest

from pipedejavu.probe.host import HostFacts
from pipedejavu.probe.series import TimedTrial, Unit
from pipedejavu.probe.survey_result import Findings, GpuFacts

ROUNDS = 12
HOST = HostFacts(16, 128 << 30, "Some CPU", 2, None, ("avx2",), ("NUMA nodes: the operating system does not say",))
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 26)


def never(count: int) -> float:
    raise AssertionError("nothing is timed here")


class Book:
    """Trials with the times that they took."""

    def __init__(self) -> None:
        self.trials: list[TimedTrial] = []
        self.times_s: dict[str, list[float]] = {}

    def add(self, subject: str, what: str, setting: str, amount: float, unit: Unit, time_s: float) -> None:
        trial = TimedTrial(subject, what, setting, amount, unit, never)
        self.trials.append(trial)
        self.times_s[trial.name] = [time_s * (1 + 0.001 * (n % 3 - 1)) for n in range(ROUNDS)]

    def rate(self, subject: str, what: str, setting: str, unit: Unit, rate: float) -> None:
        self.add(subject, what, setting, 1e6, unit, 1e6 / rate)

    def line(self, subject: str, what: str, setting: str, latency_s: float, bytes_per_s: float) -> None:
        for size in SIZES:
            text = f"{setting} {size} B".strip()
            self.add(subject, what, text, size, "B/s", latency_s + size / bytes_per_s)

    def findings(self, gpus: Sequence[GpuFacts] = ()) -> Findings:
        free = (100 << 30, 100 << 30)
        return Findings(HOST, tuple(gpus), free, tuple(self.trials), self.times_s, HOST.unknown)


def cpu_book() -> Book:
    book = Book()
    for setting, rate in (("float32 512", 1e12), ("float32 1024", 2e12), ("bfloat16 512", 9e12)):
        book.rate("cpu", "matrix", setting, "FLOP/s", rate)
    book.rate("cpu", "block", "float32 1", "FLOP/s", 1.5e12)
    book.rate("cpu", "memory", "copy", "B/s", 200e9)
    for threads, rate in ((1, 0.3e9), (16, 2e9)):
        book.rate("cpu", "update", f"AdamW, {threads} threads", "1/s", rate)
    book.line("cpu>cpu", "gloo", "", 90e-6, 2e9)
    book.line("cpu>cpu", "gloo sum", "", 900e-6, 0.5e9)
    book.line("cpu>cpu", "shared memory", "", 50e-6, 4e9)
    book.line("cpu>cpu", "memory sum", "", 400e-6, 1e9)
    book.add("cpu>cpu", "shared memory", "beside compute", SIZES[-1], "B/s", 2 * (50e-6 + SIZES[-1] / 4e9))
    book.add("cpu>cpu", "compute", "alone", 1, "s", 1e-3)
    book.add("cpu>cpu", "compute", "beside messages", 1, "s", 1.5e-3)
    book.rate("disk", "read", "32 MiB", "B/s", 3e9)
    book.rate("disk", "write", "32 MiB", "B/s", 1e9)
    return book


def add_gpu(book: Book, name: str, *, both_factor: float = 1.1) -> GpuFacts:
    for setting, rate in (("float32 4096", 50e12), ("float16 4096", 600e12), ("bfloat16 4096", 700e12)):
        book.rate(name, "matrix", setting, "FLOP/s", rate)
    book.rate(name, "block", "float16 8", "FLOP/s", 100e12)
    book.rate(name, "block", "bfloat16 8", "FLOP/s", 350e12)
    book.rate(name, "memory", "copy", "B/s", 4e12)
    book.rate(name, "update", "AdamW", "1/s", 100e9)
    for subject, rate in ((f"cpu>{name}", 55e9), (f"{name}>cpu", 50e9)):
        book.line(subject, "copy", "pinned", 8e-6, rate)
        book.line(subject, "copy", "pageable", 12e-6, rate / 5)
    alone = 8e-6 + SIZES[-1] / 50e9
    book.add(f"cpu<>{name}", "copy", "both ways", 2 * SIZES[-1], "B/s", both_factor * alone)
    book.add(f"cpu<>{name}", "compute", "alone", 1, "s", 1e-3)
    book.add(f"cpu<>{name}", "compute", "beside copies", 1, "s", 1.05e-3)
    book.add(f"cpu<>{name}", "copy", "beside compute", SIZES[-1], "B/s", 1.2 * (8e-6 + SIZES[-1] / 55e9))
    return GpuFacts(name, "nvidia-h200", 140 << 30, 138 << 30, 600 << 20)


@pytest.fixture
def make_cpu_book() -> Callable[[], Book]:
    return cpu_book


@pytest.fixture
def make_gpu() -> Callable[..., GpuFacts]:
    return add_gpu
