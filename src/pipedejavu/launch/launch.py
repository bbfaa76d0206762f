"""`train`: plans a run, predicts it, starts its workers or is one of them, and gathers what they leave."""

import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from safetensors.torch import load, load_file
from torch._C._distributed_c10d import PrefixStore, Store
from torch.multiprocessing.spawn import start_processes

from pipedejavu.analysis import verify
from pipedejavu.engine import Byzantine, check_runnable
from pipedejavu.engine.log_check import check_replayable
from pipedejavu.facts import InputError, Link, Machine, MemoryFile, Profile, write_file
from pipedejavu.facts.printable import tell
from pipedejavu.health.failure import ShortageError, WorkerError, read_failure, with_rest
from pipedejavu.health.watchdog import HeartbeatMonitor, HeartbeatPage
from pipedejavu.launch.loopback_store import serve_store
from pipedejavu.launch.measure_plan import measure_messages, measure_plan
from pipedejavu.launch.rank_group import RankGroup
from pipedejavu.launch.resume import check_fingerprints
from pipedejavu.launch.run_check import check_run
from pipedejavu.launch.trained import TrainedRun, gather
from pipedejavu.launch.worker import Rank, WorkerLaunch, work
from pipedejavu.plan import Plan
from pipedejavu.planner.replan import PlanSwitch, check_replan, relieve
from pipedejavu.planner.worker_host import DeviceChoice, describe_stand_ins, make_machine, read_worker_hosts
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.run.checkpoint_interval import choose_interval, steps_of
from pipedejavu.run.disk_space import check_disk_space
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.run_lock import lock_run, noted
from pipedejavu.run.stop_signal import GRACE_S, STOPPED, on_stop, stopped
from pipedejavu.run.worker_result import WorkerResult
from pipedejavu.simulate import Prediction, check_fit, simulate
from pipedejavu.source.fingerprint import fingerprints_to_save
from pipedejavu.source.hf_model import check_data
from pipedejavu.source.task import Prepared, prepare
from pipedejavu.store import CheckpointDir

REMEDY = "--resume --on-oom replan goes on with such a plan"
LOOK_S = 1.0
"""How often the launcher looks whether the time of grace of its workers is over."""


class PlannedRun(NamedTuple):
    """A run that is ready to start."""

    options: TrainOptions
    program: Program
    note: str
    """Where workers run other than the plan says, how often the run is saved, and what the model check could not see;
    may be empty."""


def plan_run(
    options: TrainOptions,
    plan: Plan,
    machine: Machine | None = None,
    *,
    devices: DeviceChoice = "auto",
    ranks: RankGroup | None = None,
    start: RunStart | None = None,
    profile: Profile | None = None,
) -> PlannedRun:
    """Measures the model on the devices that the plan uses and compiles the plan; all ranks of a team do so together.

    A plan whose workers do not wait for each other becomes one program up to the next checkpoint; any other a program
    of one update, which the run repeats. With a `profile` nothing is measured, and the machine is that of the profile.
    """
    ranks = ranks or RankGroup()
    options = TrainOptions.from_json(ranks.share(options.to_json().encode()))
    start = start or RunStart()
    if options.model.startswith("hf:") and not start.step:
        check_data(options.model.removeprefix("hf:"), options.data, options.weights)
    plan = _adapted(Plan.from_json(ranks.share(plan.to_json().encode())), options, ranks, start)
    known = ranks.share(profile.to_json().encode() if profile else b"")
    worker_hosts = ranks.worker_hosts() or read_worker_hosts(plan.num_workers)
    given = ranks.share(machine.to_json().encode() if machine else b"")
    if given:
        machine = Machine.from_json(given)
        machine = machine.divided(plan.num_workers) if plan.place.devices is None and not known else machine
    else:
        plan, machine = make_machine(plan, worker_hosts, devices)
        if plan.num_workers > 1:  # what messages cost decides who gets how much, and how long a step is
            link = Link.from_json(
                ranks.share(measure_messages(plan, machine).to_json().encode() if ranks.is_first else b"")
            )
            machine = machine.replace(links=(link, *machine.links[1:]))
    names = assign_devices(plan, machine)
    prepared: list[Prepared] = []
    profile = Profile.from_json(known) if known else measure_plan(options, plan, machine, names, ranks, prepared)
    program = compile_plan(plan, profile, machine, fold=False)
    check_runnable(program)
    is_new = not (start and start.step)
    remark = check_run(options, program, ranks, prepared) if options.check_model and is_new else ""
    if options.byzantine:
        Byzantine.parse(options.byzantine).check(program.plan, program.num_replicas)
    every, saves = choose_interval(options, program)
    notes = filter(None, (describe_stand_ins(machine, names, worker_hosts), saves, remark))
    return PlannedRun(options.replace(checkpoint_every=every), program, "\n".join(notes))


