"""What a run was started with: one sealed file, which is replaced as a whole, and copies of it for people to read.

The copies are options.json, plan.json, profile.json and machine.json; every checkpoint has one of each, too. A copy
that has been changed is restored from the sealed file, or, without it, from the newest checkpoint.
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
"""In the order in which they are written: the options show that a folder holds a run."""
_MOST_DIFFERENCES = 4


class Seal(Record):
    """The records of a run, and the hash of their JSON."""

    most_bytes: ClassVar[int] = sum(kind.most_bytes for kind in _KINDS.values())

    sha256: str
    settings: dict[str, dict[str, Any]]


class Settings(NamedTuple):
    """What a run was started with."""

    options: TrainOptions
    plan: Plan
    profile: Profile
    machine: Machine

    @classmethod
    def of(cls, options: TrainOptions, program: Program) -> "Settings":
        """Returns the settings of a run under a program."""
        return cls(options, program.plan, program.profile, program.machine)

    def plain(self) -> dict[str, dict[str, Any]]:
        """Returns the records as JSON has them."""
        return {name: json.loads(record.to_json()) for name, record in self._asdict().items()}

    def in_manifest(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of a manifest that hold copies, beside other facts."""
        plain = self.plain()
        return {"plan": plain.pop("plan"), "facts": {**facts, **plain}}

    def write(self, path: Path) -> None:
        """Writes the sealed file to a run folder, then the copies."""
        plain = self.plain()
        Seal(sha256=_hash(plain), settings=plain).save(path / SEAL)
        for name in _KINDS:
            getattr(self, name).save(path / f"{name}.json")


def read_settings(
    path: Path, checkpoint: Checkpoint | None, tell: Callable[[str], None], accept_changes: bool = False
) -> Settings:
    """Reads what the run in a folder was started with; `tell` is given a sentence for each file that was restored.

    With `accept_changes` a copy that can be read is taken as it is. Raises InputError if one cannot be read and nothing
    says what it was, or if, in a folder without a sealed file, it is not what the checkpoint says.
    """
    sealed = _sealed(path, tell)
    known, origin = sealed, SEAL
    if not sealed and checkpoint is not None:
        known, origin = _copies(checkpoint), f"the checkpoint of step {checkpoint.step}"
    found: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        file, before = path / f"{name}.json", known.get(name)
        record, fault = _read(file, kind, before)
        found[name] = record
        if not fault:
            continue
        if record is not None and accept_changes:
            tell(f"{file} {fault}; it is taken as it is")
        elif before is None:
            raise InputError(
                f"{file} {fault}, and nothing says what it was; put it back, or begin in another --run-dir"
            )
        elif record is not None and not sealed:
            raise InputError(f"{file} {fault} in {origin}; put it back, or go on with --accept-changes")
        else:
            before.save(file)
            found[name] = before
            tell(f"{file} {fault}: restored from {origin}")
    return Settings(**found)


def _read(file: Path, kind: type[Record], before: Record | None) -> tuple[Record | None, str]:
    """Returns what a copy says, or None, and what is wrong with it, or nothing."""
    if not file.exists():
        return None, "is missing"
    data = read_file(file, kind.most_bytes)  # raises InputError without permission, which shows no damage
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


def _sealed(path: Path, tell: Callable[[str], None]) -> dict[str, Record]:
    """Returns the records of the sealed file; none if it is damaged, or missing, as in folders of earlier versions."""
    file = path / SEAL
    if not file.exists():
        return {}
    data = read_file(file, Seal.most_bytes)
    try:
        seal = Seal.from_json(data, str(file))
        if _hash(seal.settings) != seal.sha256:
            raise InputError("it does not have its hash")
        return _records(seal.settings, str(file))
    except InputError as error:
        tell(f"{file} is damaged: {str(error).removeprefix(f'{file}: ')}")
        return {}


def _copies(checkpoint: Checkpoint) -> dict[str, Record]:
    """Returns the records that a checkpoint has copies of; those of earlier versions have the options and the plan."""
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
