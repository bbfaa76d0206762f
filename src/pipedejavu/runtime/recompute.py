"""Recomputation of a block: its forward keeps only its arguments, and runs again when its backward needs the rest.

This is `torch.utils.checkpoint` with `use_reentrant=False`, at less than half of its overhead on the host, which
bounds small models: it does little per tensor, and restores a generator only if the forward drew from it. The second
run ends at the last tensor that is needed, and updates no batch statistics.

The engine does not use it: there a recomputation is an action of the program, which other lanes overlap with.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Recompute:
    """The forward of one block, recomputed in its backward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], device: torch.device):
        self.forward, self.device = forward, device
        self.statistics = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block; autograd saves indices instead of tensors."""
        if torch.compiler.is_compiling():  # the compiler knows how to trace torch's own
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        run = _Run(self, args, kwargs)
        with saved_tensors_hooks(run.pack, run.unpack):
            output = self.forward(*args, **kwargs)
        run.rng_states = [state for state in run.rng_states if state.has_advanced()]
        return output


class _Run:
    """One run of a block, and what repeating it needs."""

    def __init__(self, block: Recompute, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.block, self.args, self.kwargs = block, args, kwargs
        self.versions = [(t, t._version) for t in _tensors((args, kwargs))]
        self.rng_states = [_RngState(generator) for generator in generators_of(block.device)]
        self.autocasts = _autocasts(block.device)
        self.shapes: list[torch.Size] = []
        """The shapes of the tensors that autograd would have saved, in order."""
        self.recomputed: list[Tensor | None] = []
        """These tensors from the second run; None once a tensor was returned."""

    def pack(self, tensor: Tensor) -> int:
        """Returns an index for autograd to save instead of the tensor."""
        self.shapes.append(tensor.shape)
        return len(self.shapes) - 1

    def unpack(self, index: int) -> Tensor:
        """Returns a tensor by its index; runs the block again if the tensor is not there, or was returned before."""
        if not self.recomputed or self.recomputed[index] is None:
            self.recomputed = [*self._repeat()]
        tensor, self.recomputed[index] = self.recomputed[index], None
        assert tensor is not None
        return tensor

    def _repeat(self) -> list[Tensor]:
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                "an argument of a block that is recomputed was changed in place after it ran; give that block"
                " activations='keep', or change a copy"
            )
        tensors: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            tensors.append(tensor.detach())
            if len(tensors) == len(self.shapes):
                raise _CompleteError

        with ExitStack() as stack:
            for state in self.rng_states:
                stack.enter_context(state)
            if self.autocasts != _autocasts(self.block.device):
                for autocast in self.autocasts:
                    stack.enter_context(torch.autocast(*autocast))
            stack.enter_context(_frozen_statistics(self.block.statistics))
            with torch.enable_grad(), saved_tensors_hooks(collect, _never), suppress(_CompleteError):
                self.block.forward(*self.args, **self.kwargs)
        if [tensor.shape for tensor in tensors] != self.shapes:
            raise RuntimeError(
                f"a block saved {len(self.shapes)} tensors in its forward, and when it was recomputed {len(tensors)},"
                " or others; give that block activations='keep'"
            )
        return tensors


class _CompleteError(Exception):
    """Ends a second run: all needed tensors are there."""


def _never(_: Any) -> Tensor:
    raise AssertionError("there is no backward through a second run")


class _RngState:
    """The state of a generator before a block ran; as a context, it makes the generator draw the same again."""

    def __init__(self, generator: torch.Generator):
        self.generator, self.before = generator, _state_of(generator)

    def has_advanced(self) -> bool:
        """Returns whether the generator was used since."""
        return _state_of(self.generator) != self.before

    def __enter__(self) -> None:
        self.resume_at = _state_of(self.generator)
        _set_state(self.generator, self.before)

    def __exit__(self, *_: object) -> None:
        _set_state(self.generator, self.resume_at)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Returns the default generators that a module on a device may draw from: the CPU's and the device's.

    Seeding these is much cheaper than `torch.manual_seed`, which seeds all devices and, before CUDA is initialised,
    keeps a stack trace for each call: more than half a millisecond.
    """
    return [torch.default_generator] + (
        [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    )


def _state_of(generator: torch.Generator) -> bytes | tuple[int, int]:
    """Returns the state of a generator; for a GPU only seed and offset, which are cheap to read."""
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state().numpy().tobytes()


def _set_state(generator: torch.Generator, state: bytes | tuple[int, int]) -> None:
    if isinstance(state, bytes):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return
    seed, offset = state
    generator.manual_seed(seed)
    generator.set_offset(offset)


def _autocasts(device: torch.device) -> list[tuple[str, torch.dtype, bool]]:
    """Returns the present settings of autocast, as arguments for `torch.autocast`."""
    kinds = ["cpu"] if device.type == "cpu" else ["cpu", device.type]
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]


@contextmanager
def _frozen_statistics(modules: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Makes modules update copies of their batch statistics instead of the statistics themselves."""
    originals = [dict(module._buffers) for module in modules]
    for module in modules:
        module._buffers.update({n: b.clone() for n, b in module._buffers.items() if b is not None})
    try:
        yield
    finally:
        for module, buffers in zip(modules, originals, strict=True):
            module._buffers.update(buffers)


def _tensors(value: Any) -> Iterable[Tensor]:
    """Yields all tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
