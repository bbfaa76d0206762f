"""A piece whose state is divided over replicas (ZeRO): this worker's shards, and the whole weights in one buffer.

The whole weights of a piece are always the same tensors, views of a buffer. Under ZeRO-3 the buffer has memory only
from a GATHER to the next DROP, and tensors that autograd has saved see the weights of the next GATHER. That is legal
because the plan is synchronous: all microbatches in flight read one version.
"""

from collections.abc import Collection, Iterator
from itertools import groupby

from torch import Tensor

from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.shard_layout import ShardLayout
from pipedejavu.engine.wire import Wire
from pipedejavu.program import Program, ValuePlace
from pipedejavu.program.effect import update_place
from pipedejavu.program.program import stage_group
from pipedejavu.program.value import SHARD


def is_sharded(program: Program, piece: int) -> bool:
    """Whether the state of a piece is divided over the replicas of its stage."""
    place: ValuePlace = update_place(program, piece)
    return place == SHARD


class ShardedPiece:
    """One worker's part of a piece of a replica."""

    def __init__(self, program: Program, worker: int, piece: int, weights: Tensors, ties: Collection[Collection[str]]):
        """Takes the weights, which it copies; `ties` are the names of parameters that several pieces share."""
        stage = program.pieces[piece].stage
        self.group, self.zero = stage_group(stage, program.shard_of(worker)), program.plan.zero_of(stage)
        members = sorted(program.groups[self.group].workers)
        self.members, self.position = members, members.index(worker)
        kinds = {
            name: (str(w.dtype), next((n for n, tie in enumerate(ties) if name in tie), -1))
            for name, w in weights.items()
        }
        in_order = sorted(weights, key=lambda name: kinds[name])  # stable, and alike on all members
        self.layouts = [
            ShardLayout({name: weights[name].shape for name in names}, len(members), self.position)
            for _, names in groupby(in_order, lambda name: kinds[name])
        ]
        self.wholes = [layout.flatten(weights) for layout in self.layouts]
        self.shards = [layout.shard(flat) for layout, flat in self._pairs(self.wholes)]
        self.leaves: Tensors = {}
        """The whole weights, as autograd leaves."""
        views = {name: view for layout, flat in self._pairs(self.wholes) for name, view in layout.views(flat).items()}
        for name in weights:
            # Its own version counter: autograd need not know that a buffer was filled again.
            self.leaves[name] = views[name].data.requires_grad_()
        if self.zero == 3:
            self.shards = [shard.clone() for shard in self.shards]
            self.drop()

    def _pairs(self, vectors: list[Tensor]) -> Iterator[tuple[ShardLayout, Tensor]]:
        return zip(self.layouts, vectors, strict=True)

    @property
    def parts(self) -> Tensors:
        """The parts of parameters in this worker's shards, each as a vector."""
        return self._parts_of(self.shards)

    def _parts_of(self, shards: list[Tensor]) -> Tensors:
        return {name: part for layout, shard in self._pairs(shards) for name, part in layout.parts(shard).items()}

    def part(self, name: str, whole: Tensor) -> Tensor | None:
        """Returns what this worker holds of a parameter's tensor, as a vector; None if it holds nothing of it."""
        return next(layout.part(name, whole) for layout in self.layouts if name in layout.shapes)

    def gather(self, wire: Wire) -> Tensors:
        """Fills the buffer with the shards of all members; returns the whole weights."""
        for (layout, flat), shard in zip(self._pairs(self.wholes), self.shards, strict=True):
            size_bytes = layout.size * layout.length * flat.itemsize
            if flat.untyped_storage().nbytes() != size_bytes:  # resizing copies even to the same size
                flat.untyped_storage().resize_(size_bytes)
            wire.all_gather(shard, self.group, out=flat)
        return self.leaves

    def drop(self) -> None:
        """Frees the memory of the whole weights, also for tensors that autograd has saved."""
        for flat in self.wholes:
            flat.untyped_storage().resize_(0)

    def reduce(self, gradients: Tensors, wire: Wire) -> Tensors:
        """Returns this worker's parts of the gradients, summed over all members.

        Under ZeRO-1 they are in the memory of the whole gradients, which stays until the update.
        """
        shards = []
        for layout in self.layouts:
            flat = layout.flatten(gradients)
            shard = wire.reduce_scatter(flat, self.group)
            shards.append(layout.shard(flat).copy_(shard) if self.zero == 1 else shard)
        return self._parts_of(shards)

    def load(self, name: str, whole: Tensor) -> None:
        """Replaces the values of a parameter, in the shard and in the buffer if that is filled."""
        if self.zero < 3:
            self.leaves[name].data.copy_(whole)
        elif (part := self.part(name, whole)) is not None:
            self.parts[name].copy_(part)
