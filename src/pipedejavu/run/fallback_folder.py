"""Fallback for a run's final files: a write that the run's disk refuses is retried, then made on another disk."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.facts.printable import tell
from pipedejavu.run.final_file import FinalFile
from pipedejavu.store.saver import PATIENCE_S, RETRY_S

_MARGIN_BYTES = 2**20


class Fallback:
    """The files of one run that were written outside its folder, and the fallback folder, created on first use."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.path: Path | None = None
        self.moved: dict[Path, Path] = {}
        """Maps a path in the run folder to where the file was written instead."""
        self._until_s = 0.0

    def folder(self, size_bytes: int) -> Path:
        """Returns a folder on another disk with `size_bytes` free; raises OSError if there is none.

        From now on, writes to the run's own disk are not retried.
        """
        self._until_s = time.monotonic()
        if self.path is not None and _free_bytes(self.path) >= size_bytes:
            return self.path
        for base in _bases():
            if _free_bytes(base) >= size_bytes + _MARGIN_BYTES:
                with suppress(OSError):
                    self.path = Path(tempfile.mkdtemp(prefix=f"pipedejavu-{self.run_dir.name}-", dir=base))
                    return self.path
        raise OSError(f"no folder has {format_bytes(size_bytes)} free: {', '.join(map(str, _bases()))}")

    def adopt(self, path: Path, moved: dict[Path, Path]) -> None:
        """Takes over the fallback folder of another process of the run, which has retried the run's disk already."""
        self.path, self.moved, self._until_s = path, self.moved | moved, time.monotonic()

    def write(self, path: Path, file: FinalFile) -> None:
        """Writes a file to `path`, or to the fallback folder after retries; raises InputError if both fail."""
        while True:
            try:
                file.write(path)
            except (OSError, InputError, SafetensorError) as error:
                reason = _reason(error)
            else:
                return
            if not self._until_s:
                self._until_s = time.monotonic() + PATIENCE_S
                tell(f"{path} could not be written ({reason}); trying again for {PATIENCE_S:.0f} s")
            if time.monotonic() > self._until_s:
                break
            time.sleep(RETRY_S)
        try:
            target = self.folder(file.size_bytes) / path.name
            file.write(target)
        except (OSError, InputError, SafetensorError) as error:
            nor = f"nor elsewhere: {_reason(error)}"
            raise InputError(f"cannot write {path}: {reason}; {nor}; make room, and go on with --resume") from None
        self.moved[path] = target

    def describe(self) -> str:
        """Returns a sentence that lists the files written elsewhere; empty if there are none."""
        if not self.moved:
            return ""
        names = ", ".join(str(path.relative_to(self.run_dir)) for path in self.moved)
        folders = " and ".join(dict.fromkeys(str(target.parent) for target in self.moved.values()))
        return f"the disk of {self.run_dir} takes no more: {names} went to {folders}; make room, and move them back"


def _bases() -> Iterator[Path]:
    """Yields folders to try: the system's temporary folder, the current one, the user's home."""
    with suppress(OSError):
        yield Path(tempfile.gettempdir())
    with suppress(OSError):
        yield Path.cwd()
    with suppress(RuntimeError):
        yield Path.home()


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
