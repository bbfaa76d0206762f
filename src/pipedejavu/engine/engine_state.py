"""A worker's state under the model's parameter names, so that any plan and number of workers can resume from it.

    weight/NAME               weights; a frozen parameter has a weight and no state
    state/SLOT/NAME           optimizer state; slots have the names of torch.optim
    buffer/NAME               running statistics and the like
    scale/loss                the loss scale of fp16, saved by the first worker
    replica/2/…/NAME          what only the third replica has: its buffers and, if replicas update separately, its
                              weights and state

State is taken between rounds, when nothing is in flight. Workers that hold the same weights each save a part of them.
State that is divided over replicas is saved as whole tensors too: all workers gather it, one slot of a piece at a time,
and each keeps what it saves.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pipedejavu.engine.device import CPU, moved
from pipedejavu.engine.divided_state import whole_tensors
from pipedejavu.engine.finite import nonfinite
from pipedejavu.engine.handlers import Handlers, pieces_of
from pipedejavu.engine.loss_scale import SAVED
from pipedejavu.engine.master import masters_of, weights_of
from pipedejavu.engine.moment_slots import converted_slots
from pipedejavu.engine.optimizer import LOW, Tensors
from pipedejavu.engine.piece import PieceRunner
from pipedejavu.engine.sharded_state import STEP, whole_masters, whole_slots
from pipedejavu.engine.staleness import VELOCITY, load_velocities
from pipedejavu.engine.threads import Threads, held_weights, put_lows, state_rests_on_host
from pipedejavu.facts import InputError
from pipedejavu.optim.moment_format import num_scales
from pipedejavu.program import Program, Value, ValueKind

SLOTS = {
    "step": "step",
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "m_code": "exp_avg_code",
    "v_code": "exp_avg_sq_code",
    "m_scale": "exp_avg_scale",
    "v_scale": "exp_avg_sq_scale",
    "momentum": "momentum_buffer",
}
"""The names of optimizer state in this package, and those that torch.optim has for it or would."""
_FLAT = {"m_scale", "v_scale"}
"""Slots without one element per weight."""

Source = Callable[[str], Tensor | None]
"""Returns the tensor of a name, or None if there is none."""


def take_state(handlers: Handlers) -> Tensors:
    """Returns copies in host memory of this worker's share of the state; raises InputError if it is not finite.

    Workers that divide state over replicas call it together.
    """
    share = _share(handlers)
    _check(handlers, share | _sharded(handlers))
    copies = {name: _copy(tensor) for name, tensor in share.items()}
    return copies | {name: _copy(tensor) for name, tensor in _gathered(handlers)}


def check_state(handlers: Handlers) -> None:
    """Raises InputError if this worker's share of the state is not finite."""
    _check(handlers, _share(handlers) | _sharded(handlers))


def _check(handlers: Handlers, state: Tensors) -> None:
    for full, value in nonfinite(state):
        *_, kind, name = re.split(r"^(?:replica/\d+/)?(weight|state/[^/]+|buffer)/", full)
        if not kind.startswith("state") and _is_meant(handlers, name, value):
            continue
        step = handlers.first_version + handlers.program.plan.steps
        raise InputError(
            f"{kind} '{name}' on worker {handlers.index} holds {value} after step {step}, and is not saved; go on from"
            " the last checkpoint with a lower learning rate, or look at the batch of that step"
        )


def _share(handlers: Handlers) -> Tensors:
    """Returns this worker's share of the state that is not divided over replicas, without copies."""
    share: Tensors = handlers.scale.saved() if handlers.index == 0 else {}
    weights, holders_of = held_weights(handlers), _holders(handlers)
    for key, runner in handlers.runners.items():
        piece, replica = key
        for number, name in enumerate(runner.initial if key in weights else ()):
            prefix = _prefix(handlers.program, holders_of[piece], (replica, handlers.index), number)
            if prefix is None or name in runner.layouts:
                continue
            share[f"{prefix}weight/{name}"] = weights[key][name]
            for slot, tensor in handlers.applier.state.get(key, {}).get(name, {}).items():
                if slot != LOW:  # the weight is saved as its master
                    share[f"{prefix}state/{SLOTS.get(slot, slot)}/{name}"] = tensor
        if (replica, handlers.index) == holders_of[piece][0]:
            frozen = {name: tensor for name, tensor in runner.frozen.items() if name not in runner.layouts}
            share |= {f"weight/{name}": tensor for name, tensor in frozen.items()}
        for name, buffer in runner.saved_buffers():
            if replica < handlers.program.num_replicas and name not in runner.layouts:
                prefix = "" if replica == holders_of[piece][0][0] else f"replica/{replica}/"
                share[f"{prefix}buffer/{name}"] = buffer
    return share


