"""Traits of a plan that several of its axes have together, and that rules ask for."""

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
