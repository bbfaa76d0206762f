"""A run that goes on: what its folder holds, what may be asked anew, and whether its plan is still the same."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from pipedejavu.facts import InputError, Machine, Profile
from pipedejavu.plan import Plan
from pipedejavu.store import Checkpoint
from pipedejavu.train.fingerprint import describe_changes, read_fingerprints
from pipedejavu.train.folder import RunFolder, Start
from pipedejavu.train.hold import hold
from pipedejavu.train.options import TrainOptions
from pipedejavu.train.replan import Switch
from pipedejavu.train.saved import check_finite, saved_in
from pipedejavu.train.seal import read_settings
from pipedejavu.train.team import Team

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
    switch: Switch | None = None
    """The plan that it was to go on with when it ended."""


@dataclass(frozen=True)
class Resumed:
    """A run's folder, where to go on, and what the run was started with, which the first rank alone knows."""

    folder: RunFolder
    start: Start
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
        return own.but(keeps_log=False, **{name: getattr(asked, name) for name in CHANGEABLE & {*given}})

    def is_done(self, options: TrainOptions) -> bool:
        """Whether the run has made its steps; weights that it did not come to write are taken from its checkpoint."""
        if self.start.step < options.steps:
            return False
        if not self.folder.model.exists():
            checkpoint = Checkpoint(self.folder.shelf.folder(self.start.step))
            names = [*checkpoint.names("weight/"), *checkpoint.names("buffer/")]
            self.folder.write_model({name.partition("/")[2]: checkpoint.tensor(name) for name in names})
        return True


def reopen(
    run_dir: str,
    team: Team,
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
    if not team.is_first:
        text = team.share(b"")
        return Resumed(folder, Start.from_json(text)) if text else None
    with hold(folder.path):
        if not folder.holds_run:
            team.share(b"")
            tell(f"{run_dir} holds no run: training begins")
            return None
        found = folder.shelf.newest(tell, allow_restart=allow_restart)
        if found:
            check_finite(found, folder.shelf)
        settings = read_settings(folder.path, found, tell, accept_changes)
        start = Start.after(found, check_fingerprints(found, settings.options, tell, accept_changes) if found else {})
        folder.shelf.collect()
    team.share(start.to_json().encode())
    switch = Switch.load(folder.switch) if folder.switch.exists() else None
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
    place = asked.place.but(devices=asked.place.devices or known.place.devices)
    feed = asked.feed.but(shares=known.feed.shares if asked.feed.shares is None else asked.feed.shares)
    cut = asked.cut.but(bounds=asked.cut.bounds or known.cut.bounds)
    reduce = asked.reduce.but(clip=known.reduce.clip if asked.reduce.clip == "none" else asked.reduce.clip)
    settled = {"place": place, "feed": feed, "cut": cut, "reduce": reduce}
    return asked.but(steps=known.steps, decisions=known.decisions, **settled) == known