def _sharded(handlers: Handlers) -> Tensors:
    """Returns the state in this worker's shards."""
    state: Tensors = {}
    for key, shards in handlers.sharded.items():
        parts = masters_of(shards.parts, handlers.applier.state.get(key, {}))
        state |= {f"weight/{name}": part for name, part in parts.items()}
        for name, slots in handlers.applier.state.get(key, {}).items():
            state |= {f"state/{SLOTS[slot]}/{name}": part for slot, part in slots.items() if slot != LOW}
    return state


def _gathered(handlers: Handlers) -> Iterator[tuple[str, Tensor]]:
    """Yields what this worker saves of the state that is divided; all workers gather it together."""
    holders_of = _holders(handlers)
    for key in sorted(handlers.sharded):
        mine = [
            name
            for number, name in enumerate(handlers.sharded[key].leaves)
            if name not in handlers.runners[key].layouts
            and _prefix(handlers.program, holders_of[key[0]], (key[1], handlers.index), number) is not None
        ]
        masters = whole_masters(handlers, key)
        yield from ((f"weight/{name}", masters[name]) for name in mine)
        del masters  # the next slot takes its memory
        for slot, tensors in whole_slots(handlers, key, tuple(SLOTS)):
            yield from ((f"state/{SLOTS[slot]}/{name}", tensors[name]) for name in mine if name in tensors)
    for key in sorted(handlers.runners):
        yield from _joined(handlers, key, holders_of[key[0]])


def _joined(handlers: Handlers, key: tuple[int, int], holders: list[tuple[int, int]]) -> Iterator[tuple[str, Tensor]]:
    """Yields what this worker saves of a piece whose operators are divided."""
    runner, holder = handlers.runners[key], (key[1], handlers.index)
    numbers = {name: number for number, name in enumerate(runner.initial)}
    state = handlers.held_state(key, (STEP,)) if runner.layouts else {}
    for tensor, whole in whole_tensors(handlers, key, tuple(SLOTS)):
        kind, name = tensor
        prefix = _prefix(handlers.program, holders, holder, numbers.get(name, 0))
        if kind == "buffer":
            prefix = "" if key[1] == holders[0][0] else f"replica/{key[1]}/"
        if prefix is not None:
            yield f"{prefix}{kind if kind in ('weight', 'buffer') else f'state/{SLOTS.get(kind, kind)}'}/{name}", whole
            if kind == "weight" and STEP in state.get(name, {}):
                yield f"{prefix}state/{SLOTS[STEP]}/{name}", state[name][STEP]


def final_buffers(handlers: Handlers) -> Tensors:
    """Returns the buffers of the pieces that a worker holds, by name, of the first replica only."""
    holders_of = _holders(handlers)
    return {
        name: buffer
        for piece, replica in handlers.runners
        if replica == holders_of[piece][0][0]
        for name, buffer in handlers.buffers_of((piece, replica))
    }


def take_norm(handlers: Handlers) -> float | None:
    """Returns the norm of the last update if the next one is clipped by it, or None."""
    steps = handlers.program.plan.steps
    is_needed = handlers.program.plan.reduce.clip == "delayed"
    return handlers.values.get(Value.norm(steps - 1)) if is_needed else None


def put_state(handlers: Handlers, source: Source, norm: float | None = None) -> None:
    """Loads state into a worker before its first round; raises InputError if it does not fit.

    `update` is the number of updates that the state has had.
    """
    plan = handlers.program.plan
    handlers.settle()
    for value, weights in handlers.values.items():
        is_divided = (value.piece, value.replica) in handlers.sharded
        if value.kind == ValueKind.WEIGHTS and not is_divided and not _is_idle(handlers.program, value.replica):
            for name, weight in weights.items():
                _fill(f"weight '{name}'", weight.data, _loaded_weight(handlers, source, value.replica, name, weight))
    for (_, replica), shards in handlers.sharded.items():
        for name, leaf in shards.leaves.items():
            loaded_weight = _loaded_weight(handlers, source, replica, name, leaf)
            _check_shape(f"weight '{name}'", leaf, loaded_weight)
            shards.load(name, loaded_weight)
    for key, runner in handlers.runners.items():
        handlers.applier.state[key] = _state(handlers, key, runner, source)
        _put_correction(handlers, key, runner, source)
        put_lows(handlers, key, _lows(handlers, key, runner, source))
        for name, tensor in runner.frozen.items():
            loaded = _find(handlers, source, key[1], "weight", name)
            if loaded is None:  # older checkpoints save them as buffers
                loaded = _find(handlers, source, key[1], "buffer", name)
            _fill(f"weight '{name}'", tensor, _needed(name, loaded))
        runner.lower_frozen()
        for name, buffer in runner.saved_buffers():
            loaded = _find(handlers, source, key[1], "buffer", name)
            if loaded is None:  # checkpoints of other programs do not tell buffers from weights
                loaded = source(f"weight/{name}")
            if loaded is not None:
                _check_loaded(handlers, "buffer", name, loaded)
                _fill(f"buffer '{name}'", buffer, loaded)
    handlers.scale.restore(source(SAVED))
    if norm is not None and plan.reduce.clip == "delayed":
        handlers.values[Value.norm(plan.steps - 1)] = norm
    handlers.adopt()


