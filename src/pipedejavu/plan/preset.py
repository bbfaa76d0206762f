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
    ) -> Plan:
        """Returns the plan at a given size; what is not given keeps the preset's value."""
        place, feed, plan = self.plan.place, self.plan.feed, self.plan
        sizes = {"workers": workers, "microbatches": microbatches, "replicas": replicas, "steps": steps}
        for what, number in sizes.items():
            if number is not None and number < 1:
                raise InputError(f"{what} must be 1 or more, not {number}")
        if workers is not None:
            if self.grows == "none" and workers != 1:
                raise InputError(f"preset '{plan.name}' trains on one worker, not {workers}; leave --workers out")
            if self.grows != "none":
                place = place.but(**{self.grows: workers})
        if replicas is not None:
            place = place.but(replicas=replicas)
        count = microbatches or 8
        if self.per_update:
            if count % self.per_update:
                raise InputError(
                    f"preset '{plan.name}' updates every {self.per_update} microbatches, which does not divide"
                    f" {count}; use a multiple of {self.per_update}"
                )
            feed = feed.but(microbatches=self.per_update)
            steps = count // self.per_update * (steps or 1)
        else:
            feed = feed.but(microbatches=count)
        if feed.budgets:
            feed = feed.but(budgets=tuple(feed.budgets[i % len(feed.budgets)] for i in range(place.replicas)))
        if samples is not None:
            feed = feed.but(samples=samples)
        return plan.but(place=place, feed=feed, steps=steps or plan.steps)


@cache
def presets() -> dict[str, Preset]:
    """Returns all presets by name, in the order of the table."""
    table = tomllib.loads(files("pipedejavu.plan").joinpath("presets.toml").read_text(encoding="utf-8"))
    found = {}
    for name, row in table.items():
        own = {k: row.pop(k) for k in ("title", "grows", "per_update", "aliases") if k in row}
        plan = Plan.model_validate({"name": name, **row}, strict=False)
        found[name] = Preset.model_validate({**own, "plan": plan}, strict=False)
    return found


def preset(name: str) -> Preset:
    """Returns the preset called `name`, or one of its aliases; raises InputError with the nearest name."""
    table = presets()
    for key, found in table.items():
        if name == key or name in found.aliases:
            return found
    raise InputError(f"there is no preset '{name}'{nearest(name, table)}")
