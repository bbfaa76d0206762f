"""Verbs of the command line from typed requests: the fields of a dataclass are the verb's arguments and options."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

import typer
from typer.models import ParameterInfo

from pipedejavu.cli.option_range import check_ranges

R = TypeVar("R")

EXPLICIT = "explicit"
"""A field of this name gets the names of the options that are on the command line."""


def add_verb(app: typer.Typer, name: str, request: type[R], run: Callable[[R], None], summary: str) -> None:
    """Adds a verb that runs a request; fields that typer describes are its arguments and options."""
    hints = get_type_hints(request, include_extras=True)
    options = [field for field in fields(request) if _is_option(hints[field.name])]  # type: ignore[arg-type]
    has_explicit = EXPLICIT in hints

    def call(typer_context: typer.Context, **values: Any) -> None:
        check_ranges(values)
        if has_explicit:
            values[EXPLICIT] = frozenset(name for name in values if _is_explicit(typer_context, name))
        run(request(**values))

    first = inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    signature = inspect.Signature([first, *(_parameter(field, hints[field.name]) for field in options)])
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {"typer_context": typer.Context, **{field.name: hints[field.name] for field in options}}
    app.command(name, help=summary)(call)


def _is_option(hint: Any) -> bool:
    return any(isinstance(note, ParameterInfo) for note in getattr(hint, "__metadata__", ()))


def _parameter(field: "Field[Any]", hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)


def _is_explicit(context: typer.Context, name: str) -> bool:
    """Whether an option is on the command line, rather than left to its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
