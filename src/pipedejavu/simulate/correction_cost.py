"""The time that corrections of stale weights add to forwards, backwards and updates, in passes over the weights.

An update by AdamW reads and writes seven arrays of a parameter's size: weight, gradient and two moments, and three of
them again. A correction's passes are assumed to take as long per array.
"""

from pipedejavu.plan.correction_rule import keeps_velocity
from pipedejavu.program import Action, ActionKind, Program

_ARRAYS = 7
_PASSES: dict[str, dict[ActionKind, int]] = {
    # Weights and velocity are read and the extrapolated weights are written; two versions and the velocity are read
    # and the velocity is written.
    "weight-prediction": {ActionKind.FORWARD: 3, ActionKind.UPDATE: 4},
    "discrepancy": {ActionKind.BACKWARD: 3, ActionKind.UPDATE: 4},
    # Both versions and the gradient are read, and the gradient is written.
    "delay-compensation": {ActionKind.UPDATE: 4},
}


def added_updates(program: Program, a: Action) -> float:
    """Returns what a correction adds to an action, in times of the piece's update."""
    plan = program.plan
    passes = _PASSES.get(plan.version.correction, {}).get(a.kind, 0)
    if plan.version.kind == "late":  # all replicas keep a velocity; only late ones predict and compensate
        is_concerned = program.delay_of(a.replica) or (keeps_velocity(plan) and a.kind == ActionKind.UPDATE)
    else:
        is_concerned = program.late_by(a.piece) or not plan.is_flush_free
    return passes / _ARRAYS if is_concerned else 0.0
