"""Microbatches of which a thread reads the next one while the present one is trained on.

With `pins` their tensors are in pinned memory, from which a copy to a GPU does not make the host wait for the stream.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from pipedejavu.engine.batch_loader import ReadableAhead

_Read = tuple[Any, Any]
"""Inputs and targets."""


class ReadAhead:
    """Reads microbatches in order, one ahead, up to the microbatch `end`; any other is read when it is asked for."""

    def __init__(self, batches: ReadableAhead, end: int, *, pins: bool = False):
        self.batches, self.end, self.pins = batches, end, pins
        self._pool = ThreadPoolExecutor(1, "read-ahead")
        self._present: tuple[int, _Read] | None = None
        self._next: tuple[int, Future[_Read]] | None = None

    def inputs(self, microbatch: int) -> Any:
        """Returns the inputs of a microbatch."""
        return self._get(microbatch)[0]

    def targets(self, microbatch: int) -> Any:
        """Returns the targets of a microbatch."""
        return self._get(microbatch)[1]

    def length(self, microbatch: int) -> int:
        """Returns the number of samples."""
        return self.batches.length(microbatch)

    def count(self, microbatch: int) -> int:
        """Returns the number of samples or tokens that count."""
        return self.batches.count(microbatch)

    @property
    def num_changes(self) -> int:
        """How often the sizes of later microbatches have changed."""
        return self.batches.num_changes

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _get(self, microbatch: int) -> _Read:
        if self._present is None or self._present[0] != microbatch:
            is_next = self._next is not None and self._next[0] == microbatch
            read = self._next[1].result() if self._next is not None and is_next else self._read(microbatch)
            self._present, self._next = (microbatch, read), None
            if 0 <= microbatch < self.end - 1:
                self._next = microbatch + 1, self._pool.submit(self._read, microbatch + 1)
        return self._present[1]

    def _read(self, microbatch: int) -> _Read:
        read = self.batches.inputs(microbatch), self.batches.targets(microbatch)
        return pytree.tree_map_only(Tensor, _pinned, read) if self.pins else read


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
