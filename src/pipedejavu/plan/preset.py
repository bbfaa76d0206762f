"""Presets: plans named after published algorithms; presets.toml holds them as data."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import Field

from pipedejavu.facts import InputError, Record, nearest
from pipedejavu.plan.axis import Feed, Place
from pipedejavu.plan.plan import Plan


class Preset(Record):
    """A named plan, and how it grows with the number of workers and microbatches."""

    title: str
    plan: Plan
    grows: Literal["workers", "replicas", "shards", "none"] = "workers"
    """The field of `place` that a number of workers sets."""
    per_update: int | None = Field(default=None, ge=1)
    """Microbatches per update, if the algorithm fixes them."""
    aliases: tuple[str, ...] = ()

    def at(
        self,
        *,
        workers: int | None = None,
        microbatches: int | None = None,
        replicas: int | None = None,
        steps: int | None = None,
        samples: int | None = None,
        trim: int | None = None,
    ) -> Plan:
        """Returns the plan at another size; an argument that is None keeps the preset's value."""
        sizes = {"workers": workers, "microbatches": microbatches, "replicas": replicas, "steps": steps}
        for what, number in {**sizes, "samples": samples}.items():
            if number is not None and number < 1:
                raise InputError(f"the number of {what} must be 1 or more, not {number}")
        place = self._place(workers, replicas)
        feed = self._feed(place.replicas, samples)
        plan = self.plan if trim is None else self._trimmed(trim)
        if microbatches is None:
            return plan.replace(place=place, feed=feed, steps=steps or plan.steps)
        if self.per_update is None:
            feed = feed.replace(microbatches=microbatches)
            return plan.replace(place=place, feed=feed, steps=steps or plan.steps)
        if microbatches % self.per_update:
            raise InputError(
                f"preset '{plan.name}' updates every {self.per_update} microbatches; {microbatches} is not a"
                f" multiple of {self.per_update}"
            )
        return plan.replace(place=place, feed=feed, steps=microbatches // self.per_update * (steps or 1))

    def _place(self, workers: int | None, replicas: int | None) -> Place:
        """Returns the place with so many workers and replicas."""
        plan, place = self.plan, self.plan.place
        if workers is not None and place.stage_replicas and self.grows == "workers":
            raise InputError(
                f"plan '{plan.name}' sets the workers of each stage; change place.stage_replicas, not their number"
            )
        if workers is not None and replicas not in (None, workers) and self.grows == "replicas":
            raise InputError(
                f"preset '{plan.name}' has one worker in each replica; give {workers} workers or {replicas} replicas,"
                " not both"
            )
        if workers is not None and self.grows != "none":
            place = place.replace(**{self.grows: workers})
        elif workers is not None and workers != 1:
            raise InputError(f"preset '{plan.name}' trains on one worker, not {workers}; do not give a number")
        return place if replicas is None else place.replace(replicas=replicas)

    def _feed(self, replicas: int, samples: int | None) -> Feed:
        """Returns the feed with a budget per replica, and with so many samples per microbatch."""
        feed = self.plan.feed
        if feed.budgets:
            rows = [_resized(row, replicas) for row in (feed.budgets, *feed.later_budgets)]
            feed = feed.replace(budgets=rows[0], later_budgets=tuple(rows[1:]))
        return feed if samples is None else feed.replace(samples=samples)

    def _trimmed(self, trim: int) -> Plan:
        """Returns the plan with so many contributions dropped per update."""
        if self.plan.reduce.combiner != "score-trim":
            raise InputError(f"plan '{self.plan.name}' scores no contributions, so it drops none; use preset:zeno")
        return self.plan.replace(reduce=self.plan.reduce.replace(trim=trim))

    def check_update(self, microbatches: int | None) -> None:
        """Raises InputError if the preset fixes another number of microbatches per update."""
        if microbatches in (None, self.per_update) or self.per_update is None:
            return
        free = [name for name, other in presets().items() if other.per_update is None and _is_same(other, self)]
        remedy = "".join(f", or use preset:{name}, whose updates have any number" for name in free)
        fixed = f"{self.per_update} microbatch{'es' * (self.per_update > 1)}"
        raise InputError(
            f"plan '{self.plan.name}' makes each update of {fixed}, not {microbatches}; leave --microbatches out and"
            f" give larger ones with --samples{remedy}"
        )


def _resized(budgets: tuple[float, ...], replicas: int) -> tuple[float, ...]:
    return tuple(budgets[i % len(budgets)] for i in range(replicas))


def _is_same(one: Preset, other: Preset) -> bool:
    """Whether two presets differ only in the sizes of an update."""
    return one.plan.axes() == other.plan.axes() and one.grows == other.grows


def sized(plan: Plan) -> Preset:
    """Returns a user's plan as a preset, so that it can be scaled to another size."""
    grows: Literal["workers", "replicas", "shards"] = "replicas"
    if plan.cut.kind != "whole":
        grows = "shards" if plan.cut.kind == "layout" else "workers"
    counts_updates = plan.version.kind in ("stash", "vertical", "local", "torn")
    per_update = plan.feed.microbatches if counts_updates else None
    return Preset(title=plan.name, plan=plan, grows=grows, per_update=per_update)


DEFAULT_MICROBATCHES = 8
"""Microbatches of a preset's plan, over all its updates if it fixes those per update."""


@cache
def presets() -> dict[str, Preset]:
    """Returns all presets by name, in the order of presets.toml."""
    table = tomllib.loads(files("pipedejavu.plan").joinpath("presets.toml").read_text(encoding="utf-8"))
    loaded = {}
    for name, row in table.items():
        fields = {k: row.pop(k) for k in ("title", "grows", "per_update", "aliases") if k in row}
        plan = Plan.model_validate({"name": name, **row}, strict=False)
        per_update = fields.get("per_update", DEFAULT_MICROBATCHES)
        steps = DEFAULT_MICROBATCHES // per_update if "per_update" in fields else plan.steps
        plan = plan.replace(feed=plan.feed.replace(microbatches=per_update), steps=steps)
        loaded[name] = Preset.model_validate({**fields, "plan": plan}, strict=False)
    return loaded


def preset(name: str) -> Preset:
    """Returns the preset with this name or alias; raises InputError that suggests the nearest name."""
    table = presets()
    for key, entry in table.items():
        if name == key or name in entry.aliases:
            return entry
    known = [*table, *(alias for entry in table.values() for alias in entry.aliases)]
    raise InputError(f"there is no preset '{name}'{nearest(name, known)}")
