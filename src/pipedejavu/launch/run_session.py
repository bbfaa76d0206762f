"""A training run from its folder to its result, on any backend: open, run, switch plans, gather.

lock the folder ─▶ predict, create files ─▶ run workers ─▶ gather ─▶ TrainedRun
▲                      │
└──── plan again ◀─────┘ the run switches plans
"""

from contextlib import ExitStack

from pipedejavu.analysis import verify
from pipedejavu.analysis.mapped_memory import mapped_bytes
from pipedejavu.facts import write_file
from pipedejavu.facts.printable import tell
from pipedejavu.launch.backend import Backend, RunSetup
from pipedejavu.launch.handover import RunForecast
from pipedejavu.launch.launch import ProcessBackend
from pipedejavu.launch.own_process import OwnProcessBackend, is_for_own_process
from pipedejavu.launch.planned_run import plan_run
from pipedejavu.launch.resume import check_fingerprints
from pipedejavu.launch.torchrun import TorchrunBackend
from pipedejavu.launch.trained import TrainedRun, gather
from pipedejavu.planner.replan import PlanSwitch
from pipedejavu.program import Program
from pipedejavu.run.disk_space import check_disk_space
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.run_lock import lock_run, noted
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.simulate import Prediction, check_fit, simulate
from pipedejavu.source.fingerprint import fingerprints_to_save
from pipedejavu.source.task import Prepared


def train(options: TrainOptions, program: Program, run_dir: str, start: RunStart | None = None) -> TrainedRun:
    """Runs a program to the end with one process per worker; raises the error of the first worker that fails.

    With a `start` the run in the folder goes on from there.
    """
    trained = train_rank(options, program, run_dir, RankGroup(), start)
    assert trained is not None
    return trained


def train_rank(
    options: TrainOptions,
    program: Program,
    run_dir: str,
    ranks: RankGroup,
    start: RunStart | None = None,
    prepared: Prepared | None = None,
) -> TrainedRun | None:
    """Runs a program to the end on the backend of a group of ranks; returns the result on the first, None elsewhere.

    `prepared` is the model that was built for planning, which a worker of this process trains.
    """
    backend = backend_of(ranks)
    if not ranks.is_launched and is_for_own_process(program):
        backend = OwnProcessBackend(prepared)
    return RunSession(RunFolder(run_dir), backend, RunSetup(options, program, start)).train()


def backend_of(ranks: RankGroup) -> Backend:
    """Returns the backend of a group: its own ranks if torchrun started them, else new processes on this host."""
    return TorchrunBackend(ranks) if ranks.is_launched else ProcessBackend()


class RunSession:
    """One training run in its folder; only the first rank writes there."""

    def __init__(self, folder: RunFolder, backend: Backend, setup: RunSetup):
        self.folder, self.backend, self.setup = folder, backend, setup

    def train(self) -> TrainedRun | None:
        """Trains to the end; returns the result on the first rank, None on the others."""
        is_first = self.backend.ranks.is_first
        with ExitStack() as stack:
            if is_first:
                stack.enter_context(lock_run(self.folder.path))
            prediction = self._open()
            if is_first:
                stack.enter_context(noted(self.folder))
            while switch := self._run(prediction):
                self._switch(switch)
                prediction = self._open()
            results = self.backend.finish(self.folder)
            if prediction is None:
                return None
            return gather(self.folder, self.setup.options, self.setup.program, prediction, results)

    def _open(self) -> Prediction | None:
        """Predicts the run and creates its folder, on the first rank."""
        if not self.backend.ranks.is_first:
            return None
        options, program, start = self.setup
        prediction = simulate(program, verify(program))
        check_fit(prediction, mapped_bytes(program).gpus)
        check_disk_space(self.folder, program.profile, bool(options.checkpoint_every), tell)
        self.folder.create(options, program, start, fingerprints_to_save(options, start))
        write_file(self.folder.predicted, prediction.timeline().to_json(indent=None))
        return prediction

    def _run(self, prediction: Prediction | None) -> bytes:
        """Runs the workers; returns the switch to another plan, or nothing at the end of the run."""
        self.setup = self.backend.prepare(self.folder, self.setup)
        return self.backend.run(self.folder, self.setup, RunForecast.of(prediction) if prediction else None)

    def _switch(self, switch_json: bytes) -> None:
        """Plans the rest of the run, from its newest checkpoint, under the plan that it switches to."""
        options, program, _ = self.setup
        ranks, switch, start_json = self.backend.ranks, PlanSwitch.from_json(switch_json), b""
        if ranks.is_first:
            checkpoint = self.folder.checkpoint_dir.newest(tell)
            self.folder.checkpoint_dir.collect()
            start = RunStart.after(checkpoint, check_fingerprints(checkpoint, options, tell) if checkpoint else {})
            self.folder.add_metrics(switch.row(program.plan.name, start.step))
            start_json = start.to_json().encode()
        start = RunStart.from_json(ranks.broadcast(start_json))
        planned = plan_run(options, switch.plan, switch.machine, ranks=ranks, start=start, profile=switch.profile)
        self.setup = RunSetup(planned.options, planned.program, start)
