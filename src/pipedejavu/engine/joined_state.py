"""The whole weights and buffers of one worker's pieces between rounds, whether replicas or a group divide them.

It knows of two divisions: state that is divided over replicas (`sharded_state`), and operators that a group divides
(`divided_state`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from pipedejavu.engine.divided_state import PieceReplica, whole_tensors
from pipedejavu.engine.job import Job
from pipedejavu.engine.master import masters_of
from pipedejavu.engine.optimizer import State, Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.sharded_state import ShardedState, whole_masters
from pipedejavu.engine.tensor_parallel import DividedStages
from pipedejavu.program import Program, Value, ValueKind


class JoinedState(ShardedState):
    """The pieces of one worker, with what other workers hold of them."""

    program: Program
    job: Job
    index: int
    runners: dict[PieceReplica, PieceRunner]
    values: dict[Value, Any]

    def __init__(self) -> None:
        super().__init__()
        self.divided: DividedStages | None = None
        """What this worker computes of divided operators."""
        self.whole_buffers: Tensors = {}
        """The buffers of divided operators, as `gather_masters` has joined them."""

    @property
    def recorded_job(self) -> Job:
        """The job whose units must know the shapes of all microbatches."""
        return self.job if self.divided is None else self.divided.divisions.job

    @property
    def shard_state(self) -> Mapping[PieceReplica, State]:
        """The optimizer state of this worker's shards."""
        return self.applier.state

    def gather_masters(self) -> dict[PieceReplica, Tensors]:
        """Returns the whole masters of pieces that are divided, in host memory; all workers call it together.

        They are gathered once between two rounds.
        """
        if self.whole is None:
            self.whole = {key: whole_masters(self, key) for key in sorted(self.sharded)}
            self.whole |= {key: self._gather_parts(key) for key in sorted(self.runners) if self.runners[key].layouts}
        return self.whole

    def _gather_parts(self, key: PieceReplica) -> Tensors:
        """Returns the masters of a piece whose operators are divided, and notes its whole buffers."""
        whole = self.held_masters(key) | self.runners[key].frozen
        for tensor, joined in whole_tensors(self, key, has_state=False):
            (whole if tensor.kind == "weight" else self.whole_buffers)[tensor.name] = joined
        return whole

    def buffers_of(self, key: PieceReplica) -> Iterator[tuple[str, Tensor]]:
        """Yields the persistent buffers of a piece, whole; all workers call it together."""
        if self.runners[key].layouts:
            self.gather_masters()
        for name, buffer in self.runners[key].saved_buffers():
            yield name, self.whole_buffers[name] if name in self.runners[key].layouts else buffer

    def held_masters(self, key: PieceReplica) -> Tensors:
        """Returns the newest masters of a piece, as this worker has them."""
        newest = max(
            (value for value in self.values if value.kind == ValueKind.WEIGHTS and (value.piece, value.replica) == key),
            key=lambda value: value.number,
        )
        return masters_of(self.values[newest], self.applier.state.get(key, {}))
