"""Which units are alike: those that run the same operations on tensors of the same forms, whatever their values."""

import inspect
from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor, fx, nn

from pipedejavu.profile.segment import Segment

_PLAIN = (bool, int, float, str, type(None))


def likeness(module: nn.Module, value: Any) -> Hashable:
    """Returns what is equal for units that take equally long: structure, parameters and the forms of their inputs."""
    inputs = tuple(map(_form, value if isinstance(value, tuple) else (value,)))
    if isinstance(module, Segment):
        body = module.body_for(value)
        return body.entries, module.training, _graph(body.graph), inputs
    return tuple(_parts(module)), inputs


def _parts(module: nn.Module) -> Iterator[Hashable]:
    """Yields what each module inside of a unit is, its own settings included."""
    for path, part in module.named_modules():
        own = sorted((key, _setting(item)) for key, item in vars(part).items() if not key.startswith("_"))
        tensors = [*part._parameters.items(), *part._buffers.items()]
        forms = tuple((key, None if tensor is None else _form(tensor)) for key, tensor in tensors)
        graph = _graph(part) if isinstance(part, fx.GraphModule) else ()
        yield path, type(part), part.extra_repr(), tuple(own), forms, graph


def _setting(item: Any) -> str:
    """Returns a setting as text; what has no text of its own is told apart by its identity."""
    if isinstance(item, tuple | list):
        return f"{type(item).__name__}({', '.join(map(_setting, item))})"
    if isinstance(item, _PLAIN):
        return repr(item)
    if inspect.isfunction(item) or inspect.isbuiltin(item) or isinstance(item, type):
        return f"{item.__module__}.{item.__qualname__}"
    return f"{type(item).__qualname__} at {id(item)}"


def _graph(body: fx.GraphModule) -> tuple[Hashable, ...]:
    """Returns the operations of a graph, with numbers for names."""
    number = {node: n for n, node in enumerate(body.graph.nodes)}
    lines: list[Hashable] = []
    for node in body.graph.nodes:
        if node.op == "get_attr":
            path, _, key = str(node.target).rpartition(".")
            held = getattr(body.get_submodule(path), key)
            lines.append(_graph(held) if isinstance(held, fx.GraphModule) else _form(held))
            continue
        target = "" if node.op == "placeholder" else str(node.target)
        args: Any = fx.map_arg((node.args, node.kwargs), lambda used: f"%{number[used]}")
        lines.append((node.op, target, repr(args)))
    return tuple(lines)


def _form(tensor: Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter)
