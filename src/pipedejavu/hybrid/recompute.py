"""A block that keeps nothing of its forward but its arguments, and runs again when its backward needs the rest.

It does what `torch.utils.checkpoint` does without re-entering autograd, and stops the second run as that does, at the
last tensor that is needed. It is written anew because small models wait for the host, and what that one costs beside
the two runs is more than twice as much: this does little for each tensor, and leaves generators alone where nothing was
drawn. A second run counts no batch statistics.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Recompute:
    """The forward of one block."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], device: torch.device):
        self.forward, self.device = forward, device
        self.statistics = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it; autograd keeps numbers in place of tensors."""
        if torch.compiler.is_compiling():  # the compiler knows that one
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        run = _Run(self, args, kwargs)
        with saved_tensors_hooks(run.leave_out, run.find):
            output = self.forward(*args, **kwargs)
        run.draws = [draw for draw in run.draws if draw.has_drawn()]
        return output


class _Run:
    """One run of a block, and what it takes to repeat it."""

    def __init__(self, block: Recompute, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.block, self.args, self.kwargs = block, args, kwargs
        self.versions = [(t, t._version) for t in _tensors((args, kwargs))]
        self.draws = [_Draw(generator) for generator in _generators(block.device)]
        self.casts = _casts(block.device)
        self.shapes: list[torch.Size] = []
        """Of what was left out, in order."""
        self.made: list[Tensor | None] = []
        """The same from the second run, as far as it has not been taken."""

    def leave_out(self, tensor: Tensor) -> int:
        """Takes the place of a tensor that autograd saves."""
        self.shapes.append(tensor.shape)
        return len(self.shapes) - 1

    def find(self, index: int) -> Tensor:
        """Returns a tensor that was left out; it is here until it is taken once."""
        if not self.made or self.made[index] is None:
            self.made = [*self._repeat()]
        found, self.made[index] = self.made[index], None
        assert found is not None
        return found

    def _repeat(self) -> list[Tensor]:
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                "an argument of a block that is recomputed was changed in place behind it; give that block"
                " activations='keep', or change a copy"
            )
        made: list[Tensor] = []

        def note(tensor: Tensor) -> None:
            made.append(tensor.detach())
            if len(made) == len(self.shapes):
                raise _EnoughError

        with ExitStack() as stack:
            for draw in self.draws:
                stack.enter_context(draw)
            if self.casts != _casts(self.block.device):
                for cast in self.casts:
                    stack.enter_context(torch.autocast(*cast))
            stack.enter_context(_still(self.block.statistics))
            with torch.enable_grad(), saved_tensors_hooks(note, _never), suppress(_EnoughError):
                self.block.forward(*self.args, **self.kwargs)
        if [tensor.shape for tensor in made] != self.shapes:
            raise RuntimeError(
                f"a block saved {len(self.shapes)} tensors in its forward, and when it was recomputed {len(made)}, or"
                " others; give that block activations='keep'"
            )
        return made


class _EnoughError(Exception):
    """Ends a second run: everything that is needed is there."""


def _never(_: Any) -> Tensor:
    raise AssertionError("nothing runs backward through a second run")


class _Draw:
    """A generator as it was before a block ran; inside, it draws again what the block drew."""

    def __init__(self, generator: torch.Generator):
        self.generator, self.before = generator, _state_of(generator)

    def has_drawn(self) -> bool:
        """Whether it went on since."""
        return _state_of(self.generator) != self.before

    def __enter__(self) -> None:
        self.now = _state_of(self.generator)
        _set_state(self.generator, self.before)

    def __exit__(self, *_: object) -> None:
        _set_state(self.generator, self.now)


def _generators(device: torch.device) -> list[torch.Generator]:
    own = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *own]


def _state_of(generator: torch.Generator) -> bytes | tuple[int, int]:
    """Returns where a generator is: a GPU's, which counts, by its seed and count, which cost the host little."""
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


def _casts(device: torch.device) -> list[tuple[str, torch.dtype, bool]]:
    """Returns how autocast is set, as its arguments."""
    kinds = ["cpu"] if device.type == "cpu" else ["cpu", device.type]
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]


@contextmanager
def _still(modules: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Lets modules count batch statistics in copies of theirs."""
    own = [dict(module._buffers) for module in modules]
    for module in modules:
        module._buffers.update({n: b.clone() for n, b in module._buffers.items() if b is not None})
    try:
        yield
    finally:
        for module, buffers in zip(modules, own, strict=True):
            module._buffers.update(buffers)


def _tensors(value: Any) -> Iterable[Tensor]:
    """Yields the tensors in arguments, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
