"""Messages and bytes that a worker sends, by channel and group; collectives count as the algorithms that send least."""

from torch import Tensor

Counts = list[list[int]]
"""The number of rows that each member of a group sends to each member, the same table on all of them."""


class Traffic:
    """The counts of one wire. Each channel and each group is used by one lane, which alone writes its entry."""

    def __init__(self) -> None:
        self._carried: dict[object, tuple[int, int]] = {}

    def total(self) -> tuple[int, int]:
        """Returns the messages and bytes so far."""
        carried = list(self._carried.values())
        return sum(messages for messages, _ in carried), sum(size for _, size in carried)

    def send(self, to: object, messages: int, size_bytes: int) -> None:
        """Counts messages to a worker, or to the members of a group."""
        before = self._carried.get(to, (0, 0))
        self._carried[to] = before[0] + messages, before[1] + size_bytes

    def add_up(self, group: object, size: int, vector: Tensor) -> None:
        """Counts the all-reduce of a vector over `size` members, as a ring."""
        self.send(group, 2 * (size - 1), 2 * (size - 1) * vector.nbytes // size)

    def reduce_scatter(self, group: object, size: int, vector: Tensor) -> None:
        """Counts the runs of a vector that are summed on other members."""
        self.send(group, size - 1, (size - 1) * vector.nbytes // size)

    def all_gather(self, group: object, size: int, run: Tensor) -> None:
        """Counts a run that all other members get."""
        self.send(group, size - 1, (size - 1) * run.nbytes)

    def all_to_all(self, group: object, position: int, rows: Tensor, counts: Counts) -> None:
        """Counts the rows that the member at a position sends to others."""
        others = [count for other, count in enumerate(counts[position]) if other != position]
        row_bytes = rows.nbytes // len(rows) if len(rows) else 0
        self.send(group, len(others), sum(others) * row_bytes)


def even_counts(size: int, num_rows: int) -> Counts:
    """Returns the table of an all-to-all in which each of `size` members sends equal parts of `num_rows` rows."""
    if num_rows % size:
        raise ValueError(f"{num_rows} rows cannot be divided evenly over {size} members; pad them")
    return [[num_rows // size] * size] * size
