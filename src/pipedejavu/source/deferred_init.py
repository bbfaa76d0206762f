"""Builds a model where it will rest: shapes first, then the values of each parameter, in parallel.

While the constructor runs, uninitialized parameters take no memory, and what would initialize them is recorded. Then
each parameter is allocated in its place and filled, from safetensors or by its recorded operations, with a generator
whose seed depends on the model's seed and the parameter's name alone. So the place and the number of threads change
no value. Everything else that a constructor computes, such as buffers, has the values that it computes.
"""

import functools
import inspect
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipedejavu.facts import InputError
from pipedejavu.store import read_weights

Model = TypeVar("Model", bound=nn.Module)
_WHOLE = ("_no_grad_trunc_normal_", "orthogonal_", "dirac_", "sparse_")
"""Functions of torch.nn.init that depend on values, and do nothing without memory: they are recorded as a whole."""
_EMPTY = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty")


def build_model(
    factory: Callable[[], Model],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    weights: str | Path | None = None,
    draw_on: torch.device | str | None = None,
) -> Model:
    """Returns the model that `factory` makes, without ever holding it anywhere but in its place.

    Args:
        factory: makes the model, from a configuration for example.
        device: where parameters and buffers rest.
        dtype: of floating-point parameters; by default as the factory makes them.
        seed: of random values. They differ from those that the factory alone draws.
        weights: a file or folder of safetensors with the model's own names; what they lack is drawn.
        draw_on: where random values are drawn, which changes them; by default on the GPU if there is one.
    """
    where = torch.device(device)
    source = torch.device(draw_on or ("cuda" if torch.cuda.is_available() else "cpu"))
    tape = _Tape()
    with torch.random.fork_rng(devices=[]), _without_memory(tape), tape:
        torch.manual_seed(seed)
        model = factory()
    with torch.no_grad():
        stored = {} if weights is None else read_weights(weights)
        _fill(model, tape, stored, _Place(where, source, dtype, seed))
        _move_rest(model, where, dtype)
    return model


