"""A file in memory that processes of one host share; it has no name on any disk, so that no full disk can refuse it."""

import os


class MemoryFile:
    """A file that exists while a process has it open, and that other processes of the same user open by its path."""

    def __init__(self, name: str, size_bytes: int = 0):
        """Makes the file with all the memory that it needs; raises OSError if there is not as much.

        Memory that was only promised would end the process that first writes to it.
        """
        self.file = os.memfd_create(name)
        if size_bytes:
            os.posix_fallocate(self.file, 0, size_bytes)

    @property
    def path(self) -> str:
        """The path that other processes open, while this process has the file open."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @property
    def size_bytes(self) -> int:
        """Bytes that were written, or reserved."""
        return os.fstat(self.file).st_size

    def close(self) -> None:
        """Closes the file; memory that was mapped from it stays."""
        os.close(self.file)
