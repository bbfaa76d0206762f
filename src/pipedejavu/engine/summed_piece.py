"""Which pieces sum gradients: only their sums need more bits than the gradients themselves."""

from collections import Counter

from pipedejavu.program import ActionKind, Program, ValueKind


def is_summed(program: Program, index: int, key: tuple[int, int]) -> bool:
    """Whether an update of a (piece, replica) sums gradients of several microbatches, or of several workers."""
    backwards = (ActionKind.BACKWARD, ActionKind.WEIGHT_BACKWARD)
    updates = Counter[int]()
    for a in program.workers[index].actions:
        if a.what == ValueKind.WEIGHT_GRADIENT and a.kind in (ActionKind.REDUCE, ActionKind.SEND, ActionKind.RECV):
            return True
        if (a.piece, a.replica) == key and a.kind in backwards:
            updates[a.microbatch // program.update_size] += 1
    return max(updates.values(), default=0) > 1