def _adapted(plan: Plan, options: TrainOptions, ranks: RankGroup, start: RunStart) -> Plan:
    """Returns the plan with what the options ask of it; raises InputError where it cannot do that."""
    if ranks.is_launched and plan.num_workers != ranks.size:
        raise InputError(
            f"plan '{plan.name}' has {plan.num_workers} workers and torchrun started {ranks.size} processes; start one"
            " for each worker, or change --workers"
        )
    if plan.keep.kind == "shared" and not ranks.is_on_one_host:
        raise InputError(f"plan '{plan.name}' shares weights in the memory of one host; start all its workers there")
    if options.keeps_log:
        check_replayable(plan)
    if options.can_switch:
        check_replan(options, plan)
    if options.on_nan == "skip" and plan.version.kind != "sync":
        raise InputError(
            f"plan '{plan.name}' has no common moment to agree on leaving an update out; use --on-nan stop"
        )
    if (options.clip_norm is not None or options.on_nan == "skip") and plan.reduce.clip == "none":
        plan = plan.replace(reduce=plan.reduce.replace(clip="global"))
    return plan.replace(steps=steps_of(plan, options, start.step))


def train(options: TrainOptions, program: Program, run_dir: str, start: RunStart | None = None) -> TrainedRun:
    """Runs a program to the end with a process of its own for each worker; raises what the first to fail raised.

    With a start the run in the folder goes on from there.
    """
    folder = RunFolder(run_dir)
    with lock_run(folder.path):
        prediction = _open(folder, options, program, start)
        with noted(folder):
            while (results := _train(folder, options, program)) is None:
                options, program, start = _switched(folder, options, program, folder.switch.read_bytes())
                prediction = _open(folder, options, program, start)
            folder.adopt(results[0].facts["pending"])
            return gather(folder, options, program, prediction, results)


def _train(folder: RunFolder, options: TrainOptions, program: Program) -> list[WorkerResult] | None:
    """Runs workers; returns what they leave, or None if the run is to go on with the switch in the folder."""
    try:
        return run_workers(folder, len(program.workers), options.hang_after_s)
    except ShortageError as shortage:
        way = prepare(options.replace(weights=None), program.sizes, program.plan.cut.begins).batches.cut.way
        switch = relieve(program, shortage, None if way == "chain" else program.plan.feed.samples)
        if options.on_oom == "stop":
            raise WorkerError(f"{switch.reason}; {REMEDY}") from None
        tell(f"{switch.reason}: the run goes on with it")
        switch.save(folder.switch)
        return None


def _switched(
    folder: RunFolder, options: TrainOptions, program: Program, text: bytes, ranks: RankGroup | None = None
) -> tuple[TrainOptions, Program, RunStart]:
    """Returns how a run goes on from its newest checkpoint under the plan that it is to switch to."""
    ranks, switch, found = ranks or RankGroup(), PlanSwitch.from_json(text), b""
    if ranks.is_first:
        checkpoint = folder.checkpoint_dir.newest(tell)
        folder.checkpoint_dir.collect()
        start = RunStart.after(checkpoint, check_fingerprints(checkpoint, options, tell) if checkpoint else {})
        folder.add_metrics(switch.row(program.plan.name, start.step))
        found = start.to_json().encode()
    start = RunStart.from_json(ranks.share(found))
    planned = plan_run(options, switch.plan, switch.machine, ranks=ranks, start=start, profile=switch.profile)
    return planned.options, planned.program, start


