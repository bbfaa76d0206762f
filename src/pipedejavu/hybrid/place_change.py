"""Moves the state of units to other places between steps, with every bit: memory of the new place, then a copy.

No update may be running, and no gradient of a step may have come.
"""

from collections.abc import Callable

from pipedejavu.hybrid.param_state import ParamState
from pipedejavu.hybrid.placement import Place
from pipedejavu.hybrid.streamed_state import StreamedState
from pipedejavu.hybrid.unit_state import UnitState
from pipedejavu.optim.arithmetic import AdamState

Allocate = Callable[[UnitState, Place], None]


def change_places(
    unit_states: list[UnitState], places: list[Place], streamed: dict[int, StreamedState], allocate: Allocate
) -> int:
    """Moves each unit whose place changes; returns how many do. `allocate` settles a unit in its place.

    State that leaves the GPU goes first, so that what comes finds memory.
    """
    moves = [(unit, place) for unit, place in zip(unit_states, places, strict=True) if unit.place != place]
    for unit_state, place in sorted(moves, key=lambda move: move[1] == "gpu"):
        _move(unit_state, place, streamed, allocate)
    return len(moves)


def _move(unit_state: UnitState, place: Place, streamed: dict[int, StreamedState], allocate: Allocate) -> None:
    before: dict[ParamState, AdamState | None] = {param: param.state for param in unit_state.params}
    leaves = unit_state.empty()
    was_streamed = streamed.pop(unit_state.index, None)  # owns host memory until its state is copied
    allocate(unit_state, place)
    for param, old in before.items():
        assert old is not None
        assert param.state is not None
        for target, value in zip(param.state[1:], old[1:], strict=True):  # the weights are those of the model
            if target is not None and value is not None:
                target.copy_(value)
    del leaves, was_streamed
