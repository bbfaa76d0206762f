"""A survey: measures everything about this machine, in rounds, until its time is up."""

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
from pipedejavu.probe.compute import ComputeDevice, compute_trials
from pipedejavu.probe.disk_speed import disk_trials
from pipedejavu.probe.host import free_memory_bytes, read_host
from pipedejavu.probe.link import copy_trials, peer_trials
from pipedejavu.probe.other_load import OtherLoad
from pipedejavu.probe.pair import Pair
from pipedejavu.probe.series import Report, TimedTrial, run_rounds
from pipedejavu.probe.survey_result import Circumstances, Findings, GpuFacts, build_machine
from pipedejavu.runtime.device_memory import DeviceMemory

TIME_S, QUICK_TIME_S = 42.0, 15.0
"""Duration of a survey, without the import of torch."""
BUSY = 0.1
"""Share of the cores that others keep busy above which a survey reports that it was disturbed."""


def measure_machine(folder: Path, *, quick: bool = False, report: Report = lambda *_: None) -> Machine:
    """Measures this machine, with disk trials in `folder`; what cannot be measured is listed as unknown."""
    start = time.perf_counter()
    report("looking around", 0.0)
    host, free, unknown = read_host(), [free_memory_bytes()], list[str]()
    unknown += host.unknown
    others = OtherLoad(host.cores)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with ExitStack() as stack:
        threads = max(1, host.cores // 2)
        pair = stack.enter_context(Pair(threads))
        pairs = [pair, *(stack.enter_context(Pair(threads, uses_nccl=True)) for _ in range(count >= 2))]
        gpus = _open_gpus(count, unknown)
        devices = [ComputeDevice("cpu", torch.device("cpu"), free[0], threads=host.cores), *gpus]
        trials = [trial for probed in devices for trial in compute_trials(probed)]
        trials += [trial for probed in gpus for trial in copy_trials(probed)] + peer_trials(gpus)
        report("starting two processes", 0.0)
        for each in pairs:
            try:
                each.wait()
                trials += each.trials()
            except (RuntimeError, OSError) as error:
                unknown.append(f"messages between processes{' with NCCL' * each.uses_nccl}: {error}")
        trials += _on_disk(stack, folder, unknown)
        facts = tuple(_gpu_facts(probed, pair, unknown) for probed in gpus)
        rounds = run_rounds(trials, (QUICK_TIME_S if quick else TIME_S) - (time.perf_counter() - start), report)
    for probed in devices:
        probed.clear()
    free.append(free_memory_bytes())
    unknown += [f"{name}: {why}" for name, why in rounds.left_out.items()]
    disturbance = describe_disturbance(others.busy_cores(), host.cores)
    findings = Findings(host, facts, tuple(free), tuple(trials), rounds.times_s, tuple(unknown), disturbance)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return build_machine(
        platform.node() or "here", findings, Circumstances(date, read_versions(), time.perf_counter() - start)
    )


def describe_disturbance(busy_cores: float | None, cores: int) -> str:
    """Returns a sentence if other processes kept this host busy; empty if not, or if that is unknown."""
    if busy_cores is None or busy_cores <= BUSY * cores:
        return ""
    return (
        f"other processes kept {busy_cores:.1f} of its {cores} cores busy during the survey, so times are too long and"
        " forecasts may rank plans wrongly; measure again when it is at rest"
    )


def _open_gpus(count: int, unknown: list[str]) -> list[ComputeDevice]:
    """Opens a context on each GPU; returns the GPUs that can be used."""
    gpus = []
    for n in range(count):
        try:
            gpus.append(ComputeDevice(f"gpu{n}", torch.device("cuda", n), _open(n)))
        except RuntimeError as error:
            unknown.append(f"gpu{n}: {str(error).splitlines()[0]}")
    return gpus


def _open(gpu: int) -> int:
    """Opens a context on a GPU; returns the bytes that this process may take of it afterwards."""
    side = torch.ones(8, 8, device=f"cuda:{gpu}")
    side @ side  # matrix libraries allocate a workspace
    torch.cuda.synchronize(gpu)
    return DeviceMemory(torch.device("cuda", gpu)).limit_bytes()


def _gpu_facts(probed: ComputeDevice, pair: Pair, unknown: list[str]) -> GpuFacts:
    """Returns a GPU's facts from its driver, and the memory that the context of one more process takes."""
    index = probed.device.index
    context: int | None = None
    total = torch.cuda.get_device_properties(index).total_memory
    try:
        before, _ = torch.cuda.mem_get_info(index)
        pair.open_context(index)
        after, _ = torch.cuda.mem_get_info(index)
        context = before - after if after < before else None
    except (RuntimeError, OSError) as error:
        unknown.append(f"{probed.name} memory context: {error}")
    kind = re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name(index).lower()).strip("-")
    return GpuFacts(probed.name, kind, int(total), min(probed.free_bytes, int(total)), context)


def _on_disk(stack: ExitStack, folder: Path, unknown: list[str]) -> list[TimedTrial]:
    """Returns the trials of a folder's disk; their file is removed when the survey ends."""
    try:
        where = stack.enter_context(tempfile.TemporaryDirectory(prefix=".pipedejavu-", dir=folder))
    except OSError as error:
        unknown.append(f"disk: {folder} cannot be written ({error.strerror})")
        return []
    return disk_trials(Path(where) / "probe.bin")


def read_versions() -> dict[str, str]:
    """Returns the versions of the software involved, as far as they are known."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text("utf-8", errors="replace") if os.access(driver, os.R_OK) else ""
    if number := re.search(r"\b(\d+\.\d+[.\d]*)\b", text):
        versions["driver"] = number[1]
    return versions
