"""Whether the head of a model and its loss run in chunks of tokens, and in how many.

Until the first step has decided, linear layers outside of blocks return deferred logits, and what becomes of them is
recorded. A head whose logits go into a cross-entropy and nothing else may run in chunks. The others run as before.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.hybrid.budget import MemoryMeter
from pipedejavu.hybrid.placement import MemoryInterval
from pipedejavu.hybrid.unit_state import UnitState
from pipedejavu.runtime.chunked_loss import bytes_per_logit
from pipedejavu.runtime.deferred_head import DeferredHead
from pipedejavu.runtime.deferred_logits import HeadUse

HeadChunks = int | Literal["auto"]

LEAST_CHUNK_BYTES, CHUNK_SHARE = 256 << 20, 0.02
"""A chunk takes at most these bytes, or this share of the budget if that is more."""


class HeadChoice:
    """The heads of one model; hooked into it from its construction to `release`."""

    def __init__(
        self,
        model: nn.Module,
        unit_states: Sequence[UnitState],
        chunks: HeadChunks,
        named: Sequence[str],
        meter: MemoryMeter,
    ):
        """Makes linear layers defer their logits; `named` ones always run in chunks."""
        self.meter, self._named = meter, frozenset(named)
        self.reasons: list[str] = []
        self._uses: dict[str, tuple[nn.Linear, HeadUse]] = {}
        self._undo: dict[str, Callable[[], None]] = {}
        heads = _candidates(model, unit_states)
        for name in named:
            if name not in heads:
                raise InputError(
                    f"activations of '{name}' is 'chunk', and no linear layer of this name is on the GPU throughout a"
                    f" step; there are {', '.join(heads) or 'none'}"
                )
        if chunks == 1 and not named:
            return
        for name, module in heads.items():
            choose: Callable[[HeadUse], int] = self._by_bytes if name in named else self._if_needed
            if isinstance(chunks, int) and (chunks > 1 or name in named):
                choose = _constant(max(2, chunks))
            self._uses[name] = module, HeadUse(choose=choose)
            self._undo[name] = _defer(module, self._uses[name][1])

    def _by_bytes(self, use: HeadUse) -> int:
        """Returns the least number of chunks, at least 2, that keeps each chunk within its limit."""
        limit = max(LEAST_CHUNK_BYTES, int(CHUNK_SHARE * self.meter.tensor_bytes()))
        return max(2, -(-_divided_bytes(use) // limit))

    def _if_needed(self, use: HeadUse) -> int:
        """Returns 1, or the number of chunks if all logits would not fit beside what is allocated now, and they may."""
        if use.num_chunks > 1:
            return self._by_bytes(use)
        weight = next(module.weight for module, other in self._uses.values() if other is use)
        allocated = torch.cuda.memory_allocated(weight.device) if weight.is_cuda else 0
        count, limit = self._by_bytes(use), self.meter.tensor_bytes()
        if allocated + _logits_bytes(use) <= limit or _chunks_bytes(use, count) >= _logits_bytes(use):
            return 1
        self.reasons.append(
            f"the head runs in {count} chunks: its logits would take {format_bytes(_logits_bytes(use))} at once, beside"
            f" {format_bytes(allocated)} at that time, of {format_bytes(limit)}"
        )
        return count

    def end_unused(self) -> None:
        """Ends the deferral of logits, after the first backward pass, if not one cross-entropy alone has read them."""
        for name, (_, use) in list(self._uses.items()):
            if not use.num_losses or (use.reads and use.num_chunks == 1):
                if name in self._named:
                    what = f"read by {', '.join(sorted(use.reads))}" if use.reads else "in no cross-entropy"
                    raise InputError(f"activations of '{name}' is 'chunk', but its result is {what}; leave it out")
                self.end(name)
        for name, (_, use) in self._uses.items():
            if use.num_chunks > 1 and not self.reasons:
                self.reasons.append(f"the head '{name}' runs in {use.num_chunks} chunks, as asked")

    @property
    def whole(self) -> list[str]:
        """The names of the heads that have run whole and could run in chunks."""
        return [name for name, (_, use) in self._uses.items() if use.num_chunks == 1]

    def divide(self, name: str, saved_bytes: int) -> None:
        """Makes a head run in chunks from now on, which saves this much of the GPU."""
        use = self._uses[name][1]
        use.choose, use.num_chunks = self._by_bytes, self._by_bytes(use)
        self.reasons.append(
            f"the head runs in {use.num_chunks} chunks: all its logits at once would take {format_bytes(saved_bytes)}"
            " more of the GPU, which holds state instead"
        )

    def divided(
        self, name: str, intervals: Sequence[MemoryInterval], forwards: Sequence[MemoryInterval]
    ) -> list[MemoryInterval] | None:
        """Returns the memory that the first step would have taken with a head in chunks; None if that is not less.

        Of all logits, at least the logits themselves, their log-probabilities and a gradient of these existed.
        """
        if not intervals:
            return None
        use = self._uses[name][1]
        freed = use.num_logits * (use.itemsize + 8) - _chunks_bytes(use, self._by_bytes(use))
        others = max((forward.peak_bytes for forward in forwards[:-1]), default=0)
        peak = max(others, intervals[0].peak_bytes - freed)
        if freed <= 0 or peak >= intervals[0].peak_bytes:
            return None
        return [replace(intervals[0], peak_bytes=peak), *intervals[1:]]

    def weights_change(self, unit_state: UnitState | None = None) -> None:
        """Notes that the weights of a unit change, or all: deferred logits cannot be computed after that."""
        parameters = None if unit_state is None else {id(param.parameter) for param in unit_state.params}
        for module, use in self._uses.values():
            if parameters is None or id(module.weight) in parameters:
                use.version += 1

    def end(self, name: str) -> None:
        """Makes a head return ordinary logits again."""
        self._undo.pop(name)()
        del self._uses[name]

    def release(self) -> None:
        """Restores the forward of all heads."""
        for name in list(self._uses):
            self.end(name)


def _logits_bytes(use: HeadUse) -> int:
    return use.num_logits * bytes_per_logit(use.itemsize)


def _chunks_bytes(use: HeadUse, count: int) -> int:
    """Returns the most that exists at a time with chunks: one of them, and the sum of their weight gradients."""
    return _divided_bytes(use) // count + use.num_classes * use.width * (4 + use.itemsize)


def _divided_bytes(use: HeadUse) -> int:
    """Returns what all chunks would take if they existed together."""
    return use.num_logits * (use.itemsize if use.is_fused else bytes_per_logit(use.itemsize))


def _constant(chunks: int) -> Callable[[HeadUse], int]:
    return lambda _: chunks


def _candidates(model: nn.Module, unit_states: Sequence[UnitState]) -> dict[str, nn.Linear]:
    """Returns the linear layers that may be heads, by name: those outside of blocks, and those of the last block."""
    states = [unit_state for unit_state in unit_states if not unit_state.is_windowed]
    last = unit_states[-1]
    names = {id(module): name for name, module in model.named_modules()}
    others = [s for s in unit_states if s not in states or (s.unit.is_block and s is not last)]
    inside = {id(part) for other in others for part in other.unit.module.modules()}
    layers = [part for part in model.modules() if type(part) is nn.Linear and id(part) not in inside]
    return {names[id(layer)]: layer for layer in layers}


class _DeferringForward:
    """The forward of a linear layer that returns deferred logits; a copy of the layer has the plain one."""

    def __init__(self, plain: Callable[..., Any], use: HeadUse):
        self.plain, self.use = plain, use

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        with DeferredHead(self.use):
            return self.plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)


def _defer(module: nn.Linear, use: HeadUse) -> Callable[[], None]:
    """Makes a layer defer its result; returns the call that undoes it."""
    override = module.__dict__.get("forward")
    deferring = _DeferringForward(module.forward, use)
    module.forward = deferring  # type: ignore[method-assign]
    return partial(_restore, module, deferring, override)


def _restore(module: nn.Module, deferring: _DeferringForward, override: Callable[..., Any] | None) -> None:
    """Gives a layer its own forward back, unless another has been set since."""
    if module.__dict__.get("forward") is not deferring:
        return
    del module.__dict__["forward"]
    if override is not None:
        module.forward = override


def chunked_names(choice: str | Mapping[str, str]) -> tuple[list[str], Any]:
    """Returns the names whose activations are 'chunk', and the choice without them."""
    if isinstance(choice, str):
        return [], choice
    named = [name for name, value in choice.items() if value == "chunk"]
    return named, {name: value for name, value in choice.items() if value != "chunk"}
