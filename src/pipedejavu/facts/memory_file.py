"""A file in memory that processes of one host share; it is on no disk, so that a full disk does not matter."""

import os


class MemoryFile:
    """An anonymous file that exists while a process has it open; processes of the same user can open it by path."""

    def __init__(self, name: str, size_bytes: int = 0):
        """Creates the file and allocates its memory; raises OSError if there is not enough.

        Without the allocation, a process that writes to the file could be killed for lack of memory.
        """
        self.file = os.memfd_create(name)
        try:
            if size_bytes:
                os.posix_fallocate(self.file, 0, size_bytes)
        except OSError:
            os.close(self.file)
            raise

    @property
    def path(self) -> str:
        """The path that other processes open while this process has the file open."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @property
    def size_bytes(self) -> int:
        """Bytes written or allocated."""
        return os.fstat(self.file).st_size

    def close(self) -> None:
        """Closes the file; existing mappings stay valid."""
        os.close(self.file)