class _Place:
    """Where parameters rest and are drawn."""

    def __init__(self, device: torch.device, source: torch.device, dtype: torch.dtype | None, seed: int):
        self.device, self.source, self.dtype, self.seed = device, source, dtype, seed

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype

    def generator(self, name: str) -> torch.Generator:
        """Returns the generator of one parameter."""
        return torch.Generator(self.source).manual_seed(self.seed << 32 | zlib.crc32(name.encode()))


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that initialize parameters without memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[tuple[Any, Any, Any, Any]] = []
        """Operation, arguments, keyword arguments and result of each, in order."""
        self._empty: dict[int, Tensor] = {}
        """By address: memory that was allocated and never written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        output = func(*args, **kwargs)
        name = func._schema.name
        if any(tensor.is_meta for tensor in inputs) and name != "aten::detach":
            self.entries.append((func, args, kwargs, output))
        elif name in _EMPTY and isinstance(output, Tensor) and output.device.type == "cpu":
            self._empty[output.untyped_storage()._cdata] = output
        elif name != "aten::detach":
            for tensor in inputs:
                self._empty.pop(tensor.untyped_storage()._cdata, None)
        return output

    def is_empty(self, tensor: Tensor) -> bool:
        """Returns whether the memory of a tensor was never written; forgets it then."""
        return self._empty.pop(tensor.untyped_storage()._cdata, None) is not None


@contextmanager
def _without_memory(tape: _Tape) -> Iterator[None]:
    """A context in which modules register parameters without memory in place of uninitialized ones."""
    register = nn.Module.register_parameter

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and type(param) is nn.Parameter and not param.is_meta and tape.is_empty(param):
            empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
            param = nn.Parameter(empty, requires_grad=param.requires_grad)
        register(module, name, param)

    plain = {name: getattr(nn.init, name) for name in _WHOLE}
    for name, function in plain.items():
        setattr(nn.init, name, _recorded(function, tape))
    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(nn.init, name, function)
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _recorded(function: Callable[..., Tensor], tape: _Tape) -> Callable[..., Tensor]:
    """Returns a function that is recorded as a whole if its tensor has no memory."""

    @functools.wraps(function)
    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not tensor.is_meta:
            return function(tensor, *args, **kwargs)
        if function.__name__ == "sparse_":
            raise InputError("build_model cannot defer nn.init.sparse_; call it on the model that it returns")
        tape.entries.append((function, (tensor, *args), kwargs, tensor))
        return tensor

    return record


def _takes_generator(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    names = inspect.signature(func).parameters if schema is None else [argument.name for argument in schema.arguments]
    return "generator" in names


def _fill(model: nn.Module, tape: _Tape, stored: dict[str, Tensor], place: _Place) -> None:
    """Replaces all parameters without memory by filled ones."""
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.is_meta:
            names.setdefault(id(param), []).append(name)
            params[id(param)] = param
    filled: dict[int, nn.Parameter] = {}
    groups = _groups([*params.values()], tape)

    def fill(members: list[nn.Parameter], entries: list[tuple[Any, Any, Any, Any]]) -> None:
        found = {id(p): next((stored[n] for n in names[id(p)] if n in stored), None) for p in members}
        drawn = {}
        if any(value is None for value in found.values()):
            drawn = _replay(members, entries, place, names[id(members[0])][0])
        for p in members:
            value = drawn[id(p)] if (known := found[id(p)]) is None else _checked(known, p, names[id(p)][0])
            target = torch.empty(p.shape, dtype=place.dtype_of(p), device=place.device)
            filled[id(p)] = nn.Parameter(target.copy_(value), requires_grad=p.requires_grad)

    num_threads = 1 if "cuda" in (place.source.type, place.device.type) else len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads) as pool, torch.no_grad():
        list(pool.map(lambda group: _without_gradients(fill, *group), groups))
    for module in model.modules():
        for name, member in module._parameters.items():
            if member is not None and member.is_meta:
                module._parameters[name] = filled[id(member)]


def _without_gradients(work: Callable[..., None], *args: Any) -> None:
    with torch.no_grad():  # threads begin with gradients
        work(*args)


def _groups(params: Sequence[nn.Parameter], tape: _Tape) -> list[tuple[list[nn.Parameter], list[Any]]]:
    """Returns parameters with the operations that initialize them; those that share operations are one group."""
    group_of: dict[int, list[Any]] = {_storage(p)._cdata: [[p], []] for p in params}
    for entry in tape.entries:
        tensors = [t for t in tree_leaves(entry[1:]) if isinstance(t, Tensor) and t.is_meta]
        keys = list(dict.fromkeys(_storage(t)._cdata for t in tensors))
        groups = [group_of.setdefault(key, [[], []]) for key in keys]
        first = groups[0]
        for other in groups[1:]:
            if other is not first:
                first[0] += other[0]
                first[1] += other[1]
                for key, group in group_of.items():
                    if group is other:
                        group_of[key] = first
        first[1].append(entry)
    order = {id(entry): n for n, entry in enumerate(tape.entries)}
    unique = {id(group): group for group in group_of.values() if group[0]}.values()
    return [(members, sorted(entries, key=lambda entry: order[id(entry)])) for members, entries in unique]


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


def _replay(members: list[nn.Parameter], entries: list[Any], place: _Place, name: str) -> dict[int, Tensor]:
    """Repeats operations on real memory; returns the values of the parameters."""
    generator = place.generator(name)
    storages: dict[int, Tensor] = {}
    real: dict[int, Tensor] = {}

    def of(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value.to(place.source) if isinstance(value, Tensor) and value.dim() else value
        if id(value) not in real:  # a parameter or an alias of one
            key = _storage(value)._cdata
            if key not in storages:
                numel = _storage(value).nbytes() // value.element_size()
                storages[key] = torch.empty(numel, dtype=value.dtype, device=place.source)
            real[id(value)] = storages[key].as_strided(value.shape, value.stride(), value.storage_offset())
        return real[id(value)]

    for func, args, kwargs, output in entries:
        options = {key: place.source if key == "device" else of(value) for key, value in kwargs.items()}
        if _takes_generator(func):
            options["generator"] = generator
        result = func(*tree_map(of, args), **options)
        for old, new in zip(tree_leaves(output), tree_leaves(result), strict=True):
            if isinstance(old, Tensor) and old.is_meta and id(old) not in real:
                real[id(old)] = new
    return {id(p): of(p) for p in members}


def _checked(value: Tensor, param: nn.Parameter, name: str) -> Tensor:
    if value.shape != param.shape:
        raise InputError(
            f"'{name}' of the weights is {tuple(value.shape)}, and the model's is {tuple(param.shape)}; give weights of"
            " a model of this size"
        )
    return value


def _move_rest(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Moves parameters that the constructor computed itself, and buffers; casts parameters as the others."""
    for param in model.parameters():
        wanted = dtype if dtype is not None and param.is_floating_point() else param.dtype
        if param.device != device or param.dtype != wanted:
            param.data = param.data.to(device, wanted)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
