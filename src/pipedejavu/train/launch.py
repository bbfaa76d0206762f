"""`train`: plans a run, predicts it, starts its workers or is one of them, and gathers what they leave."""

import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load, load_file
from torch._C._distributed_c10d import PrefixStore, Store
from torch.multiprocessing.spawn import start_processes

from pipedejavu.engine import Byzantine, check_runnable
from pipedejavu.engine.audit import check_replayable
from pipedejavu.facts import InputError, Link, Machine, MemoryFile, Profile, write_file
from pipedejavu.plan import Plan
from pipedejavu.probe.gloo import measure_link
from pipedejavu.profile import company, merge_profiles
from pipedejavu.program import Program, verify
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.crew import assign_devices
from pipedejavu.simulate import Prediction, check_fit, simulate
from pipedejavu.store import Shelf
from pipedejavu.train.disk import check_room
from pipedejavu.train.failure import ShortageError, WorkerError, read_failure, with_rest
from pipedejavu.train.folder import RunFolder, Start
from pipedejavu.train.halt import GRACE_S, STOPPED, on_stop, stopped
from pipedejavu.train.hold import hold, noted
from pipedejavu.train.hugging import check_data
from pipedejavu.train.interval import choose_interval, steps_of
from pipedejavu.train.loop import say
from pipedejavu.train.loopback import serve_store
from pipedejavu.train.measure import measure
from pipedejavu.train.options import TrainOptions
from pipedejavu.train.replan import Switch, check_replan, relieve
from pipedejavu.train.resume import check_fingerprints
from pipedejavu.train.run_check import check_run
from pipedejavu.train.site import (
    DeviceChoice,
    describe_stand_ins,
    devices_to_measure,
    make_machine,
    num_threads,
    num_threads_beside,
    read_sites,
    torch_device,
)
from pipedejavu.train.task import Prepared, draw, prepare
from pipedejavu.train.team import Team
from pipedejavu.train.trained import Trained, gather
from pipedejavu.train.vigil import Ear, Slate
from pipedejavu.train.worker import Launched, Rank, work
from pipedejavu.train.worker_result import WorkerResult

REMEDY = "--resume --on-oom replan goes on with such a plan"
LOOK_S = 1.0
"""How often the launcher looks whether the time of grace of its workers is over."""


class Planned(NamedTuple):
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
    team: Team | None = None,
    start: Start | None = None,
    profile: Profile | None = None,
) -> Planned:
    """Measures the model on the devices that the plan uses and compiles the plan; all ranks of a team do so together.

    A plan whose workers do not wait for each other becomes one program up to the next checkpoint; any other a program
    of one update, which the run repeats. With a `profile` nothing is measured, and the machine is that of the profile.
    """
    team = team or Team()
    options = TrainOptions.from_json(team.share(options.to_json().encode()))
    start = start or Start()
    if options.model.startswith("hf:") and not start.step:
        check_data(options.model.removeprefix("hf:"), options.data, options.weights)
    plan = _adapted(Plan.from_json(team.share(plan.to_json().encode())), options, team, start)
    known = team.share(profile.to_json().encode() if profile else b"")
    sites = team.sites() or read_sites(plan.num_workers)
    given = team.share(machine.to_json().encode() if machine else b"")
    if given:
        machine = Machine.from_json(given)
        machine = machine.divided(plan.num_workers) if plan.place.devices is None and not known else machine
    else:
        plan, machine = make_machine(plan, sites, devices)
        if plan.num_workers > 1:  # what messages cost decides who gets how much, and how long a step is
            link = Link.from_json(team.share(_measure_link(plan, machine).to_json().encode() if team.is_first else b""))
            machine = machine.but(links=(link, *machine.links[1:]))
    names = assign_devices(plan, machine)
    prepared: list[Prepared] = []
    profile = Profile.from_json(known) if known else _measure(options, plan, machine, names, team, prepared)
    program = compile_plan(plan, profile, machine, fold=False)
    check_runnable(program)
    is_new = not (start and start.step)
    remark = check_run(options, program, team, prepared) if options.check_model and is_new else ""
    if options.byzantine:
        Byzantine.parse(options.byzantine).check(program.plan, program.num_replicas)
    every, saves = choose_interval(options, program)
    notes = filter(None, (describe_stand_ins(machine, names, sites), saves, remark))
    return Planned(options.but(checkpoint_every=every), program, "\n".join(notes))


