"""Chooses what a plan leaves `auto` of state and weights on the host: the window, and the pieces on the device.

Candidates are compared by the time that an update is estimated to take; of equal ones the choice needs the least memory
of the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from pipedejavu.facts import format_seconds
from pipedejavu.plan import Decision
from pipedejavu.program.offload_time import OffloadTime
from pipedejavu.program.program import Program

CLOSE = 1.001
"""Times up to this multiple of the shortest count as equal."""
COARSE = 48
"""About how many numbers of a long range are compared at first."""


def resolve_offload(program: Program) -> Program:
    """Returns the program with the window, or the pieces on the device, that the plan leaves `auto`, and the reason."""
    keep = program.plan.keep
    if keep.window == "auto":
        choice, reason = _choose_window(OffloadTime(program))
        keep, text = keep.replace(window=choice), f"a window of {choice}"
    elif keep.device_pieces == "auto":
        choice, reason = _choose_device_pieces(OffloadTime(program))
        keep, text = keep.replace(device_pieces=choice), f"the state of {choice} pieces per stage on the device"
    else:
        return program
    decision = Decision(axis="keep", choice=text, reason=reason)
    plan = program.plan.replace(keep=keep, decisions=(*program.plan.decisions, decision))
    return replace(program, plan=plan)


def _choose_window(model: OffloadTime) -> tuple[int, str]:
    """Returns the smallest window that hides as much of the copies as any that fits."""
    ahead, most = model.plan.order.prefetch, max(len(pieces) for pieces in model.program.pieces_on)
    held = max((count for count in range(1, most + 1) if _fits(model, window=count + ahead)), default=1)
    choice, seconds = _least(1, held, lambda count: model.seconds(count, 0))
    limit = "" if held == most else ", the widest that the device holds,"
    smaller = f"; with {choice - 1} it is {format_seconds(model.seconds(choice - 1, 0))}" if choice > 1 else ""
    return choice, (
        f"no wider window hides more of the copies: an update is estimated at {format_seconds(seconds[choice])}, with a"
        f" window of {held}{limit} at {format_seconds(seconds[held])}{smaller}"
    )


def _choose_device_pieces(model: OffloadTime) -> tuple[int, str]:
    """Returns the fewest pieces, counted from the first, whose state on the device makes the update shortest."""
    most = max(model.position) + 1
    held = max((count for count in range(most + 1) if _fits(model, device_pieces=count)), default=0)
    choice, seconds = _least(0, held, lambda count: model.seconds(1, count))
    limit = "" if held == most else ", which is all that it holds"
    return choice, (
        "the host's other updates end before the next forwards that read them, as far as any choice lets them: an"
        f" update is estimated at {format_seconds(seconds[choice])}, with all state on the host at"
        f" {format_seconds(seconds[0])}, and with {held} on the device{limit}, at {format_seconds(seconds[held])}"
    )


def _least(first: int, last: int, seconds_of: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """Returns the smallest number whose time is close to the shortest, with the times that were compared.

    Of a long range some numbers are compared, then the neighbours of the best and of the smallest that is close.
    """
    step = max(1, (last - first) // COARSE)
    seconds = {number: seconds_of(number) for number in {*range(first, last + 1, step), last}}
    for choose in (_shortest, _smallest):
        near = choose(seconds)
        seconds |= {n: seconds_of(n) for n in range(max(first, near - step), min(last, near + step) + 1)}
    return _smallest(seconds), seconds


def _shortest(seconds: Mapping[int, float]) -> int:
    return min(seconds, key=lambda number: (seconds[number], number))


def _smallest(seconds: Mapping[int, float]) -> int:
    limit = CLOSE * min(seconds.values())
    return min(number for number, time_s in seconds.items() if time_s <= limit)


def _fits(model: OffloadTime, *, window: int | None = None, device_pieces: int = 0) -> bool:
    """Whether each device is estimated to hold its weights, or a window of them, its gradients, state and activations.

    Counts activations of one microbatch, and no temporary memory; `verify` counts all of it.
    """
    program = model.program
    for worker in model.workers:
        device = program.machine.device(program.devices[worker])
        pieces = [program.pieces[number] for number in sorted(program.pieces_on[worker])]
        weights = [sum(program.profile.units[u].parameter_bytes for u in piece.units) for piece in pieces]
        size: float = sum(sorted(weights, reverse=True)[:window])
        for number, piece in zip(sorted(program.pieces_on[worker]), pieces, strict=True):
            for unit in (program.profile.units[u] for u in piece.units):
                if window is None and model.position[number] < device_pieces:
                    size += unit.optimizer_bytes + unit.gradient_bytes
            if program.plan.keep.activations == "device":
                kept = [program.profile.units[u] for u in piece.units if u not in program.recomputed[number]]
                size += sum(unit.activation_bytes for unit in kept) * max(program.sizes)
        if size > device.memory_bytes - device.reserved_bytes:
            return False
    return True
