"""A worker's state under the model's own names, from which any other plan, placement or number of workers can go on.

    weight/NAME               the weights; a frozen parameter is one without state
    state/SLOT/NAME           optimizer state; slots have the names that torch.optim gives them
    buffer/NAME               running statistics and the like
    replica/2/…/NAME          what is the third replica's own: its buffers and, where replicas make updates of their
                              own, its weights and state

It is taken between rounds, when nothing is in flight. Workers that hold alike weights divide them among themselves.
"""

import re
from collections.abc import Callable

from torch import Tensor

from pipedejavu.engine.device import CPU
from pipedejavu.engine.finite import nonfinite
from pipedejavu.engine.handlers import Handlers, pieces_of
from pipedejavu.engine.optimizer import Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.threads import Threads, final_weights
from pipedejavu.facts import InputError
from pipedejavu.program import Program, Value, ValueKind
from pipedejavu.program.effect import rest_of, update_place
from pipedejavu.program.value import HOST

SLOTS = {"step": "step", "m": "exp_avg", "v": "exp_avg_sq", "momentum": "momentum_buffer"}
"""The optimizers' names of their state, and those of torch."""

Source = Callable[[str], Tensor | None]
"""Returns the tensor of a name, or None where there is none."""


def take_state(own: Handlers) -> Tensors:
    """Returns copies, in host memory, of this worker's share of the state; raises InputError if it is not finite."""
    found = _share(own)
    check_state(own, found)
    return {name: _copy(tensor) for name, tensor in found.items()}


def check_state(own: Handlers, state: Tensors | None = None) -> None:
    """Raises InputError if this worker's share of the state, or what is given of it, is not finite."""
    for full, value in nonfinite(_share(own) if state is None else state):
        *_, kind, name = re.split(r"^(?:replica/\d+/)?(weight|state/[^/]+|buffer)/", full)
        if not kind.startswith("state") and _is_meant(own, name, value):
            continue
        step = own.first_version + own.program.plan.steps
        raise InputError(
            f"{kind} '{name}' on worker {own.index} holds {value} after step {step}, and is not saved; go on from the"
            " last checkpoint with a lower learning rate, or look at the batch of that step"
        )


def _share(own: Handlers) -> Tensors:
    """Returns this worker's share of the state, without copies."""
    found: Tensors = {}
    weights, holders_of = final_weights(own), _holders(own.program)
    for home, runner in own.runners.items():
        piece, replica = home
        for number, name in enumerate(runner.initial):
            prefix = _prefix(own.program, holders_of[piece], (replica, own.index), number)
            if prefix is None:
                continue
            found[f"{prefix}weight/{name}"] = weights[home][name]
            for slot, tensor in own.applier.state.get(home, {}).get(name, {}).items():
                found[f"{prefix}state/{SLOTS[slot]}/{name}"] = tensor
        if (replica, own.index) == holders_of[piece][0]:
            found |= {f"weight/{name}": tensor for name, tensor in runner.frozen.items()}
        for name, buffer in runner.saved_buffers():
            if replica < own.program.num_replicas:
                prefix = "" if replica == holders_of[piece][0][0] else f"replica/{replica}/"
                found[f"{prefix}buffer/{name}"] = buffer
    return found


def final_buffers(own: Handlers) -> Tensors:
    """Returns the buffers of the pieces that a worker holds, by name: those of the replica that stands for all."""
    holders_of = _holders(own.program)
    return {
        name: buffer
        for (piece, replica), runner in own.runners.items()
        if replica == holders_of[piece][0][0]
        for name, buffer in runner.saved_buffers()
    }


def take_norm(own: Handlers) -> float | None:
    """Returns the norm that the next update is clipped by, where that is the last one's."""
    steps = own.program.plan.steps
    is_needed = own.program.plan.reduce.clip == "delayed"
    return own.values.get(Value.norm(steps - 1)) if is_needed else None


def put_state(own: Handlers, update: int, source: Source, norm: float | None = None) -> None:
    """Puts state in the place of what a worker has before its first round; raises InputError where it does not fit.

    `update` is how many updates have made it.
    """
    plan = own.program.plan
    for value, weights in own.values.items():
        if value.kind == ValueKind.WEIGHTS and not _is_idle(own.program, value.replica):
            for name, weight in weights.items():
                known = _needed(name, _find(own, source, value.replica, "weight", name))
                _check_loaded(own, "weight", name, known)
                _fill(f"weight '{name}'", weight.data, known)
    for home, runner in own.runners.items():
        own.applier.state[home] = _state(own, home, runner, source)
        if plan.reduce.gate == "lock":
            own.applier.served[home[0]] = update * own.program.num_replicas
        for name, tensor in runner.frozen.items():
            loaded = _find(own, source, home[1], "weight", name)
            if loaded is None:  # as they were called before
                loaded = _find(own, source, home[1], "buffer", name)
            _fill(f"weight '{name}'", tensor, _needed(name, loaded))
        for name, buffer in runner.saved_buffers():
            loaded = _find(own, source, home[1], "buffer", name)
            if loaded is None:  # what comes from others does not tell buffers from weights
                loaded = source(f"weight/{name}")
            if loaded is not None:
                _check_loaded(own, "buffer", name, loaded)
                _fill(f"buffer '{name}'", buffer, loaded)
    if norm is not None and plan.reduce.clip == "delayed":
        own.values[Value.norm(plan.steps - 1)] = norm