def _adapted(plan: Plan, options: TrainOptions, team: Team, start: Start) -> Plan:
    """Returns the plan with what the options ask of it; raises InputError where it cannot do that."""
    if team.is_launched and plan.num_workers != team.size:
        raise InputError(
            f"plan '{plan.name}' has {plan.num_workers} workers and torchrun started {team.size} processes; start one"
            " for each worker, or change --workers"
        )
    if plan.keep.kind == "shared" and not team.is_on_one_host:
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
        plan = plan.but(reduce=plan.reduce.but(clip="global"))
    return plan.but(steps=steps_of(plan, options, start.step))


def _measure_link(plan: Plan, machine: Machine) -> Link:
    """Measures messages between workers of this host: in a pipeline one waits for them, and the others compute."""
    names = assign_devices(plan, machine)
    with company(num_threads_beside(machine, names, 0) if plan.pipeline_size > 1 else 0):
        return measure_link()


def _measure(
    options: TrainOptions,
    plan: Plan,
    machine: Machine,
    names: Sequence[str],
    team: Team,
    prepared: list[Prepared],
) -> Profile:
    """Measures the model on each kind of device that the plan uses, where the first worker of that kind is.

    What was prepared for it is left in `prepared`.
    """
    profiles = []
    for kind, (worker, name) in sorted(devices_to_measure(plan, machine, names).items(), key=lambda item: item[1]):
        source, found = worker if team.is_launched else 0, b""
        if team.rank == source:
            torch.set_num_threads(num_threads(machine, names, worker))
            with company(num_threads_beside(machine, names, worker)):
                if not prepared:
                    prepared.append(prepare(options.but(weights=None), (plan.feed.samples,), plan.cut.begins))
                profile = _measure_here(options, plan, {kind: torch_device(machine, name)}, *prepared)
            found = profile.to_json().encode()
        profiles.append(Profile.from_json(team.share(found, source)))
    return merge_profiles(profiles)


def _measure_here(options: TrainOptions, plan: Plan, kinds: dict[str, torch.device], prepared: Prepared) -> Profile:
    job, batches = prepared
    # Whoever plans again must know what does not grow with a microbatch; only a chain is the same units for any size.
    return measure(
        options.model,
        job,
        plan,
        batches.first,
        partial(draw, batches.task.data, options.seed),
        kinds,
        at_more=options.can_switch and batches.cut.way == "chain",
    )


def train(options: TrainOptions, program: Program, run_dir: str, start: Start | None = None) -> Trained:
    """Runs a program to the end with a process of its own for each worker; raises what the first to fail raised.

    With a start the run in the folder goes on from there.
    """
    folder = RunFolder(run_dir)
    with hold(folder.path):
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
        way = prepare(options.but(weights=None), program.sizes, program.plan.cut.begins).batches.cut.way
        switch = relieve(program, shortage, None if way == "chain" else program.plan.feed.samples)
        if options.on_oom == "stop":
            raise WorkerError(f"{switch.reason}; {REMEDY}") from None
        say(f"{switch.reason}: the run goes on with it")
        switch.save(folder.switch)
        return None


def _switched(
    folder: RunFolder, options: TrainOptions, program: Program, text: bytes, team: Team | None = None
) -> tuple[TrainOptions, Program, Start]:
    """Returns how a run goes on from its newest checkpoint under the plan that it is to switch to."""
    team, switch, found = team or Team(), Switch.from_json(text), b""
    if team.is_first:
        checkpoint = folder.shelf.newest(say)
        folder.shelf.collect()
        start = Start.after(checkpoint, check_fingerprints(checkpoint, options, say) if checkpoint else {})
        folder.add_metrics(switch.row(program.plan.name, start.step))
        found = start.to_json().encode()
    start = Start.from_json(team.share(found))
    planned = plan_run(options, switch.plan, switch.machine, team=team, start=start, profile=switch.profile)
    return planned.options, planned.program, start


