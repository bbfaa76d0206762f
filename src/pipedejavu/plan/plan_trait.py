"""Traits of a plan that several of its axes have together, and that rules ask for."""

from collections.abc import Sequence

from pipedejavu.plan.axis import in_line
from pipedejavu.plan.plan import Plan


def adds_to_weights(plan: Plan) -> bool:
    """Whether workers change weights by more than updates: they average, pull or push them, or share their memory."""
    reduce = plan.reduce
    return plan.keep.kind == "shared" or reduce.gate == "bound" or reduce.combiner not in ("sum",)


def is_written_out(plan: Plan) -> bool:
    """Whether each row holds every forward once, and its backward once after it."""
    numbers = range(plan.feed.microbatches)
    rows = [row.split() for row in plan.order.rows or ()]
    if len(rows) != plan.place.workers or any(len(row) != 2 * len(numbers) for row in rows):
        return False
    return all(f"F{k}" in row and f"B{k}" in row[row.index(f"F{k}") :] for row in rows for k in numbers)


def has_legal_checkpoints(plan: Plan, units: int) -> bool:
    """Whether checkpoints are rising numbers of units after the first, in a plan that recomputes; or there are none."""
    checkpoints = (0, *(plan.order.checkpoints or ()), units)
    return len(checkpoints) == 2 or (plan.order.has_recompute and [*checkpoints] == sorted({*checkpoints}))


def can_take_turns(plan: Plan) -> bool:
    """Whether each replica of a stage gets a microbatch of every update; if it never drains, as many as the others."""
    replicas, count = plan.place.stage_replicas or (), plan.feed.microbatches
    return not any(count % size if plan.is_flush_free else count < size for size in replicas)


def division_of(plan: Plan) -> str:
    """Returns how a plan divides operators, such as 'pairs/4'; empty if it does not, or differently per stage."""
    sizes = {*plan.degrees, plan.tensor_shards} - {1}
    return f"{division_kind(plan.cut.layouts)}/{sizes.pop()}" if len(sizes) == 1 else ""


def division_kind(layouts: Sequence[str]) -> str:
    """Returns how layouts divide operators: 'pairs', 'sequence+vocabulary', 'context', 'stationary-x' and the like."""
    stationary = [layout for layout in layouts if layout.startswith("stationary")]
    along = [layout for layout in ("sequence", "vocabulary", "context") if layout in layouts]
    return (stationary or ["+".join(along) or "pairs"])[0]


def why_not_divided(plan: Plan) -> str:
    """Returns what keeps the engine from running a plan that divides operators; empty if nothing does."""
    place, reduce = plan.place, plan.reduce
    if plan.tensor_shards == 1 and place.stage_shards is None:
        return ""
    sizes = place.stage_shards or (1,)
    cannot = {
        f"tensor-parallel groups of different sizes ({in_line(sizes)})": len({*sizes}) > 1,
        "order 'ready-first', whose workers choose the order of forwards each for itself": plan.order.kind
        == "ready-first",
        f"wire '{reduce.wire}'": reduce.wire in ("server", "shared-memory", "summation-service"),
        f"keep '{plan.keep.kind}'": plan.keep.kind in ("server", "shared"),
        f"feed '{plan.feed.kind}'": plan.feed.kind in ("share", "mask"),
        "compiled units": plan.is_compiled,
        "a split backward": plan.splits_backward,
        f"{place.cpu_replicas} CPU replicas": place.cpu_replicas > 0,
        "stages with numbers of replicas of their own": place.stage_replicas is not None,
    }
    return next((what for what, asked in cannot.items() if asked), "")
