"""The base of all records with a JSON form: frozen, strict, and with all faults reported at once."""

import json
from pathlib import Path
from typing import Any, ClassVar, Self, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from pipedejavu.facts.error import FaultsError, InputError, repeated
from pipedejavu.facts.fault import field_faults, is_unreadable, record_in
from pipedejavu.facts.file import MOST_BYTES, read_file, replace_file
from pipedejavu.facts.file_kind import describe_kind

_MOST_DIGITS = 300
"""Most digits of an integer; a float can hold what has no more."""


class Record(BaseModel):
    """A frozen, keyword-only record that refuses unknown keys and loose types.

    If fields must agree with each other, override `disagreements` and add a validator that returns `agreed()`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)
    most_bytes: ClassVar[int] = MOST_BYTES
    """Size limit of a file that holds such a record."""

    def disagreements(self) -> list[str]:
        """Returns the faults between fields that are valid one by one."""
        return []

    def agreed(self) -> Self:
        """Returns the record itself; raises FaultsError with every disagreement."""
        faults = self.disagreements()
        if faults:
            raise FaultsError(type(self).__name__.lower(), faults)
        return self

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the record as JSON, without fields that have their default."""
        return self.model_dump_json(indent=indent, exclude_defaults=True)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "") -> Self:
        """Parses the output of `to_json`; raises FaultsError with every fault in `text`."""
        subject = source or cls.__name__.lower()
        try:
            record = cls.model_validate_json(text)
        except ValidationError as error:
            raise FaultsError(subject, _faults(cls, error, text)) from None
        _, faults = _parse(text)
        if faults:
            raise FaultsError(subject, faults)
        return record

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads the record from a JSON file."""
        return cls.from_json(read_file(path, cls.most_bytes), source=str(path))

    def save(self, path: str | Path) -> None:
        """Writes the record to a JSON file atomically."""
        write_file(path, self.to_json() + "\n")

    def replace(self, **changes: Any) -> Self:
        """Returns a validated copy with some fields changed."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **changes}, by_name=True)


def write_file(path: str | Path, text: str) -> None:
    """Writes and syncs a text file atomically; raises InputError if it cannot be written."""
    try:
        replace_file(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _faults(record: type[Record], error: ValidationError, text: str | bytes) -> list[str]:
    """Returns every fault of `text`: those of single fields, duplicate keys, and disagreements between fields."""
    faults = field_faults(record, error)
    if is_unreadable(error):
        return faults
    plain, repeats = _parse(text, checks_digits=False)  # fields that have limits name them
    if other := describe_kind(plain, record.__name__.lower()):
        return [other]
    return list(dict.fromkeys([*faults, *repeats, *_disagreements(record, plain)]))


def _parse(text: str | bytes, *, checks_digits: bool = True) -> tuple[Any, list[str]]:
    """Parses valid JSON; returns plain data, and a fault for each duplicate key and each integer that is too long."""
    faults: list[str] = []

    def read_int(digits: str) -> int:
        if checks_digits and len(digits) > _MOST_DIGITS:
            faults.append(f"the number {digits[:8]}… has {len(digits)} digits; at most {_MOST_DIGITS} are read")
        return int(digits[:_MOST_DIGITS])

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        faults.extend(f"key '{key}' is given twice" for key in repeated(key for key, _ in pairs))
        return dict(pairs)

    return json.loads(text, object_pairs_hook=read_object, parse_int=read_int), faults


def _disagreements(record: type[Record], plain: Any) -> list[str]:
    """Returns disagreements in data that has other faults; none if those faults prevent the comparison."""
    try:
        faults: list[str] = _unchecked(record, plain).disagreements()
    except Exception:  # data of wrong types can raise anything
        return []
    return faults


def _unchecked(annotation: Any, plain: Any) -> Any:
    """Builds records from plain data without checking types."""
    record = record_in(annotation)
    if record and isinstance(plain, list):
        return tuple(_unchecked(record, item) for item in plain)
    if record and isinstance(plain, dict) and get_origin(annotation) is dict:
        return {key: _unchecked(record, item) for key, item in plain.items()}
    if record and isinstance(plain, dict):
        known = {name: field.annotation for name, field in record.model_fields.items() if name in plain}
        return record.model_construct(**{name: _unchecked(a, plain[name]) for name, a in known.items()})
    return plain