def take_all(threads: Threads) -> Tensors:
    """Returns copies of the state of all workers."""
    return {name: tensor for own in threads.handlers for name, tensor in take_state(own).items()}


def put_all(threads: Threads, update: int, source: Source, norm: float | None = None) -> None:
    """Puts state in the place of what all workers have; their next round begins with this update."""
    for own in threads.handlers:
        put_state(own, update, source, norm)
    threads.updates = update


def _state(own: Handlers, home: tuple[int, int], runner: PieceRunner, source: Source) -> dict[str, Tensors]:
    piece, replica = home
    if own.program.plan.keep.kind == "server" and replica < own.program.num_replicas:
        return {}  # the server makes the updates
    rests_on_host = update_place(own.program, piece) == HOST or rest_of(own.program, piece) == "visit"
    found: dict[str, Tensors] = {}
    for name, weight in runner.initial.items():
        slots = {}
        for slot, torch_name in SLOTS.items():
            loaded = _find(own, source, replica, f"state/{torch_name}", name)
            if loaded is not None:
                is_scalar = slot == "step"
                if not is_scalar and loaded.shape != weight.shape:
                    raise InputError(f"'{torch_name}' of '{name}' is {_form(loaded)}, and the weight {_form(weight)}")
                slots[slot] = loaded.to(CPU if rests_on_host or is_scalar else own.device, copy=True)
        if slots:
            wanted = own.job.optimizer.slots
            if slots.keys() != wanted:
                names = [" and ".join(sorted(SLOTS[slot] for slot in some)) or "nothing" for some in (slots, wanted)]
                raise InputError(f"the checkpoint keeps {names[0]} of '{name}', and this optimizer {names[1]}")
            found[name] = slots
    return found


def _needed(name: str, loaded: Tensor | None) -> Tensor:
    if loaded is None:
        raise InputError(f"the checkpoint has no weight '{name}'; it is of another model")
    return loaded


def _find(own: Handlers, source: Source, replica: int, kind: str, name: str) -> Tensor | None:
    """Looks for a replica's own tensor, then for that of all; a tied weight may be there under its other name."""
    tied = next((sorted(tie - {name}) for tie in (*own.job.ties, *own.job.frozen_ties) if name in tie), [])
    # Replicas that share every update must begin alike, whatever plan the checkpoint is of.
    has_own = own.program.plan.feed.kind == "own" or kind == "buffer"
    for known in (name, *tied):
        for prefix in (f"replica/{replica}/", "") if has_own else ("",):
            found = source(f"{prefix}{kind}/{known}")
            if found is not None:
                return found
    return None


def _check_loaded(own: Handlers, kind: str, name: str, loaded: Tensor) -> None:
    for _, value in nonfinite({name: loaded}):
        if not _is_meant(own, name, value):
            raise InputError(
                f"{kind} '{name}' of the checkpoint holds {value}; go on from an earlier checkpoint, or begin again"
            )


def _is_meant(own: Handlers, name: str, value: float) -> bool:
    return any(runner.is_meant(name, value) for runner in own.runners.values())


def _fill(what: str, target: Tensor, loaded: Tensor) -> None:
    if loaded.shape != target.shape:
        raise InputError(f"{what} is {_form(loaded)} in the checkpoint and {_form(target)} in the model")
    target.copy_(loaded)


def _form(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _holders(program: Program) -> dict[int, list[tuple[int, int]]]:
    """Returns the (replica, worker) pairs that hold each piece, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for worker in range(len(program.workers)):
        for piece, replica in pieces_of(program, worker):
            found.setdefault(piece, []).append((replica, worker))
    return {piece: sorted(pairs) for piece, pairs in found.items()}


def _prefix(program: Program, holders: list[tuple[int, int]], own: tuple[int, int], number: int) -> str | None:
    """Returns under which prefix a holder keeps the n-th weight of a piece, or None where another one does."""
    is_on_server = holders[-1][0] == program.num_replicas and not _is_idle(program, holders[-1][0])
    source = holders[-1] if is_on_server else holders[0]
    if program.plan.feed.kind != "own":  # all have the same weights, but state only where updates are made
        source = source if is_on_server else holders[number % len(holders)]
        return "" if own == source else None
    if _is_idle(program, own[0]):
        return None
    return "" if own == source else f"replica/{own[0]}/"


def _is_idle(program: Program, replica: int) -> bool:
    """Whether weights are those of a server that adds up waves, and never has newer ones."""
    return program.plan.reduce.gate == "bound" and replica == program.num_replicas


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(CPU, copy=True)