def _put_correction(handlers: Handlers, key: tuple[int, int], runner: PieceRunner, source: Source) -> None:
    """Loads the velocities of a piece, and the weights that each replica of a server goes on with."""
    applier, center, device = handlers.applier, handlers.program.num_replicas, handlers.load_device or handlers.device
    if applier.correction.decay(key[0]) is not None:
        find = partial(_find, handlers, source, key[1], f"state/{VELOCITY}")
        load_velocities(applier.state[key], runner.initial, find, device)
    for q in range(center) if applier.correction.compensates and key[1] == center else ():
        pulled = {name: _loaded_weight(handlers, source, q, name, w) for name, w in runner.initial.items()}
        applier.pulled[key[0], q] = moved(pulled, device)


def _loaded_weight(handlers: Handlers, source: Source, replica: int, name: str, weight: Tensor) -> Tensor:
    """Returns a saved weight in the format of `weight`; a split weight is the high half of what is saved."""
    known = _needed(name, _find(handlers, source, replica, "weight", name))
    _check_loaded(handlers, "weight", name, known)
    is_split = weight.dtype == torch.bfloat16 and known.dtype == torch.float32
    return weights_of({name: known}, {name} if is_split else (), is_split=True)[0][name]


def take_all(threads: Threads) -> Tensors:
    """Returns copies of the state of all workers."""
    return {name: tensor for handlers in threads.handlers for name, tensor in take_state(handlers).items()}


def put_all(threads: Threads, update: int, source: Source, norm: float | None = None) -> None:
    """Loads state into all workers; their next round begins with this update."""
    for handlers in threads.handlers:
        put_state(handlers, source, norm)
    threads.updates = update


def _state(handlers: Handlers, key: tuple[int, int], runner: PieceRunner, source: Source) -> dict[str, Tensors]:
    piece, replica = key
    if handlers.program.plan.keep.kind == "server" and replica < handlers.program.num_replicas:
        return {}  # the server makes the updates
    rests_on_host, shards = state_rests_on_host(handlers.program, piece), handlers.sharded.get(key)
    state: dict[str, Tensors] = {}
    for name, weight in runner.initial.items():
        wanted = handlers.job.optimizer.slots_of(name)
        slots = _loaded_slots(handlers, source, replica, name, weight)
        if shards is not None:
            if shards.part(name, weight) is None:
                continue  # this worker's shard holds nothing of the parameter
            parts = ((slot, t if slot == STEP else shards.part(name, t)) for slot, t in slots.items())
            slots = {slot: part for slot, part in parts if part is not None}
        if slots:
            if slots.keys() != wanted:
                names = [
                    " and ".join(sorted(SLOTS.get(slot, slot) for slot in some)) or "nothing"
                    for some in (slots, wanted)
                ]
                raise InputError(f"the checkpoint keeps {names[0]} of '{name}', and this optimizer {names[1]}")
            device = handlers.load_device or handlers.device
            state[name] = {
                slot: tensor.to(CPU if rests_on_host or _is_scalar(slot, tensor) else device, copy=True)
                for slot, tensor in slots.items()
            }
    return state


def _loaded_slots(handlers: Handlers, source: Source, replica: int, name: str, weight: Tensor) -> Tensors:
    """Returns the saved state of a parameter, whole, with its moments in the format of the plan."""
    slots: Tensors = {}
    own = {SLOTS.get(slot, slot): slot for slot in handlers.job.optimizer.slots_of(name)}
    for torch_name, slot in ({saved: slot for slot, saved in SLOTS.items()} | own).items():
        loaded = _find(handlers, source, replica, f"state/{torch_name}", name)
        if loaded is None:
            continue
        if not _is_scalar(slot, loaded) and slot not in _FLAT and loaded.shape != weight.shape:
            raise InputError(f"'{torch_name}' of '{name}' is {_form(loaded)}, and the weight {_form(weight)}")
        slots[slot] = loaded
    return _with_format(handlers, name, slots, weight.shape)


def _is_scalar(slot: str, loaded: Tensor) -> bool:
    """Whether a slot holds one number for the whole parameter; those of other optimizers of torch may."""
    return slot == STEP or (slot not in SLOTS and loaded.ndim == 0)


