"""Arguments that several verbs share: models and plans by name or file, and `--json`."""

from collections.abc import Mapping
from math import inf
from typing import Annotated

import typer

from pipedejavu.facts import InputError
from pipedejavu.facts.error import brief
from pipedejavu.plan import Plan, preset, sized

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

PlannedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="zoo:NAME, hf:CONFIG, FILE.py:FUNCTION, a profile (JSON, graph.txt or CSV), or a shape: gpt-small.",
    ),
]
"""A model that is planned for, and need not be here."""

Speeds = Annotated[
    list[str] | None,
    typer.Option("--speed", help="How fast a kind of device is, as a multiple of the profile: xeon=0.04; repeatable."),
]


def read_speeds(texts: list[str] | None) -> dict[str, float]:
    """Reads speeds of kinds of devices; raises InputError unless each is KIND=FACTOR, above 0 and given once."""
    speeds: dict[str, float] = {}
    for text in texts or ():
        kind, _, number = text.partition("=")
        try:
            speed = float(number)
        except ValueError:
            speed = 0.0
        if not kind or not 0 < speed < inf:
            raise InputError(f"--speed is KIND=FACTOR with a factor above 0, such as xeon=0.04, not {brief(text)}")
        if kind in speeds:
            raise InputError(f"--speed gives '{kind}' twice; give each kind once")
        speeds[kind] = speed
    return speeds


def read_amounts(option: str, texts: list[str] | None) -> dict[str, float]:
    """Reads amounts by kind of device; raises InputError unless each is KIND=NUMBER, 0 or more and given once."""
    amounts: dict[str, float] = {}
    for text in texts or ():
        kind, _, number = text.partition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = -1.0
        if not kind or not 0 <= amount < inf:
            raise InputError(f"--{option} is KIND=NUMBER, 0 or more, such as a100=2.5, not {brief(text)}")
        if kind in amounts:
            raise InputError(f"--{option} gives '{kind}' twice; give each kind once")
        amounts[kind] = amount
    return amounts


def read_model(text: str) -> str:
    """Checks that a text is zoo:NAME, hf:CONFIG or FILE.py:FUNCTION; returns it as `model_source` reads it."""
    if not text.startswith(("zoo:", "hf:")) and ".py:" not in text:
        raise InputError(
            f"'{text}' is not a model that can be trained; use zoo:NAME, such as zoo:gpt-tiny, hf:CONFIG or"
            " FILE.py:FUNCTION"
        )
    return text.removeprefix("zoo:")


def read_plan(text: str, sizes: Mapping[str, int | None], *, is_run: bool = False) -> Plan:
    """Reads preset:NAME or a plan file, at the given sizes; for a run, checks that microbatches are per update."""
    kind, colon, name = text.partition(":")
    if kind == "preset" and colon:
        source = preset(name)
    elif text.endswith(".json") or "/" in text:
        source = sized(Plan.load(text))
    else:
        raise InputError(f"'{text}' is neither a plan file (.json) nor preset:NAME; did you mean 'preset:{text}'?")
    if is_run:
        source.check_update(sizes.get("microbatches"))
    return source.at(**sizes)
