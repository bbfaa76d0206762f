"""A run that goes on: what its folder holds, what may be asked anew, and whether its plan is still the same."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from pipedejavu.facts import InputError, Machine, Profile
from pipedejavu.plan import Plan
from pipedejavu.train.folder import RunFolder, Start
from pipedejavu.train.options import TrainOptions
from pipedejavu.train.replan import Switch
from pipedejavu.train.saved import check_finite
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

    def options(self, asked: TrainOptions, given: Collection[str]) -> TrainOptions:
        """Returns the run's own options, with those that were `given` anew; raises InputError where one cannot change.

        Raises InputError where nothing is left to train.
        """
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
        found = own.but(keeps_log=False, **{name: getattr(asked, name) for name in CHANGEABLE & {*given}})
        if self.start.step >= found.steps:
            raise InputError(
                f"the run in {self.folder.path} has made its {self.start.step} steps; ask for more with --steps"
            )
        return found


def reopen(run_dir: str, team: Team, tell: Callable[[str], None], steps: int | None = None) -> Resumed | None:
    """Returns where the run in a folder goes on, on all ranks alike, or None where there is none.

    Removes what was never finished, sets aside what cannot be read, and tells the user. A run without a checkpoint goes
    on from its beginning; one that was ended between its last checkpoint and what it leaves, from the one before.
    `steps` are how many the run is to have, where that is given anew.
    """
    folder = RunFolder(run_dir)
    if not team.is_first:
        text = team.share(b"")
        return Resumed(folder, Start.from_json(text)) if text else None
    if not folder.holds_run:
        team.share(b"")
        tell(f"{run_dir} holds no run: training begins")
        return None
    folder.shelf.collect()
    found = folder.shelf.newest(tell)
    last = steps or folder.options().steps
    if found and found.step >= last and not folder.model.exists():
        found = folder.shelf.newest(tell, before=last)
    if found:
        check_finite(found, folder.shelf)
    start = Start.behind(found)
    tell(f"training goes on behind step {start.step}" if found else f"{run_dir} holds no checkpoint: training begins")
    team.share(start.to_json().encode())
    path = folder.path
    plan, profile = Plan.load(path / "plan.json"), Profile.load(path / "profile.json")
    switch = Switch.load(folder.switch) if folder.switch.exists() else None
    return Resumed(folder, start, Known(folder.options(), plan, profile, Machine.load(path / "machine.json"), switch))


def is_same_plan(asked: Plan, known: Plan) -> bool:
    """Whether a run's plan is what is asked; what is not asked was decided when the run started."""
    place = asked.place.but(devices=asked.place.devices or known.place.devices)
    feed = asked.feed.but(shares=known.feed.shares if asked.feed.shares is None else asked.feed.shares)
    cut = asked.cut.but(bounds=asked.cut.bounds or known.cut.bounds)
    reduce = asked.reduce.but(clip=known.reduce.clip if asked.reduce.clip == "none" else asked.reduce.clip)
    settled = {"place": place, "feed": feed, "cut": cut, "reduce": reduce}
    return asked.but(steps=known.steps, decisions=known.decisions, **settled) == known
