"""The next smaller plan after the GPU's memory ran out: what is tried, in which order, and what is said of it.

1. gradients leave the GPU in the first backward pass, if that is what ran out of memory
2. the state of half of the units that have it on the GPU moves to the host, the last ones first
3. all blocks recompute what their backward needs
4. a smaller window; or, before anything rests anywhere, a window of two blocks
"""

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.hybrid.memory_guard import MemoryShortage
from pipedejavu.hybrid.step_scheduler import StepScheduler
from pipedejavu.hybrid.unit_state import UnitState


def shrink_plan(scheduler: StepScheduler, *, is_in_backward: bool) -> str | None:
    """Makes the plan of a scheduler smaller; returns what it did, or None if nothing is left to do."""
    scheduler.synchronize()
    scheduler.placer.forget()
    scheduler.placer.buffer.finish()
    done = _send_gradients(scheduler) if is_in_backward else None
    done = done or _move_state(scheduler) or _recompute(scheduler) or _narrow_window(scheduler)
    scheduler.meter.memory.release()
    return done


def _send_gradients(scheduler: StepScheduler) -> str | None:
    if scheduler.plan is not None or scheduler.meter.sends_all:
        return None
    scheduler.meter.sends_all = True
    return "gradients leave the GPU in the first backward pass"


def _move_state(scheduler: StepScheduler) -> str | None:
    if scheduler.plan is None:
        return None
    for place in ("gpu", "visit"):
        here: list[UnitState] = [unit for unit in scheduler.unit_states if unit.place == place]
        moved = here[len(here) // 2 :]
        if moved and scheduler.placer.move_to_host(moved, scheduler.gradients):
            return f"the state of {len(moved)} units moves from the GPU to the host"
    return None


def _recompute(scheduler: StepScheduler) -> str | None:
    blocks = [unit_state for unit_state in scheduler.unit_states if unit_state.unit.is_block]
    if not blocks or scheduler.options.activations == "recompute":
        return None
    scheduler.recompute_all()
    return f"the {len(blocks)} blocks recompute what their backward needs"


def _narrow_window(scheduler: StepScheduler) -> str | None:
    window = scheduler.window
    if window is None or window.size <= 1:
        return None
    window.clear()
    window.size = min(window.size - 1, 2)
    return f"the window holds {window.size} blocks"


def describe_shortage(shortage: MemoryShortage, done: str) -> str:
    """Returns the sentence for a shortage that a smaller plan follows."""
    when = "backward" if shortage.is_in_backward else "forward"
    return (
        f"the GPU's memory ran out in the {when} pass of one of the first steps"
        f" ({format_bytes(shortage.requested_bytes)} beside {format_bytes(shortage.allocated_bytes)}); the pass is"
        f" repeated with a smaller plan: {done}"
    )


def refusal_of(shortage: MemoryShortage, limit_bytes: int) -> InputError:
    """Returns the error for a shortage that no smaller plan is left for."""
    return InputError(
        f"the smallest plan does not fit into the GPU: it needs {format_bytes(shortage.requested_bytes)} beside"
        f" {format_bytes(shortage.allocated_bytes)} and may reserve {format_bytes(limit_bytes)}; a budget of"
        f" {shortage.needed_bytes} bytes is the least that could do: give more (gpu_budget, or the process's memory"
        " fraction), or smaller microbatches, shorter sequences or activations='recompute' and a window"
    )
