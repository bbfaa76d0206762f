"""The settings that a run was started with: one hashed file, and readable copies of its records.

The copies are options.json, plan.json, profile.json and machine.json; every checkpoint stores them, too. A copy that
was changed is restored from the hashed file (seal.json) or, without it, from the newest checkpoint.
"""

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pipedejavu.facts import FaultsError, InputError, Machine, Profile, Record, read_file
from pipedejavu.facts.error import brief
from pipedejavu.plan import Plan
from pipedejavu.program import Program
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.saved_facts import saved_in
from pipedejavu.store import Checkpoint

SEAL = "seal.json"
_KINDS: Mapping[str, type[Record]] = {"plan": Plan, "profile": Profile, "machine": Machine, "options": TrainOptions}
"""The copies in writing order; the options come last because they mark a folder as a run."""
_MOST_DIFFERENCES = 4


class HashedSettings(Record):
    """The contents of seal.json: the records of a run and the hash of their JSON."""

    most_bytes: ClassVar[int] = sum(kind.most_bytes for kind in _KINDS.values())

    sha256: str
    settings: dict[str, dict[str, Any]]


class Settings(NamedTuple):
    """The options, plan, profile and machine of a run."""

    options: TrainOptions
    plan: Plan
    profile: Profile
    machine: Machine

    @classmethod
    def of(cls, options: TrainOptions, program: Program) -> "Settings":
        """Returns the settings of a run under a program."""
        return cls(options, program.plan, program.profile, program.machine)

    def plain(self) -> dict[str, dict[str, Any]]:
        """Returns the records as plain JSON objects."""
        return {name: json.loads(record.to_json()) for name, record in self._asdict().items()}

    def in_manifest(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the manifest fields that store these records together with other `facts`."""
        plain = self.plain()
        return {"plan": plain.pop("plan"), "facts": {**facts, **plain}}

    def write(self, path: Path) -> None:
        """Writes the hashed file to a run folder, then the copies."""
        plain = self.plain()
        HashedSettings(sha256=_hash(plain), settings=plain).save(path / SEAL)
        for name in _KINDS:
            getattr(self, name).save(path / f"{name}.json")


def read_settings(
    path: Path, checkpoint: Checkpoint | None, tell: Callable[[str], None], accept_changes: bool = False
) -> Settings:
    """Reads the settings of the run in a folder and restores damaged copies, each reported to `tell`.

    With `accept_changes`, a changed copy that can be parsed is used as it is. Raises InputError if a copy is damaged
    and no other source has its contents, or if, without a hashed file, a copy differs from the checkpoint.
    """
    hashed = _read_hashed(path, tell)
    known, origin = hashed, SEAL
    if not hashed and checkpoint is not None:
        known, origin = _copies(checkpoint), f"the checkpoint of step {checkpoint.step}"
    records: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        file, before = path / f"{name}.json", known.get(name)
        record, fault = _read(file, kind, before)
        records[name] = record
        if not fault:
            continue
        if record is not None and accept_changes:
            tell(f"{file} {fault}; it is taken as it is")
        elif before is None:
            raise InputError(
                f"{file} {fault}, and nothing says what it was; put it back, or begin in another --run-dir"
            )
        elif record is not None and not hashed:
            raise InputError(f"{file} {fault} in {origin}; put it back, or go on with --accept-changes")
        else:
            before.save(file)
            records[name] = before
            tell(f"{file} {fault}: restored from {origin}")
    return Settings(**records)


def _read(file: Path, kind: type[Record], before: Record | None) -> tuple[Record | None, str]:
    """Returns the record in a copy (None if unreadable) and what is wrong with it (empty if nothing)."""
    if not file.exists():
        return None, "is missing"
    data = read_file(file, kind.most_bytes)  # raises InputError without permission, which is not damage
    try:
        record = kind.from_json(data, str(file))
    except FaultsError:
        return None, "is damaged"
    if before is None or record == before:
        return record, ""
    names = [name for name in type(record).model_fields if getattr(before, name) != getattr(record, name)]
    told = [f"{name} {brief(getattr(record, name))}, before {brief(getattr(before, name))}" for name in names]
    more = [f"{len(told) - _MOST_DIFFERENCES} more"] if len(told) > _MOST_DIFFERENCES else []
    return record, f"has been changed ({'; '.join([*told[:_MOST_DIFFERENCES], *more])})"


def _read_hashed(path: Path, tell: Callable[[str], None]) -> dict[str, Record]:
    """Returns the records of the hashed file; empty if it is damaged, or missing as in folders of earlier versions."""
    file = path / SEAL
    if not file.exists():
        return {}
    data = read_file(file, HashedSettings.most_bytes)
    try:
        hashed = HashedSettings.from_json(data, str(file))
        if _hash(hashed.settings) != hashed.sha256:
            raise InputError("it does not have its hash")
        return _records(hashed.settings, str(file))
    except InputError as error:
        tell(f"{file} is damaged: {str(error).removeprefix(f'{file}: ')}")
        return {}


def _copies(checkpoint: Checkpoint) -> dict[str, Record]:
    """Returns the records stored in a checkpoint; earlier versions stored only the options and the plan."""
    facts = saved_in(checkpoint)
    plain = {
        "plan": checkpoint.manifest.plan,
        "profile": facts.profile,
        "machine": facts.machine,
        "options": facts.options,
    }
    return _records({name: record for name, record in plain.items() if record}, f"the manifest of {checkpoint.path}")


def _records(plain: Mapping[str, dict[str, Any]], source: str) -> dict[str, Record]:
    return {name: _KINDS[name].from_json(json.dumps(plain[name]), source) for name in _KINDS if name in plain}


def _hash(plain: Mapping[str, Any]) -> str:
    return sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
