"""Activations whose sequence is divided: each rank has some consecutive tokens of each sample.

Which dimension of a tensor is the sequence follows from the attentions: from that of their queries, keys and values it
spreads over the recorded operations, both ways. An operation that needs the whole sequence is computed alike on all
ranks, on tensors that are gathered first. Inside of regions that divide heads or columns the sequence is whole: there,
tensors are gathered when they enter, and sums are scattered when they leave.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import fx

from pipedejavu.runtime.axis_region import GraphChain, Region
from pipedejavu.runtime.axis_rule import Axes, argument, name_of, shape_of
from pipedejavu.runtime.loss_rule import LOSS, SEQUENCE_RULES, Rules
from pipedejavu.runtime.reshape_rule import Split, UndividedError

ATTENTION = "scaled_dot_product_attention"
DROPOUTS = frozenset(("dropout", "dropout_", ATTENTION))
"""Random operations whose masks can be drawn whole and divided."""


@dataclass
class SequenceRegion(Region):
    """The activations of a chain that are divided along the sequence; `splits` are those that each rank has a part of.

    Parameters stay whole: their gradients are summed over the ranks if an operation on parts reads them.
    """

    rules: Rules = field(default_factory=lambda: SEQUENCE_RULES)
    labels: dict[fx.Node, Split] = field(default_factory=dict)
    """Where the sequence is in every tensor that has one; of some of them, all ranks have the whole."""
    whole: set[fx.Node] = field(default_factory=set)
    """Operations that all ranks compute alike."""
    asked: dict[tuple[fx.Node, fx.Node], Split] = field(default_factory=dict)
    """By operation and parameter or buffer, the part that the operation reads."""
    _journal: list[fx.Node] = field(default_factory=list)
    _now: fx.Node | None = None

    def spread(self, inner: Sequence[Region]) -> None:
        """Divides all that can be divided, around the regions that divide operators."""
        for node in self.chain.unit_of:
            if name_of(node) == ATTENTION and _axes_of(self, node) is not None:
                self._try(node, Split(2, (shape_of(node)[2],)))
        while self._queue:
            self._spread(self._queue.pop())
        self.labels, self.splits = self.splits, {}
        sums = {node for region in inner for node in region.sums if name_of(node) != LOSS}
        taken = {node for region in inner for node in region.nodes}
        for node in self.chain.unit_of:
            split = self.labels.get(node)
            if split is None or not node.meta["val"].requires_grad:
                continue
            if node.op == "placeholder":
                is_part = self.chain.before.get(node) in self.splits
            else:
                is_part = node in sums if node in taken else self.runs(node)
            if is_part:
                self.splits[node] = split

    def runs(self, node: fx.Node) -> bool:
        """Whether an operation outside of other regions runs on parts."""
        if "getitem" in str(node.target):
            source = node.args[0]
            return isinstance(source, fx.Node) and self.runs(source)
        return node in self.operations and node not in self.whole

    def part_for(self, operation: fx.Node, used: fx.Node) -> Split | None:
        """Returns the part of a whole tensor that an operation on parts reads; None if it reads the whole."""
        if name_of(operation) == ATTENTION and used is argument(operation, "attn_mask"):
            return None
        return self.asked.get((operation, used), self.labels.get(used))

    def _spread(self, node: fx.Node) -> None:
        split = self.splits[node]
        if node in self.chain.before:
            self._try(self.chain.before[node], split)
        for target in self.chain.after.get(node, ()):
            self._try(target, split)
        for operation in (node, *node.users):
            if operation.op == "call_function":
                self._apply(operation)

    def _try(self, node: fx.Node, split: Split) -> None:
        with suppress(UndividedError):
            self._place(node, split)

    def _place(self, node: fx.Node, split: Split) -> None:
        if node not in self.splits:
            self._journal.append(node)
        super()._place(node, split)

    def _ask(self, node: fx.Node, split: Split) -> None:
        if node.op != "get_attr":
            self._place(node, split)
            return
        if any(part % self.size for part in split.parts):
            raise UndividedError(f"{split.parts} cannot be divided by {self.size}")
        assert self._now is not None
        self.asked[self._now, node] = split

    def _apply(self, node: fx.Node) -> None:
        """Spreads the sequence over an operation; what cannot follow is computed whole."""
        if node in self.whole:
            return
        outer, self._now, begin = self._now, node, len(self._journal)
        try:
            if draws_at_random(node) and name_of(node) not in DROPOUTS:
                raise UndividedError("it draws random numbers")
            super()._apply(node)
            if node in self.sums and name_of(node) != LOSS:
                raise UndividedError("it sums over the sequence")
        except UndividedError:
            self.whole.add(node)
            self.sums.discard(node)
            for placed in self._journal[begin:]:
                if self.splits.pop(placed, None) is not None and placed in self._queue:
                    self._queue.remove(placed)
            self.asked = {key: split for key, split in self.asked.items() if key[0] is not node}
        finally:
            del self._journal[begin:]
            self._now = outer

    def _cut_instead(self, node: fx.Node, split: Split) -> None:
        raise UndividedError(f"{node} comes of another tensor than {split}")


def sequence_region(chain: GraphChain, size: int, inner: Sequence[Region]) -> SequenceRegion:
    """Returns the activations of a chain whose sequence is divided over `size` ranks."""
    region = SequenceRegion(chain, size)
    region.spread(inner)
    return region


def sequence_lengths(chain: GraphChain) -> set[int]:
    """Returns the tokens per sample of the attentions of a chain."""
    nodes = [node for node in chain.unit_of if name_of(node) == ATTENTION]
    return {shape_of(node)[2] for node in nodes if len(shape_of(node)) == 4}


def _axes_of(region: SequenceRegion, node: fx.Node) -> Axes | None:
    return region.rules[ATTENTION](node)


def draws_at_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
