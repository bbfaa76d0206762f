"""The files of a data set on disk: which they are, what kind they hold, and a hash of their contents."""

import os
from collections.abc import Iterator
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Literal, NamedTuple

from pipedejavu.facts import InputError, open_file
from pipedejavu.facts.file import check_file

Kind = Literal["text", "jsonl", "csv", "parquet", "arrow", "images"]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"), "images"),
}
"""Kinds by the end of a file's name; any other file is text."""


class DataFiles(NamedTuple):
    """The files of one data set, all of one kind, in the order of their paths."""

    root: Path
    paths: tuple[Path, ...]
    kind: Kind

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(check_file(path).st_size for path in self.paths)

    def digest(self) -> str:
        """Returns a hash over the files' names and contents."""
        whole = sha256()
        for path in self.paths:
            name = path.name if path == self.root else path.relative_to(self.root).as_posix()
            whole.update(f"{name}\0{_digest(path)}\n".encode())
        return whole.hexdigest()


def find_files(path: Path) -> DataFiles:
    """Returns the file, or the files of a folder without hidden ones; raises InputError unless all are of one kind."""
    if not path.exists():
        raise InputError(f"cannot read {path}: there is no such file or folder")
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(inside.name for inside in path.iterdir() if (inside / "state.json").is_file()))
        raise InputError(f"{path} is a folder of `datasets` with splits: {splits}; give the folder of one of them")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():  # `save_to_disk` of datasets
        arrows = sorted(path.glob("*.arrow"))
        if not arrows:
            raise InputError(f"{path} is a folder of `datasets` without .arrow files; save it again")
        return DataFiles(path, tuple(arrows), "arrow")
    paths = sorted(_walk(path)) if path.is_dir() else [path]
    if not paths:
        raise InputError(f"{path} has no files; give a file, or a folder that has some")
    kinds: dict[Kind, Path] = {}
    for file in paths:
        kinds.setdefault(_KINDS.get(file.suffix.lower(), "text"), file)
    if len(kinds) > 1:
        found = " and ".join(f"{kind} ({file.relative_to(path)})" for kind, file in sorted(kinds.items()))
        raise InputError(f"{path} has files of {len(kinds)} kinds: {found}; give a folder with one kind, or one file")
    if "images" in kinds and not path.is_dir():
        raise InputError(f"{path} is one image; give a folder that has a folder of images for each class")
    return DataFiles(path, tuple(paths), next(iter(kinds)))


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _digest(path: Path) -> str:
    try:
        status = check_file(path)
        return _digest_of(path, status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


@lru_cache(maxsize=1 << 14)
def _digest_of(path: Path, *_status: int) -> str:
    """Returns the hash of a file; its status is part of the key, so that a changed file is read again."""
    with open_file(path) as file:
        return file_digest(file, "sha256").hexdigest()
