"""The range of every numeric option, checked before a verb does anything."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from pipedejavu.facts import InputError

MOST_SEED = 2**63 - 1
"""Seeds of torch are 64-bit integers."""


class OptionRange(NamedTuple):
    """What an option means, and the numbers that it takes."""

    meaning: str
    least: float = 1
    most: float = math.inf
    is_open: bool = False
    """Whether `least` itself is out of range."""

    def has(self, value: float) -> bool:
        """Whether a number is in the range."""
        return math.isfinite(value) and self.least <= value <= self.most and not (self.is_open and value == self.least)

    def __str__(self) -> str:
        if self.most < math.inf:
            return f"{self.meaning} between {self.least:g} and {self.most:g}"
        return f"{self.meaning}, {'above 0' if self.is_open else f'{self.least:g} or more'}"


RANGES = {
    "batch": OptionRange("a number of samples"),
    "train_samples": OptionRange("a number of samples"),
    "energy": OptionRange("a price per kWh", 0),
    "deadline": OptionRange("a number of hours", 0, is_open=True),
    "samples": OptionRange("a number of samples per microbatch"),
    "microbatches": OptionRange("a number of microbatches"),
    "workers": OptionRange("a number of workers"),
    "replicas": OptionRange("a number of replicas"),
    "lora": OptionRange("a rank"),
    "price": OptionRange("a price per hour", 0),
    "epochs": OptionRange("a number of passes"),
    "forward": OptionRange("a number of passes"),
    "accumulate": OptionRange("a number of microbatches"),
    "eval": OptionRange("a share or a number of samples", 0),
    "eval_every": OptionRange("a number of updates"),
    "steps": OptionRange("a number of updates"),
    "head_chunks": OptionRange("a number of chunks of tokens"),
    "flushed_updates": OptionRange("a number of updates", 0),
    "trim": OptionRange("a number of contributions", 0),
    "tries": OptionRange("a number of plans"),
    "init_candidates": OptionRange("a number of initialisations"),
    "init_steps": OptionRange("a number of updates"),
    "max_consecutive_skips": OptionRange("a number of updates"),
    "checkpoint_every": OptionRange("a number of updates", 0),
    "check_replicas": OptionRange("a number of updates", 0),
    "hang_after_s": OptionRange("a number of seconds", 0),
    "measure_budget_s": OptionRange("a number of seconds", 0),
    "lr": OptionRange("a number", 0, is_open=True),
    "warmup": OptionRange("a number of updates", 0),
    "momentum": OptionRange("a factor", 0, 1),
    "weight_decay": OptionRange("a factor", 0),
    "clip_norm": OptionRange("a norm", 0, is_open=True),
    "cpu_share": OptionRange("a part of the batch", 0, 1),
    "recompute": OptionRange("a share", 0, 1),
    "context": OptionRange("a number of tokens"),
    "parts": OptionRange("a number of workers"),
    "staleness": OptionRange("a number of updates", 0),
    "time_budget": OptionRange("a number of seconds", 0),
    "candidates": OptionRange("a number of plans"),
    "round_s": OptionRange("a number of seconds", 0, is_open=True),
    "start_s": OptionRange("a number of seconds", 0),
    "disk": OptionRange("a number of bytes per second", 0, is_open=True),
    "plan_budget": OptionRange("a number of seconds", 0),
    "seed": OptionRange("an integer", -MOST_SEED, MOST_SEED),
}
"""Ranges by the name of the field; an option means the same in all verbs."""
OPTIONS = {"tries": "--try", "hang_after_s": "--hang-after", "round_s": "--round", "start_s": "--start"}
"""Options that are not spelled as their fields."""


def check_ranges(values: Mapping[str, object]) -> None:
    """Raises InputError with every numeric option that is out of its range."""
    faults = []
    for name, value in values.items():
        for number in value if isinstance(value, list | tuple) else (value,):
            if name in RANGES and isinstance(number, int | float) and not RANGES[name].has(number):
                option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
                faults.append(f"{option} is {RANGES[name]}, not {number:.12g}")
    if faults:
        raise InputError("; ".join(faults))
