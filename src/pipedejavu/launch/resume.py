"""A run that goes on: what its folder holds, what may be asked anew, and whether its plan is still the same."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from pipedejavu.facts import InputError, Machine, Profile
from pipedejavu.launch.rank_group import RankGroup
from pipedejavu.plan import Plan
from pipedejavu.planner.replan import PlanSwitch
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.run_lock import lock_run
from pipedejavu.run.saved_facts import check_finite, saved_in
from pipedejavu.run.settings import read_settings
from pipedejavu.source.fingerprint import describe_changes, read_fingerprints
from pipedejavu.store import Checkpoint

CHANGEABLE = {
    "steps", "lr", "clip_norm", "on_nan", "max_consecutive_skips", "on_oom", "checkpoint_every", "hang_after_s", "log",
    "replan",
}  # fmt: skip
"""Options that a run may go on with other values of."""


class Known(NamedTuple):
    """What a run was started with."""

    options: TrainOptions
    plan: Plan
    profile: Profile
    machine: Machine
    switch: PlanSwitch | None = None
    """The plan that it was to go on with when it ended."""


@dataclass(frozen=True)
class Resumed:
    """A run's folder, where to go on, and what the run was started with, which the first rank alone knows."""

    folder: RunFolder
    start: RunStart
    known: Known | None = None

    def __str__(self) -> str:
        if self.start.step:
            return f"training goes on behind step {self.start.step}"
        return f"{self.folder.path} holds no checkpoint: training begins"

    def options(self, asked: TrainOptions, given: Collection[str]) -> TrainOptions:
        """Returns the run's own options, with those that were `given` anew; raises InputError if one cannot change."""
        assert self.known is not None
        own = self.known.options
        for name in sorted({"model", *given} & type(own).model_fields.keys() - CHANGEABLE):
            before, now = getattr(own, name), getattr(asked, name)
            if name == "keeps_log" and now:
                raise InputError("--audit replays a run from its beginning; leave it out with --resume")
            if before != now:
                raise InputError(
                    f"the run in {self.folder.path} was started with {name} {before}, not {now}; leave it as it was"
                )
        return own.replace(keeps_log=False, **{name: getattr(asked, name) for name in CHANGEABLE & {*given}})

    def is_done(self, options: TrainOptions) -> bool:
        """Whether the run has made its steps; weights that it did not come to write are taken from its checkpoint."""
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
    """Returns where the run in a folder goes on, on all ranks alike, or None if it holds none.

    Restores what is damaged, removes what was never finished, and tells the user. Raises InputError, and removes
    nothing, if the model's source or the data are not what the checkpoint was made with, unless that is accepted; or if
    the run has held checkpoints and none of them can be used, unless it may begin at step 0.
    """
    folder = RunFolder(run_dir)
    if not ranks.is_first:
        text = ranks.share(b"")
        return Resumed(folder, RunStart.from_json(text)) if text else None
    with lock_run(folder.path):
        if not folder.holds_run:
            ranks.share(b"")
            tell(f"{run_dir} holds no run: training begins")
            return None
        found = folder.checkpoint_dir.newest(tell, allow_restart=allow_restart)
        if found:
            check_finite(found, folder.checkpoint_dir)
        settings = read_settings(folder.path, found, tell, accept_changes)
        start = RunStart.after(
            found, check_fingerprints(found, settings.options, tell, accept_changes) if found else {}
        )
        folder.checkpoint_dir.collect()
    ranks.share(start.to_json().encode())
    switch = PlanSwitch.load(folder.switch) if folder.switch.exists() else None
    return Resumed(folder, start, Known(*settings, switch))


def check_fingerprints(
    checkpoint: Checkpoint, options: TrainOptions, tell: Callable[[str], None], accept_changes: bool = False
) -> dict[str, str]:
    """Returns the fingerprints of the model's source and the data; raises InputError if they are not a checkpoint's."""
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


def is_same_plan(asked: Plan, known: Plan) -> bool:
    """Whether a run's plan is what is asked; what is not asked was decided when the run started."""
    place = asked.place.replace(devices=asked.place.devices or known.place.devices)
    feed = asked.feed.replace(shares=known.feed.shares if asked.feed.shares is None else asked.feed.shares)
    cut = asked.cut.replace(bounds=asked.cut.bounds or known.cut.bounds)
    reduce = asked.reduce.replace(clip=known.reduce.clip if asked.reduce.clip == "none" else asked.reduce.clip)
    settled = {"place": place, "feed": feed, "cut": cut, "reduce": reduce}
    return asked.replace(steps=known.steps, decisions=known.decisions, **settled) == known
