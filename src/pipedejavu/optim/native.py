"""The update on the host: native code if it was built, else the torch reference, with the same bits.

`native.c` is built when the package is installed, if there is a C compiler. The hybrid optimizer has a `HostUpdate`
with threads of its own; callers of `update_on_host` share one per number of threads.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipedejavu.optim.arithmetic import AdamState, Part, Scalars, update_

LIBRARY = Path(__file__).with_name("_native.so")
VERSION = "pdv_adamw_4"
"""The name of the update in the library; it changes with its arguments."""
RESERVED_CORES = 2
"""Cores left for launching kernels and for the data loader."""


class _Scalars(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32 if name == "seed" else ctypes.c_float) for name in Scalars._fields]


_STATE = ("w", "low", "m", "v", "m_scale", "v_scale")
"""The parts of an `AdamState`, as native.c names them."""
_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The numbers of the formats of moments in native.c, by the dtype of the first."""


class _Job(ctypes.Structure):
    _fields_ = [
        ("s", _Scalars),
        ("n", ctypes.c_int64),
        ("is_split", ctypes.c_int),
        ("is_wide", ctypes.c_int),
        ("part", ctypes.c_int),
        ("moments", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("g", *_STATE, *(f"{part}_out" for part in _STATE))),
    ]


class NativeTask(NamedTuple):
    """The update of one parameter from `old` to `new`, which may be the same tensors."""

    s: Scalars
    gradient: Tensor
    old: AdamState
    new: AdamState
    part: Part = Part.ALL
    """What is written; a part only in place."""


def _job(s: Scalars, gradient: Tensor, old: AdamState, new: AdamState, part: Part) -> _Job:
    assert part == Part.ALL or old.m.data_ptr() == new.m.data_ptr()
    for tensor in (gradient, *old, *new):
        assert tensor is None or (tensor.is_contiguous() and tensor.device.type == "cpu")
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in (*old, *new))
    return _Job(
        _Scalars(*s), gradient.numel(), old.low is not None, gradient.dtype == torch.float32, part,
        _FORMATS[old.m.dtype], gradient.data_ptr(), *addresses,
    )  # fmt: skip


@cache
def library() -> ctypes.CDLL | None:
    """Returns the native library, or None if it was not built."""
    if not LIBRARY.exists():
        return None
    native = ctypes.CDLL(str(LIBRARY))
    if not hasattr(native, VERSION):  # built from an older source
        return None
    native.pdv_start.restype = ctypes.c_void_p
    native.pdv_start.argtypes = [ctypes.c_int]
    native.pdv_stop.argtypes = [ctypes.c_void_p]
    native.pdv_adamw_4.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Job), ctypes.c_int]
    native.pdv_zero.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return native


class HostUpdate:
    """The update on the host, with a thread pool of its own."""

    def __init__(self, num_threads: int | None = None, *, is_native: bool | None = None):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.num_threads = num_threads or max(1, cores - RESERVED_CORES)
        self._library = library() if is_native is not False else None
        if is_native and self._library is None:
            raise RuntimeError(f"{LIBRARY} was not built; install the package where there is a C compiler")
        self.num_updated, self.busy_s = 0, 0.0
        self._lock = threading.Lock()
        """Serialises calls of the pool: memory may be zeroed while updates run."""
        self._pool = self._library.pdv_start(self.num_threads) if self._library else None

    @property
    def is_native(self) -> bool:
        """Whether the native library is used."""
        return self._library is not None

    def __call__(self, tasks: Sequence[NativeTask]) -> None:
        """Updates several parameters, which must not share memory."""
        started = time.perf_counter()
        if self._library is None:
            for task in tasks:
                update_(*task)
        else:
            jobs = (_Job * len(tasks))(*(_job(*task) for task in tasks))
            with self._lock:
                self._library.pdv_adamw_4(self._pool, jobs, len(tasks))
        self.busy_s += time.perf_counter() - started
        self.num_updated += sum(task.gradient.numel() for task in tasks if task.part != Part.MOMENTS)

    def zero(self, address: int, size_bytes: int, progress: Callable[[int], None] = lambda _: None) -> None:
        """Writes zeros to memory on all threads, so that its pages are mapped."""
        chunk = 2**30
        for start in range(0, size_bytes, chunk):
            size = min(chunk, size_bytes - start)
            if self._library is None:
                ctypes.memset(address + start, 0, size)
            else:
                with self._lock:
                    self._library.pdv_zero(self._pool, address + start, size)
            progress(size)

    def close(self) -> None:
        """Ends the threads."""
        if self._library and self._pool:
            self._library.pdv_stop(self._pool)
            self._pool = None


def update_on_host(tasks: Sequence[NativeTask]) -> None:
    """Updates parameters with as many threads as torch uses; their tensors may have any strides, and be on any device.

    A new weight may be written to the memory of its gradient. All other tensors of different tasks must not overlap.
    """
    flat = []
    for task in tasks:
        if task.gradient.device.type == "cpu" and (view := flattened(task)) is not None:
            flat.append(view)
        else:
            update_(*task)
    if flat:
        _shared(torch.get_num_threads())(flat)


def flattened(task: NativeTask) -> NativeTask | None:
    """Returns a task on one-dimensional views, or None if its tensors do not store their elements in one order."""
    dims = range(task.gradient.dim())
    # Blocks of int8 moments have scales, so their elements are stored in the order of the parameter's.
    is_sorted = task.old.m_scale is None
    order = sorted(dims, key=task.gradient.stride, reverse=True) if is_sorted else [*dims]

    def view(tensor: Tensor) -> Tensor:
        permuted = tensor.permute(order)
        return permuted.view(-1) if permuted.is_contiguous() else tensor

    def viewed(state: AdamState) -> AdamState:
        low = None if state.low is None else view(state.low)
        return state._replace(weight=view(state.weight), low=low, m=view(state.m), v=view(state.v))

    old, new = viewed(task.old), viewed(task.new)
    flat = NativeTask(task.s, view(task.gradient), old, new, task.part)
    views = (flat.gradient, *old, *new)
    is_flat = all(tensor is None or (tensor.dim() == 1 and tensor.is_contiguous()) for tensor in views)
    return flat if is_flat else None


_shared_updates: dict[int, HostUpdate] = {}
_shared_lock = threading.Lock()


def _shared(num_threads: int) -> HostUpdate:
    with _shared_lock:
        if num_threads not in _shared_updates:
            _shared_updates[num_threads] = HostUpdate(num_threads)
        return _shared_updates[num_threads]


def _forget_shared() -> None:
    """Forgets the shared updates in a forked process, which has none of their threads."""
    global _shared_lock
    _shared_lock = threading.Lock()
    _shared_updates.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_shared)
