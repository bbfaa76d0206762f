"""Safe reading and atomic writing: reads only regular files, without blocking and up to a limit; replaces whole files.

Reads follow symbolic links, as the Hugging Face cache needs. Writes never do: data goes to a fresh random name, which
no other process can have created, and is then renamed.
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
"""Default size limit: 64 MiB."""
_CHUNK_BYTES = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def open_file(path: str | Path) -> FileIO:
    """Opens a regular file for reading; raises OSError for any other kind, and never blocks."""
    check_file(path)  # even opening a device may have an effect
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb", buffering=0)
    try:
        _check_kind(os.fstat(descriptor), path)
    except OSError:
        file.close()
        raise
    return file


def check_file(path: str | Path) -> os.stat_result:
    """Returns a regular file's status; raises OSError for any other kind."""
    try:
        status = Path(path).stat()
    except ValueError:  # a NUL byte, or characters that cannot be encoded
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    _check_kind(status, path)
    return status


def read_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a file that the user named; raises InputError if it cannot be read or exceeds the limit."""
    try:
        return read_regular(path, most_bytes)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def read_regular(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a regular file; raises OSError if it cannot be read or exceeds the limit."""
    body = bytearray()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        while size <= most_bytes and (chunk := file.read(_CHUNK_BYTES)):
            body += chunk
            size = max(size, len(body))
    if size > most_bytes:
        sizes = f"it has {format_bytes(size)}, and files of this kind have at most {format_bytes(most_bytes)}"
        raise OSError(errno.EFBIG, sizes, str(path))
    return bytes(body)


def fresh_path(path: str | Path) -> Path:
    """Returns an unused name beside `path`, for a file that is renamed to `path` once it is complete."""
    target = Path(path)
    return target.parent / f"{target.name[:200]}.{secrets.token_hex(8)}.tmp"


def replace_file(path: str | Path, data: bytes) -> None:
    """Writes and syncs a file under a fresh name, then renames it to `path`; if it raises OSError, nothing is left."""
    temporary = fresh_path(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        sync_folder(temporary.parent)
    except ValueError:
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_all(descriptor: int, data: memoryview) -> None:
    """Writes all bytes, in as many calls as the system needs."""
    while data:
        data = data[os.write(descriptor, data[: 16 * _CHUNK_BYTES]) :]


def sync_folder(path: Path) -> None:
    """Syncs a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file, a folder with its contents, or a link itself; ignores what cannot be removed."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _check_kind(status: os.stat_result, path: str | Path) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a regular file", str(path))
