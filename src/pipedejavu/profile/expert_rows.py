"""Counts the rows that a unit's experts take: what a plan that divides the experts sends to other workers."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipedejavu.profile.segment import Segment
from pipedejavu.runtime.expert_span import find_spans
from pipedejavu.runtime.stacked_experts import expert_layouts, parameter_shapes, slot_experts


class ExpertRows(NamedTuple):
    """The rows that experts take for one microbatch."""

    num_rows: int
    size_bytes: int


def num_experts(unit: nn.Module) -> int:
    """Returns the fewest experts that one of a unit's parameters stacks; 0 if it has none."""
    return min((layout.shape[0] for layout in expert_layouts(unit).values()), default=0)


def expert_share(unit: nn.Module) -> float:
    """Returns the share of a unit's parameters that belongs to experts."""
    total = sum(p.numel() for p in unit.parameters())
    return sum(prod(layout.shape) for layout in expert_layouts(unit).values()) / total if total else 0.0


@contextmanager
def counted_rows(unit: nn.Module, value: Any) -> Iterator[dict[str, ExpertRows]]:
    """Yields the number and bytes of the rows that each of a unit's experts take, once the unit has run on a value."""
    rows: dict[str, ExpertRows] = {}
    if isinstance(unit, Segment):
        graph = unit.body_for(value).graph
        sizes = {name: p.element_size() for name, p in graph.named_parameters(remove_duplicate=False)}
        for number, span in enumerate(find_spans(graph.graph, parameter_shapes(graph))):
            shape = span.rows.meta["shape"]
            rows[str(number)] = ExpertRows(prod(shape[:-1]), prod(shape) * sizes[str(span.weights[0].target)])
        yield rows
        return

    def note(path: str, args: tuple[Tensor, ...]) -> None:
        rows[path] = ExpertRows(prod(args[0].shape[:-1]), args[0].nbytes)

    handles = [
        part.register_forward_pre_hook(lambda _, args, path=path: note(path, args)) for path, part in slot_experts(unit)
    ]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()
