"""The base of every record that has a JSON form: frozen, strict, all faults reported at once."""

from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from pipedejavu.facts.error import FaultsError, InputError, nearest


class Record(BaseModel):
    """A frozen, keyword-only record that refuses unknown keys and loose types.

    A validator that finds several faults raises ValueError with one on each line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the record as JSON, without the fields that hold their defaults."""
        return self.model_dump_json(indent=indent, exclude_defaults=True)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "") -> Self:
        """Parses `to_json`'s output; raises FaultsError with every fault found in `text`."""
        subject = source or cls.__name__.lower()
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            details = [d for d in error.errors() if d["type"] != "too_short" or not d["input"]]
            faults = [fault for detail in details for fault in _describe(cls, detail).split("\n")]
            raise FaultsError(subject, faults) from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads the record from the JSON file at `path`."""
        return cls.from_json(read_file(path), source=str(path))

    def save(self, path: str | Path) -> None:
        """Writes the record to `path`, whole or not at all."""
        write_file(path, self.to_json() + "\n")

    def but(self, **changes: Any) -> Self:
        """Returns a validated copy with some fields changed."""
        return type(self).model_validate({**dict(self), **changes})


def read_file(path: str | Path) -> bytes:
    """Reads a file the user named; raises InputError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def write_file(path: str | Path, text: str) -> None:
    """Writes `text` under a temporary name and renames it to `path`."""
    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _describe(record: type[BaseModel], detail: ErrorDetails) -> str:
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in detail["loc"]).lstrip(".")
    if detail["type"] == "json_invalid":
        return f"not valid JSON: {detail['ctx']['error']}"
    if detail["type"] == "extra_forbidden":
        owner = _record_at(record, detail["loc"][:-1])
        known = owner.model_fields if owner else ()
        return f"unknown key '{where}'{nearest(str(detail['loc'][-1]), known)}"
    if detail["type"] == "missing":
        return f"missing key '{where}'"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "literal_error":
        expected = [e.strip("' ") for e in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]
        message = f"{detail['input']!r} is not one of its values{nearest(str(detail['input']), expected)}"
    elif detail["type"] != "value_error":
        message = f"{message}, found {detail['input']!r}"
    return f"{where}: {message}" if where else message


def _record_at(record: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Finds the record type that the path `loc` leads to inside `record`."""
    found: type[BaseModel] | None = record
    for part in loc:
        field = found.model_fields.get(str(part)) if found and isinstance(part, str) else None
        if field:
            leaves = _flatten(field.annotation)
            found = next((a for a in leaves if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return found


def _flatten(annotation: Any) -> list[Any]:
    return [annotation, *(leaf for arg in get_args(annotation) for leaf in _flatten(arg))]
