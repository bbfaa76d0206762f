"""The key of a model in memory in the cache of profiles: everything that its times depend on, in stable text.

It has the structure of each unit with the source of its classes, the loss with the values it closes over, and the forms
of a sample. Values of tensors, names of objects in memory and hash seeds do not enter it.
"""

import inspect
import re
import types
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipedejavu.profile.lifted_graph import graph_form, tensor_form
from pipedejavu.profile.segment import Segment
from pipedejavu.profile.sequential import Units

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DEEPEST = 8
"""Functions inside functions, at most."""


def model_key(units: Units, loss: Callable[[Any, Any], Tensor], inputs: Any, targets: Any) -> dict[str, object]:
    """Returns the part of a cache key that describes a model, its loss and a sample."""
    lines = [f"{name}: {line}" for name, module in units for line in _module_lines(module)]
    return {
        "units": sha256("\n".join(lines).encode()).hexdigest(),
        "ties": sha256("\n".join(map(str, _ties(units))).encode()).hexdigest(),
        "loss": sha256(_text_of(loss, _DEEPEST).encode()).hexdigest(),
        "inputs": _forms_of(inputs),
        "targets": _forms_of(targets),
    }


def _ties(units: Units) -> list[list[str]]:
    """Returns the names of each parameter that has several, in the order of the units."""
    names: dict[int, list[str]] = {}
    for unit, module in units:
        for name, parameter in module.named_parameters(prefix=unit, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def _module_lines(module: nn.Module) -> Iterator[str]:
    for path, inner in module.named_modules():
        kind: Any = type(inner)
        settings = [f"{key}={_text_of(item, 1)}" for key, item in sorted(vars(inner).items()) if key[0] != "_"]
        tensors = [
            (key, t is not None and tensor_form(t)) for key, t in (*inner._parameters.items(), *inner._buffers.items())
        ]
        graph = graph_form(inner) if isinstance(inner, fx.GraphModule) else ()
        described = settings if not isinstance(inner, fx.GraphModule | Segment) else []
        source = _source_of(kind)
        yield _without_addresses(
            f"{path} {kind.__module__}.{kind.__qualname__} {source} {inner.training} {inner.extra_repr()}"
            f" {described} {tensors} {graph}"
        )


@cache
def _source_of(kind: Hashable) -> str:
    """Returns a hash of the file that defines a class; empty if there is none."""
    try:
        path = inspect.getsourcefile(kind)  # type: ignore[arg-type]
        return sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except (TypeError, OSError):
        return ""


def _text_of(item: Any, depth: int) -> str:
    """Returns what an object is, without its address."""
    if isinstance(item, Tensor):
        return str(tensor_form(item))
    if isinstance(item, nn.Module):
        return " ".join(_module_lines(item)) if depth > 1 else type(item).__qualname__
    if isinstance(item, types.MethodType):
        return f"{_text_of(item.__self__, depth - 1)}.{_text_of(item.__func__, depth)}"
    if isinstance(item, types.FunctionType) and depth:
        return _text_of_function(item, depth)
    if isinstance(item, tuple | list) and depth:
        return f"{type(item).__name__}({', '.join(_text_of(each, depth - 1) for each in item)})"
    if hasattr(item, "__dict__") and not isinstance(item, type) and depth > 1 and callable(item):
        values = ", ".join(f"{key}={_text_of(value, depth - 1)}" for key, value in sorted(vars(item).items()))
        return f"{type(item).__qualname__}({values})"
    return _without_addresses(repr(item))


def _text_of_function(function: types.FunctionType, depth: int) -> str:
    """Returns a function as its code, its defaults, and the values that it closes over or refers to."""
    code = function.__code__
    used = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    used += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    inner = [_text_of(item, depth - 1) for item in (*used, *(function.__defaults__ or ()))]
    constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
    nested = [each.co_code.hex() for each in code.co_consts if isinstance(each, types.CodeType)]
    return f"{function.__qualname__} {code.co_code.hex()} {nested} {constants} {code.co_names} {inner}"


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _forms_of(tree: Any) -> str:
    leaves, form = pytree.tree_flatten(tree)
    texts = [str(tensor_form(leaf)) if isinstance(leaf, Tensor) else _text_of(leaf, 1) for leaf in leaves]
    return _without_addresses(f"{texts} {form}")


def _without_addresses(text: str) -> str:
    return _ADDRESS.sub("", text)