def train_rank(
    options: TrainOptions, program: Program, run_dir: str, ranks: RankGroup, start: RunStart | None = None
) -> TrainedRun | None:
    """Runs this rank's worker of a program to the end; the first rank gets what all leave, the others None."""
    assert ranks.store is not None
    folder = RunFolder(run_dir)
    with ExitStack() as stack:
        prediction = None
        if ranks.is_first:
            stack.enter_context(lock_run(folder.path))
            prediction = _open(folder, options, program, start)
            stack.enter_context(noted(folder))
        for number in count():
            shared = Path(ranks.share(str(folder.parts.resolve()).encode()).decode())
            options = _seen_by_all(shared, options, ranks, start)
            ranks.checkpoint_dir = CheckpointDir(shared.parent / folder.checkpoint_dir.path.name)
            board, watchdog = PrefixStore(f"watch{number}", ranks.store), ranks.keep_vigil(options)
            begun = folder.start() if ranks.is_first else start or RunStart()
            run = Rank(options, program, board, folder, begun, watchdog, keeps_workers=True)
            try:
                result = run.run(ranks.checkpoint_dir)
            except ShortageError as shortage:
                raise _explained(shortage, run, shared) from None
            except WorkerError as error:
                raise WorkerError(with_rest(str(error), ranks.checkpoint_dir.steps())) from None
            is_asked = ranks.is_first and run.is_stopped and not run.stop_signal.number and folder.switch.exists()
            switch = ranks.share(folder.switch.read_bytes() if is_asked else b"")
            if not switch:
                break
            options, program, start = _switched(folder, options, program, switch, ranks)
            prediction = _open(folder, options, program, start) if ranks.is_first else None
        packed = ranks.collect(result.pack())
        ranks.part()
        if run.is_stopped:
            raise stopped(folder, run.stop_signal.number or signal.SIGTERM)
        if prediction is None:
            return None
        results = [WorkerResult.unpack(load(data)) for data in packed]
        return gather(folder, options, program, prediction, results)


def _explained(shortage: ShortageError, run: Rank, shared: Path) -> WorkerError:
    """Returns what to raise where a rank has no more memory; it leaves the plan that the next start takes."""
    program = run.program
    switch = relieve(program, shortage, run.given_samples, len(program.workers))
    if run.options.on_oom == "stop":
        return WorkerError(f"{switch.reason}; {REMEDY}")
    switch.save(shared / run.folder.switch.name)
    return WorkerError(f"{switch.reason}: the run goes on with it when it is started again")


def _seen_by_all(shared: Path, options: TrainOptions, ranks: RankGroup, start: RunStart | None) -> TrainOptions:
    """Returns the options without checkpoints where some host does not see the run folder; says so."""
    mark = shared / ranks.share(secrets.token_hex(8).encode()).decode()
    if ranks.is_first:
        mark.touch()
    dist.barrier()
    blind = [rank for rank, seen in enumerate(ranks.share_all(b"1" if mark.exists() else b"0")) if seen == b"0"]
    if not blind or not options.checkpoint_every:
        return options
    reason = f"rank {blind[0]} does not see the run folder {shared.parent}, which all hosts must share"
    if start is not None and start.step:
        raise InputError(f"the run cannot go on: {reason}; put --run-dir on a file system of all")
    if ranks.is_first:
        tell(f"no checkpoints: {reason}; put --run-dir on a file system of all")
    return options.replace(checkpoint_every=0, replan=False)


def _open(folder: RunFolder, options: TrainOptions, program: Program, start: RunStart | None) -> Prediction:
    """Predicts the run and makes its folder."""
    prediction = simulate(program, verify(program))
    check_fit(prediction)
    check_disk_space(folder, program.profile, bool(options.checkpoint_every), tell)
    folder.create(options, program, start, fingerprints_to_save(options, start))
    write_file(folder.predicted, prediction.timeline().to_json(indent=None))
    return prediction


