"""Turns pydantic's validation errors into sentences, each with the location and the nearest valid name."""

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipedejavu.facts.error import FaultsError, brief, nearest


def field_faults(record: type[BaseModel], error: ValidationError) -> list[str]:
    """Returns a sentence for each fault in a validation error of `record`."""
    details = error.errors(include_url=False)
    return [fault for detail in details if not _is_echo(detail) for fault in _describe(record, detail)]


def is_unreadable(error: ValidationError) -> bool:
    """Whether the text was not JSON at all."""
    return error.errors(include_url=False)[0]["type"] in ("json_invalid", "string_unicode")


def record_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the record type in a field's annotation, also inside a tuple or dict."""
    return next((a for a in _flatten(annotation) if isinstance(a, type) and issubclass(a, BaseModel)), None)


def _is_echo(detail: ErrorDetails) -> bool:
    """Whether a tuple is reported as too short only because some of its items have faults."""
    return detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]


def _describe(record: type[BaseModel], detail: ErrorDetails) -> list[str]:
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in detail["loc"]).removeprefix(".")
    prefix = f"{where}: " if where else ""
    context, value = detail.get("ctx", {}), detail["input"]
    match detail["type"]:
        case "json_invalid":
            return [f"not valid JSON: {context['error']}"]
        case "extra_forbidden":
            owner = _record_at(record, detail["loc"][:-1])
            known = [field.alias or name for name, field in owner.model_fields.items()]
            return [f"unknown key '{where}'{nearest(str(detail['loc'][-1]), known)}"]
        case "missing":
            return [f"missing key '{where}'"]
        case "literal_error":
            expected = [e.strip("' ") for e in context["expected"].replace(" or ", ", ").split(",")]
            return [f"{prefix}{brief(value)} is not one of its values{nearest(str(value), expected)}"]
        case "value_error":
            error = context["error"]
            return [f"{prefix}{fault}" for fault in (error.faults if isinstance(error, FaultsError) else (error,))]
    return [f"{prefix}{detail['msg']}, found {brief(value)}"]


def _record_at(record: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """Returns the record type at the path `loc` inside `record`."""
    annotation: Any = record
    for part in loc:
        annotation = _inside(annotation, part)
    return record_in(annotation) or record


def _inside(annotation: Any, part: int | str) -> Any:
    container = next((a for a in _flatten(annotation) if get_origin(a) in (tuple, dict)), None)
    if container:
        return get_args(container)[0 if isinstance(part, int) else -1]
    record = record_in(annotation)
    return record.model_fields[str(part)].annotation if record else None


def _flatten(annotation: Any) -> list[Any]:
    return [annotation, *(leaf for arg in get_args(annotation) for leaf in _flatten(arg))]
