"""Memory and events of a GPU that several processes share, through CUDA's handles for other processes.

Memory comes from the driver, since torch's allocator may use expandable segments, which have no such handle. It is
allocated in whole blocks of 2 MiB: smaller allocations share a block, and a handle would give access to all of it.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 2 << 20
HANDLE_BYTES = 64
"""Size of a handle of memory or of an event."""
_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class _MemoryHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Span:
    """An address range of a GPU, as torch reads it."""

    def __init__(self, address: int, size_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2
        }  # fmt: skip


@cache
def _driver() -> Any:
    """Returns the driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def _check(name: str, *arguments: object) -> None:
    """Calls a function of the driver; raises MemoryError if memory is short and RuntimeError for any other error."""
    code = getattr(_driver(), name)(*arguments)
    if not code:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(text))
    error = (text.value or b"unknown error").decode()
    if error == "CUDA_ERROR_OUT_OF_MEMORY":
        raise MemoryError("the GPU has no memory left for the messages of this worker; use smaller microbatches")
    raise RuntimeError(f"{name} failed with {error} ({code})")


@cache
def _primary_context(index: int) -> int:
    """Returns the context that torch uses on a device, kept to the end of the process.

    Torch creates it with its first work. Released before that, it would take all its memory with it.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check("cuDeviceGet", ctypes.byref(number), ctypes.c_int(index))
    _check("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    assert context.value is not None
    return context.value


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Makes the context that torch uses on a device current in this thread."""
    _check("cuCtxPushCurrent_v2", ctypes.c_void_p(_primary_context(device.index or 0)))
    try:
        yield
    finally:
        _check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class ExportedMemory:
    """Memory of this process that others can map; `free` it after they have closed it."""

    def __init__(self, size_bytes: int, device: torch.device):
        """Allocates at least `size_bytes`; raises MemoryError if the GPU has too little."""
        self.size_bytes, self.device = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES, device
        self._address, handle = ctypes.c_uint64(), _MemoryHandle()
        with _context(device):
            _check("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(self.size_bytes))
            _check("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
        self.handle = bytes(handle.reserved)
        self.raw = _tensor(self._address.value, self.size_bytes, device)

    def close(self) -> None:
        """Frees the memory; nothing may use it any more, in any process."""
        with _context(self.device):
            _check("cuMemFree_v2", self._address)


class MappedMemory:
    """Memory of another process, mapped into this one."""

    def __init__(self, handle: bytes, size_bytes: int, device: torch.device):
        """Maps memory that lies on `device`, as this process numbers its GPUs."""
        self.size_bytes, self.device = size_bytes, device
        self._address = ctypes.c_uint64()
        packed = _MemoryHandle.from_buffer_copy(handle)
        with _context(device):
            _check("cuIpcOpenMemHandle_v2", ctypes.byref(self._address), packed, ctypes.c_uint(_PEER_ACCESS))
        self.raw = _tensor(self._address.value, size_bytes, device)

    def close(self) -> None:
        """Unmaps the memory; nothing in this process may use it any more."""
        with _context(self.device):
            _check("cuIpcCloseMemHandle", self._address)


def _tensor(address: int, size_bytes: int, device: torch.device) -> Tensor:
    """Returns memory as a tensor of bytes, which does not own it."""
    return torch.as_tensor(_Span(address, size_bytes), device=device)


def make_shared_event(device: torch.device) -> tuple[torch.cuda.Event, bytes]:
    """Returns an event that other processes can wait for, and its handle."""
    with torch.cuda.device(device):
        event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        handle = bytes(event.ipc_handle())  # type: ignore[no-untyped-call]
    return event, handle


def open_shared_event(handle: bytes, device: torch.device) -> torch.cuda.Event:
    """Returns the event of another process whose device this process numbers `device`."""
    event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(device, handle)  # type: ignore[no-untyped-call]
    return event


def find_device(uuid: str) -> torch.device | None:
    """Returns the GPU with this UUID, as this process numbers it; None if the process does not see it."""
    for number, other in enumerate(visible_gpus()):
        if other == uuid:
            return torch.device("cuda", number)
    return None


@cache
def visible_gpus() -> tuple[str, ...]:
    """Returns the UUIDs of the GPUs that this process sees, in its order."""
    if not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count()))


@cache
def can_share(device: torch.device) -> bool:
    """Whether memory and events of a GPU can be exported: the driver may refuse, as in some virtual machines."""
    if not torch.cuda.is_available():
        return False
    try:
        memory = ExportedMemory(1, device)
        memory.close()
        make_shared_event(device)
    except (OSError, RuntimeError, MemoryError, AttributeError):
        return False
    return True