@contextmanager
def _patience(size: int) -> Iterator[None]:
    """Lets the threads of several workers that start now sleep between operations, unless the user says otherwise.

    OpenMP's own way is to spin for a while, which takes cores from the other workers and from what they send.
    """
    name = "OMP_WAIT_POLICY"
    is_ours = size > 1 and name not in os.environ
    if is_ours:
        os.environ[name] = "passive"
    try:
        yield
    finally:
        if is_ours:
            del os.environ[name]


def run_workers(
    folder: RunFolder,
    size: int,
    silent_s: float | None = None,
    entry: Callable[[int, int, WorkerLaunch], None] | None = None,
) -> list[WorkerResult] | None:
    """Starts a process for each worker and waits for all; whatever ends the wait ends them too.

    Returns what they leave, or None if the run is to go on under another plan. What they need of each other is in
    memory, so that no disk can refuse it. SIGTERM or SIGHUP lets them end an update and save it, within a time of
    grace; then StoppedError says so. A worker that says nothing for a time ends the run.
    """
    store, page = serve_store(), MemoryFile("heartbeats")
    left = [MemoryFile("result") for _ in range(size)]
    try:
        heartbeat_monitor = HeartbeatMonitor(HeartbeatPage(Path(page.path), size), size, silent_s)
        given = WorkerLaunch(str(folder.path), store.port, page.path, tuple(file.path for file in left))
        with _patience(size):
            context = start_processes(  # type: ignore[no-untyped-call]
                entry or work, args=(size, given), nprocs=size, join=False, start_method="spawn"
            )
        number = _wait(folder, context.processes, store, heartbeat_monitor)
        results = [WorkerResult.unpack(load_file(file.path)) for file in left if file.size_bytes]
    finally:
        for file in (page, *left):
            file.close()
    if number is None:
        return results
    if not number:
        return None
    if results:
        folder.adopt(results[0].facts["pending"])
        folder.write_pending()
    raise stopped(folder, number)


def _wait(folder: RunFolder, processes: Sequence[Any], store: Store, heartbeat_monitor: HeartbeatMonitor) -> int | None:
    """Waits for workers and ends them; returns the signal that stopped them, 0 for a switch of plans, or None."""
    last_s, number = math.inf, 0

    def stop(signalled: int) -> None:
        nonlocal last_s, number
        last_s, number = min(last_s, time.monotonic() + GRACE_S), signalled
        for process in processes:
            process.terminate()

    with on_stop(stop):
        try:
            while True:
                codes = [process.exitcode for process in processes]
                alive = [process.sentinel for process, code in zip(processes, codes, strict=True) if code is None]
                is_signalled = number and not {-signal.SIGTERM, -signal.SIGHUP}.isdisjoint(codes)
                is_stopped = not alive and STOPPED in codes
                if is_stopped and not number and folder.switch.exists():
                    return 0
                if time.monotonic() > last_s or is_signalled or is_stopped:
                    return number or signal.SIGTERM
                if any(code not in (None, 0, STOPPED) for code in codes):
                    raise _failure(folder, store, processes)
                if not alive:
                    return None
                if missed := heartbeat_monitor.missed(rank for rank, code in enumerate(codes) if code is None):
                    raise WorkerError(with_rest(f"{missed}; all others were stopped", folder.checkpoint_dir.steps()))
                wait(alive, LOOK_S)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _failure(folder: RunFolder, store: Store, processes: Sequence[Any]) -> BaseException:
    """Returns what to raise, once processes that end by themselves have had a moment to."""
    last_s = time.monotonic() + 1.0
    for process in processes:
        process.join(max(0.0, last_s - time.monotonic()))
    codes = [process.exitcode for process in processes]
    if -signal.SIGINT in codes:
        return KeyboardInterrupt()
    error = read_failure(store, codes)
    if isinstance(error, ShortageError):
        return error
    return type(error)(with_rest(str(error), folder.checkpoint_dir.steps()))