def train_rank(
    options: TrainOptions, program: Program, run_dir: str, team: Team, start: Start | None = None
) -> Trained | None:
    """Runs this rank's worker of a program to the end; the first rank gets what all leave, the others None."""
    assert team.store is not None
    folder = RunFolder(run_dir)
    with ExitStack() as stack:
        prediction = None
        if team.is_first:
            stack.enter_context(hold(folder.path))
            prediction = _open(folder, options, program, start)
            stack.enter_context(noted(folder))
        for number in count():
            shared = Path(team.share(str(folder.parts.resolve()).encode()).decode())
            options = _seen_by_all(shared, options, team, start)
            team.shelf = Shelf(shared.parent / folder.shelf.path.name)
            board, vigil = PrefixStore(f"watch{number}", team.store), team.keep_vigil(options)
            begun = folder.start() if team.is_first else start or Start()
            run = Rank(options, program, board, folder, begun, vigil, keeps_workers=True)
            try:
                result = run.run(team.shelf)
            except ShortageError as shortage:
                raise _explained(shortage, run, shared) from None
            except WorkerError as error:
                raise WorkerError(with_rest(str(error), team.shelf.steps())) from None
            is_asked = team.is_first and run.is_stopped and not run.halt.number and folder.switch.exists()
            switch = team.share(folder.switch.read_bytes() if is_asked else b"")
            if not switch:
                break
            options, program, start = _switched(folder, options, program, switch, team)
            prediction = _open(folder, options, program, start) if team.is_first else None
        packed = team.collect(result.pack())
        team.part()
        if run.is_stopped:
            raise stopped(folder, run.halt.number or signal.SIGTERM)
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


def _seen_by_all(shared: Path, options: TrainOptions, team: Team, start: Start | None) -> TrainOptions:
    """Returns the options without checkpoints where some host does not see the run folder; says so."""
    mark = shared / team.share(secrets.token_hex(8).encode()).decode()
    if team.is_first:
        mark.touch()
    dist.barrier()
    blind = [rank for rank, seen in enumerate(team.share_all(b"1" if mark.exists() else b"0")) if seen == b"0"]
    if not blind or not options.checkpoint_every:
        return options
    reason = f"rank {blind[0]} does not see the run folder {shared.parent}, which all hosts must share"
    if start is not None and start.step:
        raise InputError(f"the run cannot go on: {reason}; put --run-dir on a file system of all")
    if team.is_first:
        say(f"no checkpoints: {reason}; put --run-dir on a file system of all")
    return options.but(checkpoint_every=0, replan=False)


def _open(folder: RunFolder, options: TrainOptions, program: Program, start: Start | None) -> Prediction:
    """Predicts the run and makes its folder."""
    prediction = simulate(program, verify(program))
    check_fit(prediction)
    check_room(folder, program.profile, bool(options.checkpoint_every), say)
    folder.create(options, program, start)
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
    entry: Callable[[int, int, Launched], None] | None = None,
) -> list[WorkerResult] | None:
    """Starts a process for each worker and waits for all; whatever ends the wait ends them too.

    Returns what they leave, or None if the run is to go on under another plan. What they need of each other is in
    memory, so that no disk can refuse it. SIGTERM or SIGHUP lets them end an update and save it, within a time of
    grace; then StoppedError says so. A worker that says nothing for a time ends the run.
    """
    store, page = serve_store(), MemoryFile("heartbeats")
    left = [MemoryFile("result") for _ in range(size)]
    try:
        ear = Ear(Slate(Path(page.path), size), size, silent_s)
        given = Launched(str(folder.path), store.port, page.path, tuple(file.path for file in left))
        with _patience(size):
            context = start_processes(  # type: ignore[no-untyped-call]
                entry or work, args=(size, given), nprocs=size, join=False, start_method="spawn"
            )
        number = _wait(folder, context.processes, store, ear)
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


def _wait(folder: RunFolder, processes: Sequence[Any], store: Store, ear: Ear) -> int | None:
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
                if missed := ear.missed(rank for rank, code in enumerate(codes) if code is None):
                    raise WorkerError(with_rest(f"{missed}; all others were stopped", folder.shelf.steps()))
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
    return type(error)(with_rest(str(error), folder.shelf.steps()))
