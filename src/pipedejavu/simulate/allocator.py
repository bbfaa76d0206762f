"""A model of PyTorch's caching allocator: allocated bytes after rounding, and reserved bytes.

Sizes are rounded up to 512 bytes. Memory comes from the driver in segments: of 2 MiB for tensors up to 1 MiB, of 20 MiB
for those below 10 MiB, and of the tensor's own size, rounded up to 2 MiB, for the rest. A tensor takes the smallest
free block that holds it; the block is split if enough is left, and a freed block merges with its free neighbours.
Segments stay reserved until the limit is reached; then those that are wholly free go back to the driver.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from pipedejavu.facts import InputError, format_bytes

MIB = 2**20
_ROUND = 512
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_LARGE, _LARGE_SEGMENT, _LARGE_ROUND = 10 * MIB, 20 * MIB, 2 * MIB
_NUMBER_BITS = 40
"""Bits of a block's number in its key."""


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A contiguous part of a segment."""

    number: int
    size: int
    is_small: bool
    is_free: bool = False
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None


class Allocator:
    """The allocator of one device; it reserves at most `limit_bytes`."""

    def __init__(self, limit_bytes: float = float("inf")):
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._free: dict[bool, list[int]] = {True: [], False: []}
        """Keys of the free blocks of small and of large segments, by size and age."""
        self._blocks: dict[int, MemoryBlock] = {}
        """The free blocks by key."""
        self._count = 0

    def take(self, size_bytes: float) -> MemoryBlock:
        """Returns a block for a tensor; raises InputError if the limit would be exceeded."""
        size = _rounded(size_bytes, _ROUND)
        is_small = size <= _SMALL
        free = self._free[is_small]
        at = bisect_left(free, size << _NUMBER_BITS)
        block = self._blocks.pop(free.pop(at)) if at < len(free) else self._reserve(size, is_small)
        rest = block.size - size
        if rest >= _ROUND if is_small else rest > _SMALL:
            self._divide(block, size)
        block.is_free = False
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def give_back(self, block: MemoryBlock) -> None:
        """Frees a block."""
        self.allocated_bytes -= block.size
        before, after = block.before, block.after
        if before is not None and before.is_free:
            self._remove(before)
            block = self._join(before, block)
        if after is not None and after.is_free:
            self._remove(after)
            block = self._join(block, after)
        self._add(block)

    def _reserve(self, size: int, is_small: bool) -> MemoryBlock:
        segment = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT if size < _LARGE else _rounded(size, _LARGE_ROUND)
        if self.reserved_bytes + segment > self.limit_bytes:
            self._release()
        if self.reserved_bytes + segment > self.limit_bytes:
            raise InputError(
                f"a tensor of {format_bytes(size)} does not fit: {format_bytes(self.reserved_bytes)} of"
                f" {format_bytes(self.limit_bytes)} are in use; use smaller microbatches"
            )
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return self._made(segment, is_small)

    def _release(self) -> None:
        """Returns wholly free segments to the driver."""
        whole = {key for key, block in self._blocks.items() if block.before is None and block.after is None}
        self.reserved_bytes -= sum(self._blocks.pop(key).size for key in whole)
        for free in self._free.values():
            free[:] = [key for key in free if key not in whole]

    def _made(self, size: int, is_small: bool) -> MemoryBlock:
        self._count += 1
        return MemoryBlock(self._count, size, is_small)

    def _divide(self, block: MemoryBlock, size: int) -> None:
        rest = self._made(block.size - size, block.is_small)
        rest.before, rest.after, block.size = block, block.after, size
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        self._add(rest)

    def _join(self, first: MemoryBlock, second: MemoryBlock) -> MemoryBlock:
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _add(self, block: MemoryBlock) -> None:
        block.is_free = True
        key = block.size << _NUMBER_BITS | block.number
        self._blocks[key] = block
        insort(self._free[block.is_small], key)

    def _remove(self, block: MemoryBlock) -> None:
        key, free = block.size << _NUMBER_BITS | block.number, self._free[block.is_small]
        del self._blocks[key], free[bisect_left(free, key)]


def _rounded(size_bytes: float, to: int) -> int:
    return max(1, -(-int(size_bytes) // to)) * to


@dataclass(frozen=True)
class Footprint:
    """The peaks of an allocator."""

    allocated_bytes: int
    reserved_bytes: int


def replay(stays: Iterable[tuple[float, float, list[float]]], limit_bytes: float = float("inf")) -> Footprint:
    """Returns the footprint of tensors, given rows of birth, death and sizes.

    At equal times, to the nanosecond, tensors are freed before others are allocated: sums of times differ in their last
    digits. Raises InputError if the limit would be exceeded.
    """
    allocator = Allocator(limit_bytes)
    held: dict[int, list[MemoryBlock]] = {}
    events = []
    for number, (birth, death, sizes) in enumerate(stays):
        begin, end = round(birth, 9), round(death, 9)
        if end > begin:
            events += [(begin, 1, number, sizes), (end, 0, number, sizes)]
    for _, comes, number, sizes in sorted(events, key=lambda event: event[:3]):
        if comes:
            held[number] = [allocator.take(size) for size in sizes if size > 0]
        else:
            for block in held.pop(number):
                allocator.give_back(block)
    return Footprint(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
