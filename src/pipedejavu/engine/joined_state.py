"""The whole weights and buffers of one worker's pieces between rounds, whether replicas or a group divide them.

It knows of two divisions, which a piece may both have: state that is divided over replicas (`sharded_state`), and
operators that a group divides (`divided_state`). What the replicas hold is joined first: it is a part for the group.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from pipedejavu.engine.divided_state import PieceReplica, whole_tensors
from pipedejavu.engine.job import Job
from pipedejavu.engine.master import masters_of
from pipedejavu.engine.optimizer import State, Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.sharded_state import ShardedState, whole_masters, whole_slots
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

    def gather_masters(self) -> dict[PieceReplica, Tensors]:
        """Returns the whole masters of pieces that are divided, in host memory; all workers call it together.

        They are gathered once between two rounds.
        """
        if self.whole is None:
            whole = sorted(key for key in self.sharded if not self.runners[key].layouts)
            self.whole = {key: whole_masters(self, key) for key in whole}
            self.whole |= {key: self._gather_parts(key) for key in sorted(self.runners) if self.runners[key].layouts}
        return self.whole

    def _gather_parts(self, key: PieceReplica) -> Tensors:
        """Returns the masters of a piece whose operators are divided, and notes its whole buffers."""
        whole = self.held_masters(key) | self.runners[key].frozen
        for tensor, joined in whole_tensors(self, key):
            (whole if tensor.kind == "weight" else self.whole_buffers)[tensor.name] = joined
        return whole

    def buffers_of(self, key: PieceReplica) -> Iterator[tuple[str, Tensor]]:
        """Yields the persistent buffers of a piece, whole; all workers call it together."""
        if self.runners[key].layouts:
            self.gather_masters()
        for name, buffer in self.runners[key].saved_buffers():
            yield name, self.whole_buffers[name] if name in self.runners[key].layouts else buffer

    def held_masters(self, key: PieceReplica) -> Tensors:
        """Returns the newest masters of a piece, as this worker's group divides them.

        If replicas divide them too, all call it together, and get copies in host memory.
        """
        if key in self.sharded:
            return whole_masters(self, key)
        newest = max(
            (value for value in self.values if value.kind == ValueKind.WEIGHTS and (value.piece, value.replica) == key),
            key=lambda value: value.number,
        )
        return masters_of(self.values[newest], self.applier.state.get(key, {}))

    def held_state(self, key: PieceReplica, slots: tuple[str, ...]) -> State:
        """Returns the optimizer state of a piece, as this worker's group divides it.

        If replicas divide it too, all call it together, and get copies of these slots in host memory.
        """
        if key not in self.sharded:
            return self.applier.state.get(key, {})
        state: State = {}
        for slot, tensors in whole_slots(self, key, slots):
            for name, tensor in tensors.items():
                state.setdefault(name, {})[slot] = tensor
        return state
