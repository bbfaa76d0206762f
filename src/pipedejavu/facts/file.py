"""Files of others: regular ones only, opened without waiting, read up to a limit; and files that are replaced whole.

What is read may be reached through links, as the hub's cache is. What is written never follows a link: it gets a fresh
random name, which no other process can have made, and is renamed.
"""

import errno
import os
import secrets
import shutil
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path

from pipedejavu.facts.error import InputError
from pipedejavu.facts.quantity import format_bytes

MOST_BYTES = 1 << 26
"""Of a file whose kind has no limit of its own: 64 MiB."""
_CHUNK_BYTES = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def open_file(path: str | Path) -> FileIO:
    """Opens a regular file for reading; raises OSError for any other kind, and never waits for one."""
    check_file(path)  # opening a device may already do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb", buffering=0)
    try:
        _check_kind(os.fstat(descriptor), path)
    except OSError:
        file.close()
        raise
    return file


def check_file(path: str | Path) -> os.stat_result:
    """Returns what the system knows of a regular file; raises OSError for any other kind."""
    try:
        found = Path(path).stat()
    except ValueError:  # a NUL byte, or what no encoding has
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    _check_kind(found, path)
    return found


def read_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a file the user named; raises InputError if it cannot be read, or has more bytes than its kind."""
    try:
        return read_regular(path, most_bytes)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def read_regular(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a regular file; raises OSError if it cannot be read, or has more bytes than its kind."""
    body = bytearray()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        while size <= most_bytes and (part := file.read(_CHUNK_BYTES)):
            body += part
            size = max(size, len(body))
    if size > most_bytes:
        sizes = f"it has {format_bytes(size)}, and files of this kind have at most {format_bytes(most_bytes)}"
        raise OSError(errno.EFBIG, sizes, str(path))
    return bytes(body)


def fresh_path(path: str | Path) -> Path:
    """Returns a name beside `path` that no file has yet, for what is renamed to `path` when it is whole."""
    target = Path(path)
    return target.parent / f"{target.name[:200]}.{secrets.token_hex(8)}.tmp"


def replace_file(path: str | Path, data: bytes) -> None:
    """Writes a file to the disk under a fresh name, then renames it to `path`; raises OSError, and leaves nothing."""
    part = fresh_path(path)
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.replace(path)
        sync_folder(part.parent)
    except ValueError:
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def write_all(descriptor: int, data: memoryview) -> None:
    """Writes all bytes; the system may take fewer at a time."""
    while data:
        data = data[os.write(descriptor, data[: 16 * _CHUNK_BYTES]) :]


def sync_folder(path: Path) -> None:
    """Lets the names in a folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file, a folder with all that is in it, or a link, never what the link names; what cannot go stays."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _check_kind(found: os.stat_result, path: str | Path) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a regular file", str(path))