def _with_format(handlers: Handlers, name: str, slots: Tensors, shape: torch.Size) -> Tensors:
    """Returns the slots of a parameter with its moments in the format of the plan, in the order of its elements."""
    for scales in _FLAT & slots.keys():
        if slots[scales].shape != (num_scales(shape.numel()),):
            raise InputError(
                f"'{SLOTS[scales]}' of '{name}' has {slots[scales].numel()} scales for {shape.numel()} values, and"
                f" int8 moments need {num_scales(shape.numel())}; the checkpoint is damaged"
            )
    return converted_slots(slots, handlers.program.plan.precision.moments, shape)


def _lows(handlers: Handlers, key: tuple[int, int], runner: PieceRunner, source: Source) -> Tensors:
    """Returns the low halves of the split weights of a piece, from the masters that were saved."""
    masters = {name: _needed(name, _find(handlers, source, key[1], "weight", name)) for name in runner.initial}
    bf16 = {name for name, weight in runner.initial.items() if weight.dtype == torch.bfloat16}
    lowered = {name for name in runner.lowered | bf16 if masters[name].dtype == torch.float32}
    return weights_of(masters, lowered, is_split=runner.form.is_split)[1]


def _needed(name: str, loaded: Tensor | None) -> Tensor:
    if loaded is None:
        raise InputError(f"the checkpoint has no weight '{name}'; it is of another model")
    return loaded


def _find(handlers: Handlers, source: Source, replica: int, kind: str, name: str) -> Tensor | None:
    """Returns a replica's own tensor, else the common one; a tied weight may be saved under its other name."""
    tied = next((sorted(tie - {name}) for tie in (*handlers.job.ties, *handlers.job.frozen_ties) if name in tie), [])
    # Replicas that share every update must begin with equal weights, whichever plan wrote the checkpoint.
    has_own = handlers.program.plan.feed.is_own or kind == "buffer"
    for known in (name, *tied):
        for prefix in (f"replica/{replica}/", "") if has_own else ("",):
            tensor = source(f"{prefix}{kind}/{known}")
            if tensor is not None:
                return _own_part(handlers, replica, name, tensor)
    return None


def _own_part(handlers: Handlers, replica: int, name: str, whole: Tensor) -> Tensor:
    """Returns this worker's part of a saved tensor, or all of it if it is not divided."""
    for (_, held), runner in handlers.runners.items():
        layout = runner.layouts.get(name)
        if held == replica and layout is not None and layout.shape == whole.shape:
            program = handlers.program
            return layout.local(whole, program.part_of(handlers.index), program.plan.place.shards)
    return whole


def _check_loaded(handlers: Handlers, kind: str, name: str, loaded: Tensor) -> None:
    for _, value in nonfinite({name: loaded}):
        if not _is_meant(handlers, name, value):
            raise InputError(
                f"{kind} '{name}' of the checkpoint holds {value}; go on from an earlier checkpoint, or begin again"
            )


def _is_meant(handlers: Handlers, name: str, value: float) -> bool:
    return any(runner.is_meant(name, value) for runner in handlers.runners.values())


def _fill(what: str, target: Tensor, loaded: Tensor) -> None:
    _check_shape(what, target, loaded)
    target.copy_(loaded)


def _check_shape(what: str, target: Tensor, loaded: Tensor) -> None:
    if loaded.shape != target.shape:
        raise InputError(f"{what} is {_form(loaded)} in the checkpoint and {_form(target)} in the model")


def _form(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _holders(handlers: Handlers) -> dict[int, list[tuple[int, int]]]:
    """Returns the (replica, worker) pairs that hold each piece, in order, without replicas that have left."""
    holders: dict[int, list[tuple[int, int]]] = {}
    for worker in range(len(handlers.program.workers)):
        for piece, replica in pieces_of(handlers.program, worker):
            if replica not in handlers.log.left:
                holders.setdefault(piece, []).append((replica, worker))
    return {piece: sorted(pairs) for piece, pairs in holders.items()}


def _prefix(program: Program, holders: list[tuple[int, int]], holder: tuple[int, int], number: int) -> str | None:
    """Returns the prefix under which a holder saves the n-th weight of a piece, or None if another holder saves it."""
    is_on_server = holders[-1][0] == program.num_replicas and not _is_idle(program, holders[-1][0])
    source = holders[-1] if is_on_server else holders[0]
    if not program.plan.feed.is_own:  # all have the same weights, but only the worker that updates has state
        source = source if is_on_server else holders[number % len(holders)]
        return "" if holder == source else None
    if _is_idle(program, holder[0]):
        return None
    return "" if holder == source else f"replica/{holder[0]}/"


def _is_idle(program: Program, replica: int) -> bool:
    """Whether a replica is a server that sums waves: its weights never change."""
    return program.plan.reduce.gate == "bound" and replica == program.num_replicas


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(CPU, copy=True)
