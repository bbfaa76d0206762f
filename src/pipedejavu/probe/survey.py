"""A survey: everything that is measured of this machine, in rounds that go on until its time is over."""

import os
import platform
import re
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import torch

from pipedejavu.facts import Machine
from pipedejavu.probe.compute import Place, compute_trials
from pipedejavu.probe.disk import disk_trials
from pipedejavu.probe.host import free_memory_bytes, read_host
from pipedejavu.probe.link import copy_trials, peer_trials
from pipedejavu.probe.pair import Pair
from pipedejavu.probe.result import Circumstances, Findings, GpuFacts, build_machine
from pipedejavu.probe.series import Report, Trial, run_rounds

TIME_S, QUICK_TIME_S = 48.0, 15.0
"""How long a survey takes, beside the import of torch."""


def measure_machine(folder: Path, *, quick: bool = False, report: Report = lambda *_: None) -> Machine:
    """Measures this machine; `folder` is where the disk is tried. What cannot be measured is noted as unknown."""
    start = time.perf_counter()
    report("looking around", 0.0)
    host, free, unknown = read_host(), [free_memory_bytes()], list[str]()
    unknown += host.unknown
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [Place(f"gpu{n}", torch.device("cuda", n), _open(n)[0]) for n in range(count)]
    places = [Place("cpu", torch.device("cpu"), free[0], threads=host.cores), *gpus]
    trials = [trial for place in places for trial in compute_trials(place)]
    trials += [trial for place in gpus for trial in copy_trials(place)] + peer_trials(gpus)
    with ExitStack() as stack:
        report("starting two processes", 0.0)
        pair = _start_pair(stack, count, host.cores, unknown)
        trials += pair.trials() if pair else []
        trials += _on_disk(stack, folder, unknown)
        facts = tuple(_gpu_facts(place, pair, unknown) for place in gpus)
        rounds = run_rounds(trials, (QUICK_TIME_S if quick else TIME_S) - (time.perf_counter() - start), report)
    for place in places:
        place.clear()
    free.append(free_memory_bytes())
    unknown += [f"{name}: {why}" for name, why in rounds.left_out.items()]
    found = Findings(host, facts, tuple(free), tuple(trials), rounds.times_s, tuple(unknown))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return build_machine(
        platform.node() or "here", found, Circumstances(date, read_versions(), time.perf_counter() - start)
    )


def _open(gpu: int) -> tuple[int, int]:
    """Returns the free and the total bytes of a GPU, once this process has a context there."""
    side = torch.ones(8, 8, device=f"cuda:{gpu}")
    side @ side  # the libraries of matrix products have memory of their own
    torch.cuda.synchronize(gpu)
    free, total = torch.cuda.mem_get_info(gpu)
    return int(free), int(total)


def _gpu_facts(place: Place, pair: Pair | None, unknown: list[str]) -> GpuFacts:
    """Returns what the driver states of a GPU, and how much memory falls away when one more process uses it."""
    index = place.device.index
    context: int | None = None
    total = torch.cuda.get_device_properties(index).total_memory
    try:
        if pair is None:
            raise RuntimeError("there is no second process")
        before, _ = torch.cuda.mem_get_info(index)
        pair.open_context(index)
        after, _ = torch.cuda.mem_get_info(index)
        context = max(0, before - after)
    except RuntimeError as error:
        unknown.append(f"{place.name} memory context: {error}")
    kind = re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name(index).lower()).strip("-")
    return GpuFacts(place.name, kind, int(total), min(place.free_bytes, int(total)), context)


def _start_pair(stack: ExitStack, num_gpus: int, cores: int, unknown: list[str]) -> Pair | None:
    try:
        pair = stack.enter_context(Pair(num_gpus, threads=max(1, cores // 2)))
        pair.wait()
    except (RuntimeError, OSError) as error:
        unknown.append(f"messages between processes: {error}")
        return None
    return pair


def _on_disk(stack: ExitStack, folder: Path, unknown: list[str]) -> list[Trial]:
    """Returns the trials of the disk under a folder; their file goes when the survey ends."""
    try:
        where = stack.enter_context(tempfile.TemporaryDirectory(prefix=".pipedejavu-", dir=folder))
    except OSError as error:
        unknown.append(f"disk: {folder} cannot be written ({error.strerror})")
        return []
    return disk_trials(Path(where) / "probe.bin")


def read_versions() -> dict[str, str]:
    """Returns the versions of the software that takes part, as far as it states them."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text("utf-8", errors="replace") if os.access(driver, os.R_OK) else ""
    if number := re.search(r"\b(\d+\.\d+[.\d]*)\b", text):
        found["driver"] = number[1]
    return found
