"""Deduplication: units that run the same operations on tensors of the same shapes and dtypes are measured once."""

import inspect
from collections.abc import Hashable, Iterator
from typing import Any

from torch import fx, nn

from pipedejavu.profile.lifted_graph import graph_form, tensor_form
from pipedejavu.profile.segment import Segment

_PLAIN = (bool, int, float, str, type(None))


def unit_key(module: nn.Module, value: Any) -> Hashable:
    """Returns a key of structure, parameters and input shapes; units with equal keys take equally long."""
    inputs = tuple(map(tensor_form, value if isinstance(value, tuple) else (value,)))
    if isinstance(module, Segment):
        body = module.body_for(value)
        return body.entries, module.training, graph_form(body.graph), inputs
    return tuple(_modules(module)), inputs


def _modules(module: nn.Module) -> Iterator[Hashable]:
    """Yields the type, settings and tensor shapes of each module inside a unit."""
    for path, inner in module.named_modules():
        settings = sorted((key, _setting(item)) for key, item in vars(inner).items() if not key.startswith("_"))
        tensors = [*inner._parameters.items(), *inner._buffers.items()]
        forms = tuple((key, None if tensor is None else tensor_form(tensor)) for key, tensor in tensors)
        graph = graph_form(inner) if isinstance(inner, fx.GraphModule) else ()
        yield path, type(inner), inner.extra_repr(), tuple(settings), forms, graph


def _setting(item: Any) -> str:
    """Returns a setting as text; an object without a stable text is identified by its id."""
    if isinstance(item, tuple | list):
        return f"{type(item).__name__}({', '.join(map(_setting, item))})"
    if isinstance(item, _PLAIN):
        return repr(item)
    if inspect.isfunction(item) or inspect.isbuiltin(item) or isinstance(item, type):
        return f"{item.__module__}.{item.__qualname__}"
    return f"{type(item).__qualname__} at {id(item)}"
