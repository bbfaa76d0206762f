"""A run as a file: run.toml holds every choice of a run, and `train --config` repeats it."""

import json
import tomllib
import types
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from pipedejavu.cli.option_range import OPTIONS, check_ranges
from pipedejavu.cli.train_request import TrainRequest
from pipedejavu.facts import FaultsError, InputError, nearest, read_file, write_file
from pipedejavu.facts.error import brief

NAME = "run.toml"
_NOT_KEPT = {"explicit", "config", "run_dir", "resume", "accept_changes", "allow_restart", "as_json"}
"""Fields that concern one start of a run."""
_EXCLUSIVE = (("steps", "epochs"), ("epochs", "steps"), ("microbatches", "accumulate"), ("accumulate", "microbatches"))
"""Pairs of options: one of them on the command line replaces the other in the file."""


def read_run_file(request: TrainRequest) -> TrainRequest:
    """Returns the request with the choices of its --config file; options on the command line override them."""
    if request.config is None:
        if not request.model:
            raise InputError("train needs a MODEL: zoo:NAME, hf:CONFIG or FILE.py:FUNCTION; or --config FILE")
        return request
    file = _parse(request.config)
    for option, other in _EXCLUSIVE:
        if option in request.explicit:
            file.pop(other, None)
    chosen = {name: value for name, value in file.items() if name not in request.explicit}
    if "model" in chosen and request.model:
        del chosen["model"]
    check_ranges(chosen)
    merged = replace(request, **chosen, explicit=request.explicit | chosen.keys() - {"model"})
    if not merged.model:
        raise InputError(f"{request.config} has no model, and the command line neither; give one of them a model")
    return merged


def write_run_file(request: TrainRequest, folder: Path) -> None:
    """Writes the choices of a request to a run folder, those left to their defaults as comments."""
    lines = ["# Every choice of this run; 'pipedejavu train --config' repeats it.\n"]
    for field in fields(TrainRequest):
        value = getattr(request, field.name)
        if field.name in _NOT_KEPT:
            continue
        is_chosen = field.name == "model" or field.name in request.explicit
        if value is None:
            lines.append(f"# {field.name} is left open\n")
        else:
            lines.append(f"{'' if is_chosen else '# '}{field.name} = {_written(value)}\n")
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / NAME, "".join(lines))


def _parse(path: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(read_file(Path(path)).decode())
    except ValueError as error:
        raise InputError(f"{path} is no TOML: {error}; write NAME = VALUE, a line for each option") from None
    hints = get_type_hints(TrainRequest)
    known = {field.name for field in fields(TrainRequest)} - _NOT_KEPT
    spelled = {option.removeprefix("--").replace("-", "_"): name for name, option in OPTIONS.items()}
    values, faults = {}, []
    for key, value in table.items():
        plain = key.replace("-", "_")
        name = spelled.get(plain, plain)
        if name not in known:
            faults.append(f"there is no option '{key}'{nearest(key, sorted(known))}")
        elif not _fits(value, hints[name]):
            faults.append(f"'{key}' is {_meaning(hints[name])}, not {brief(value)}")
        else:
            values[name] = float(value) if float in _kinds(hints[name]) and type(value) is int else value
    if faults:
        raise FaultsError(path, faults)
    return values


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Returns the types that a hint allows, without None."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(kind for kind in get_args(hint) if kind is not type(None))
    return (hint,)


def _fits(value: Any, hint: Any) -> bool:
    for kind in _kinds(hint):
        if get_origin(kind) is list:
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                return True
        elif type(value) is kind or (kind is float and type(value) is int):
            return True
    return False


def _meaning(hint: Any) -> str:
    kind = _kinds(hint)[0]
    words: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return words.get(kind, "a list of texts")


def _written(value: object) -> str:
    """Returns a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | list):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
