"""Resuming a run: what its folder holds, which options may change, and whether its plan is the same."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from pipedejavu.facts import InputError, Machine, Profile
from pipedejavu.plan import Plan, Precision
from pipedejavu.planner.replan import PlanSwitch
from pipedejavu.run.options import MOST_STEPS, TrainOptions
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.run_lock import lock_run
from pipedejavu.run.saved_facts import check_finite, saved_in
from pipedejavu.run.settings import read_settings
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.source.fingerprint import describe_changes, read_fingerprints
from pipedejavu.store import Checkpoint

CHANGEABLE = {
    "steps", "epochs", "eval_every", "sample", "price", "lr", "clip_norm", "on_nan", "max_consecutive_skips", "on_oom",
    "checkpoint_every", "hang_after_s", "log", "replan", "compile", "data_on",
}  # fmt: skip
"""Options that may change when a run is resumed."""


class Known(NamedTuple):
    """The settings that a run was started with."""

    options: TrainOptions
    plan: Plan
    profile: Profile
    machine: Machine
    switch: PlanSwitch | None = None
    """The plan that the run was switching to when it ended."""


@dataclass(frozen=True)
class Resumed:
    """A run's folder, the step to go on from, and on the first rank the settings that it was started with."""

    folder: RunFolder
    start: RunStart
    known: Known | None = None

    def __str__(self) -> str:
        if self.start.step:
            return f"training goes on after step {self.start.step}"
        return f"{self.folder.path} holds no checkpoint: training begins"

    def options(self, requested: TrainOptions, names: Collection[str], *, is_launched: bool = False) -> TrainOptions:
        """Returns the run's options with those in `names` as requested; raises InputError if one may not change.

        A launcher repeats its command when it restarts a run, so an audit that is no longer possible is left out then.
        """
        assert self.known is not None
        saved = self.known.options
        if requested.keeps_log and not is_launched:
            raise InputError("--audit replays a run from its beginning; leave it out with --resume")
        if "steps" in names:  # it replaces the number of epochs
            saved = saved.replace(epochs=None)
        for name in sorted({"model", *names} & type(saved).model_fields.keys() - CHANGEABLE - {"keeps_log"}):
            before, now = getattr(saved, name), getattr(requested, name)
            if before != now:
                raise InputError(
                    f"the run in {self.folder.path} was started with {name} {before}, not {now}; leave it as it was"
                )
        if "epochs" in names and requested.epochs != saved.epochs:  # the number of steps follows from it
            saved = saved.replace(steps=MOST_STEPS)
        return saved.replace(keeps_log=False, **{name: getattr(requested, name) for name in CHANGEABLE & {*names}})

    def is_done(self, options: TrainOptions) -> bool:
        """Whether the run has made all its steps; writes its weights from its checkpoint if they are missing."""
        if self.start.step < options.steps:
            return False
        if not self.folder.model.exists():
            checkpoint = Checkpoint(self.folder.checkpoint_dir.folder(self.start.step))
            names = [*checkpoint.names("weight/"), *checkpoint.names("buffer/")]
            self.folder.write_model({name.partition("/")[2]: checkpoint.tensor(name) for name in names})
        return True


def reopen(
    run_dir: str,
    ranks: RankGroup,
    tell: Callable[[str], None],
    *,
    accept_changes: bool = False,
    allow_restart: bool = False,
) -> Resumed | None:
    """Returns where the run in a folder goes on, on all ranks, or None if the folder holds no run.

    Restores damaged settings, removes unfinished files, and tells the user. Raises InputError, and removes nothing, if
    the model's source or the data have changed since the checkpoint, unless `accept_changes`; or if the run had
    checkpoints and none can be used, unless `allow_restart`.
    """
    folder = RunFolder(run_dir)
    if not ranks.is_first:
        text = ranks.broadcast(b"")
        return Resumed(folder, RunStart.from_json(text)) if text else None
    with lock_run(folder.path):
        if not folder.holds_run:
            ranks.broadcast(b"")
            tell(f"{run_dir} holds no run: training begins")
            return None
        checkpoint, fingerprints = folder.checkpoint_dir.newest(tell, allow_restart=allow_restart), {}
        if checkpoint:
            check_finite(checkpoint, folder.checkpoint_dir)
        settings = read_settings(folder.path, checkpoint, tell, accept_changes)
        if checkpoint:
            fingerprints = check_fingerprints(checkpoint, settings.options, tell, accept_changes)
        start = RunStart.after(checkpoint, fingerprints)
        folder.checkpoint_dir.collect()
    ranks.broadcast(start.to_json().encode())
    switch = PlanSwitch.load(folder.switch) if folder.switch.exists() else None
    return Resumed(folder, start, Known(*settings, switch))


def check_fingerprints(
    checkpoint: Checkpoint, options: TrainOptions, tell: Callable[[str], None], accept_changes: bool = False
) -> dict[str, str]:
    """Returns the fingerprints of the model's source and the data; raises InputError if a checkpoint has others."""
    before, now = saved_in(checkpoint).fingerprints, read_fingerprints(options)
    if before is None:
        tell(
            f"the checkpoint of step {checkpoint.step} is of an earlier version, which kept no fingerprints: whether"
            " the model's source or the data have changed is not known"
        )
    changes = "; ".join(describe_changes(before or {}, now))
    if changes and not accept_changes:
        raise InputError(
            f"since the checkpoint of step {checkpoint.step} was written there have been changes: {changes}; put back"
            " what was there, or go on with --accept-changes"
        )
    if changes:
        tell(f"changes since the checkpoint of step {checkpoint.step} are accepted: {changes}")
    return now


def is_same_plan(requested: Plan, known: Plan) -> bool:
    """Whether a requested plan is the run's plan; what the request leaves open was decided when the run started."""
    place = requested.place.replace(devices=requested.place.devices or known.place.devices)
    feed = requested.feed.replace(shares=known.feed.shares if requested.feed.shares is None else requested.feed.shares)
    cut = requested.cut.replace(bounds=requested.cut.bounds or known.cut.bounds)
    reduce = requested.reduce.replace(
        clip=known.reduce.clip if requested.reduce.clip == "none" else requested.reduce.clip
    )
    precision = known.precision if requested.precision == Precision() else requested.precision
    settled = {"place": place, "feed": feed, "cut": cut, "reduce": reduce, "is_compiled": known.is_compiled}
    settled["precision"] = precision
    settled["first_update"] = known.first_update
    return requested.replace(steps=known.steps, decisions=known.decisions, **settled) == known
