"""Presets: plans by the name of the published algorithm. They are data, in presets.toml."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import Field

from pipedejavu.facts import InputError, Record, nearest
from pipedejavu.plan.plan import Plan


class Preset(Record):
    """A named plan, and how it grows with the number of workers and microbatches."""

    title: str
    plan: Plan
    grows: Literal["workers", "replicas", "shards", "none"] = "workers"
    per_update: int | None = Field(default=None, ge=1)
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
        """Returns the plan at a given size; what is not given keeps the preset's value."""
        plan, place, feed = self.plan, self.plan.place, self.plan.feed
        sizes = {"workers": workers, "microbatches": microbatches, "replicas": replicas, "steps": steps}
        for what, number in {**sizes, "samples": samples}.items():
            if number is not None and number < 1:
                raise InputError(f"the number of {what} must be 1 or more, not {number}")
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
        if replicas is not None:
            place = place.replace(replicas=replicas)
        if feed.budgets:
            feed = feed.replace(budgets=tuple(feed.budgets[i % len(feed.budgets)] for i in range(place.replicas)))
        if samples is not None:
            feed = feed.replace(samples=samples)
        if trim is not None:
            if plan.reduce.combiner != "score-trim":
                raise InputError(f"plan '{plan.name}' scores no contributions, so it drops none; use preset:zeno")
            plan = plan.replace(reduce=plan.reduce.replace(trim=trim))
        updates = plan.steps if steps is None else steps
        if microbatches is not None and self.per_update is None:
            feed = feed.replace(microbatches=microbatches)
        elif microbatches is not None and self.per_update is not None:
            if microbatches % self.per_update:
                raise InputError(
                    f"preset '{plan.name}' updates every {self.per_update} microbatches; {microbatches} is not a"
                    f" multiple of {self.per_update}"
                )
            updates = microbatches // self.per_update * (steps or 1)
        return plan.replace(place=place, feed=feed, steps=updates)

    def check_update(self, microbatches: int | None) -> None:
        """Raises InputError if updates have another number of microbatches than is asked of each."""
        if microbatches in (None, self.per_update) or self.per_update is None:
            return
        free = [name for name, other in presets().items() if other.per_update is None and _is_same(other, self)]
        remedy = "".join(f", or use preset:{name}, whose updates have any number" for name in free)
        own = f"{self.per_update} microbatch{'es' * (self.per_update > 1)}"
        raise InputError(
            f"plan '{self.plan.name}' makes each update of {own}, not {microbatches}; leave --microbatches out and give"
            f" larger ones with --samples{remedy}"
        )


def _is_same(one: Preset, other: Preset) -> bool:
    """Whether two presets differ only in the sizes of an update."""
    return one.plan.axes() == other.plan.axes() and one.grows == other.grows


def sized(plan: Plan) -> Preset:
    """Returns a user's own plan as a preset, so that it can be taken at another size."""
    grows: Literal["workers", "replicas", "shards"] = "replicas"
    if plan.cut.kind != "whole":
        grows = "shards" if plan.cut.kind == "layout" else "workers"
    counts_updates = plan.version.kind in ("stash", "vertical", "local", "torn")
    per_update = plan.feed.microbatches if counts_updates else None
    return Preset(title=plan.name, plan=plan, grows=grows, per_update=per_update)


DEFAULT_MICROBATCHES = 8


@cache
def presets() -> dict[str, Preset]:
    """Returns all presets by name, in the order of the table."""
    table = tomllib.loads(files("pipedejavu.plan").joinpath("presets.toml").read_text(encoding="utf-8"))
    found = {}
    for name, row in table.items():
        own = {k: row.pop(k) for k in ("title", "grows", "per_update", "aliases") if k in row}
        plan = Plan.model_validate({"name": name, **row}, strict=False)
        per_update = own.get("per_update", DEFAULT_MICROBATCHES)
        steps = DEFAULT_MICROBATCHES // per_update if "per_update" in own else plan.steps
        plan = plan.replace(feed=plan.feed.replace(microbatches=per_update), steps=steps)
        found[name] = Preset.model_validate({**own, "plan": plan}, strict=False)
    return found


def preset(name: str) -> Preset:
    """Returns the preset called `name`, or one of its aliases; raises InputError with the nearest name."""
    table = presets()
    for key, found in table.items():
        if name == key or name in found.aliases:
            return found
    known = [*table, *(alias for found in table.values() for alias in found.aliases)]
    raise InputError(f"there is no preset '{name}'{nearest(name, known)}")
