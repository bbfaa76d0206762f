"""Traces a model's forward as one flat graph of operations over the model's own parameters and buffers.

`torch.export` records the graph, for inputs of one shape. Constructs that it would lose are refused with the line of
the user's source. This file does not know where a graph may be cut.
"""

import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from pipedejavu.facts import InputError
from pipedejavu.profile import trace_guard
from pipedejavu.profile.segment import is_region, refusal_of_branches
from pipedejavu.profile.trace_guard import TraceGuard, masks_as_in_training

_CHECKS = frozenset(
    f"aten::{name}" for name in ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size")
)
"""Operations that only assert properties of the sample."""
_REMEDY = "the layers of an nn.Sequential are not recorded, and run as they are"
_LIBRARY = tuple(str(path) for path in Path(traceback.__file__).parent.glob("*.py"))
"""Files of Python's standard library."""


@dataclass(frozen=True)
class Form:
    """The structure of a call's inputs: maps arguments to the graph's input tensors."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """The sample's arguments, flattened in the order of the graph's inputs."""
    names: tuple[str, ...]
    """Names of the keyword arguments, in that order."""

    def flat(self, inputs: Any) -> Tensor | tuple[Tensor, ...]:
        """Returns the tensors among the inputs, which must have the sample's structure."""
        args, kwargs = as_call(inputs)
        if sorted(kwargs) != sorted(self.names):
            raise InputError(
                f"the model was cut for the keyword arguments {sorted(self.names)} and is given {sorted(kwargs)}; give"
                " all batches the same"
            )
        leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in self.names}))
        if spec != self.spec or not all(map(_is_like, leaves, self.leaves)):
            raise InputError(
                "the inputs of a batch are not those of the sample that the model was cut for; give all batches the"
                " same arguments, and tensors where the sample has tensors"
            )
        tensors = tuple(leaf for leaf, sample in zip(leaves, self.leaves, strict=True) if isinstance(sample, Tensor))
        return tensors if len(tensors) > 1 else tensors[0]


def _is_like(leaf: Any, sample: Any) -> bool:
    if isinstance(leaf, Tensor) or isinstance(sample, Tensor):
        return isinstance(leaf, Tensor) and isinstance(sample, Tensor)
    return bool(leaf == sample)


@dataclass(frozen=True)
class Trace:
    """A traced forward."""

    nodes: tuple[fx.Node, ...]
    """The operations, in execution order."""
    inputs: tuple[fx.Node, ...]
    """Placeholders of the input tensors."""
    states: Mapping[fx.Node, str]
    """Placeholders of parameters, buffers and constants, with their names in the model."""
    held: Mapping[str, Tensor | nn.Module]
    """The parameters, buffers and constants by name, and the bodies of higher-order operations."""
    outputs: tuple[Any, ...]
    """The flattened output: nodes for tensors, other values as they are."""
    spec: pytree.TreeSpec
    """Structure of the output."""
    form: Form


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments that inputs stand for: a tuple or a mapping is several."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def trace(model: nn.Module, inputs: Any) -> Trace:
    """Traces a model's forward without computing it; raises InputError with the source line if that fails."""
    args, kwargs = _copied_to(_device_of(model), as_call(inputs))  # else a tensor that is passed twice is one input
    try:
        with _watched(), without_cache(model), TraceGuard() as answers, masks_as_in_training(answers):
            exported = torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        raise InputError(_refusal(model, error)) from None
    names = tuple(pytree.tree_unflatten(range(exported.call_spec.in_spec.num_leaves), exported.call_spec.in_spec)[1])
    leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in names}))
    form = Form(spec, tuple(leaves), names)
    names_by_id = _first_names(model)
    nodes: list[fx.Node] = []
    states: dict[fx.Node, str] = {}
    held: dict[str, Tensor | nn.Module] = {}
    placeholders: list[fx.Node] = []
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            input_spec = specs[node.name]
            if input_spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                tensor = _tensor_by_name(model, str(input_spec.target))
                states[node] = names_by_id[id(tensor)]
                held[states[node]] = tensor
            elif input_spec.kind == InputKind.CONSTANT_TENSOR:
                states[node] = str(input_spec.target)
                held[states[node]] = exported.constants[str(input_spec.target)]
            elif input_spec.kind == InputKind.USER_INPUT:
                placeholders.append(node)
            else:
                kind = type(exported.constants.get(str(input_spec.target))).__name__
                raise InputError(
                    f"a {type(model).__name__} cannot be cut: its forward uses a {kind} of its own, and a recording can"
                    " hold only tensors; use torch's default generators, or make its parts units of an nn.Sequential"
                )
        elif node.op == "get_attr":
            states[node] = str(node.target)
            held[states[node]] = getattr(exported.graph_module, states[node])
        elif node.op == "call_function" and _schema_name(node) not in _CHECKS:
            if isinstance(node.target, torch._ops.HigherOrderOperator) and not is_region(node):
                why = refusal_of_branches(str(node.target))
                raise InputError(f"a {type(model).__name__} cannot be cut: {_line_of(node)}{why}")
            nodes.append(node)
    (output,) = (node for node in exported.graph.nodes if node.op == "output")
    tensors = tuple(node for node, leaf in zip(placeholders, leaves, strict=True) if isinstance(leaf, Tensor))
    return Trace(tuple(nodes), tensors, states, held, tuple(output.args[0]), exported.call_spec.out_spec, form)


def _device_of(model: nn.Module) -> torch.device | None:
    """Returns the one device of a model's parameters, if it has one."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "meta"}
    return devices.pop() if len(devices) == 1 else None


def _copied_to(device: torch.device | None, inputs: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), inputs)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turns off the `use_cache` of configurations, as transformers has them: generation caches keys, training does not.

    A cache of keys and values would be an output of the graph, though no loss depends on it.
    """
    configs = {id(config): config for part in model.modules() if (config := getattr(part, "config", None)) is not None}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    try:
        for config in on:
            config.use_cache = False
        yield
    finally:
        for config in on:
            config.use_cache = True


def _first_names(model: nn.Module) -> dict[int, str]:
    """Returns the first name of each parameter and buffer, by id."""
    names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        names.setdefault(id(tensor), name)
    return names


def _tensor_by_name(model: nn.Module, name: str) -> Tensor:
    """Returns a parameter or buffer by its name."""
    path, _, key = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), key)
    return tensor


def _schema_name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _line_of(node: fx.Node) -> str:
    """Returns the innermost source line outside torch at which a node was recorded, or an empty string."""
    lines = str(node.meta.get("stack_trace") or "").splitlines()
    foreign = (f'File "{Path(torch.__file__).parent}', 'File "<')
    known = [n for n, line in enumerate(lines) if 'File "' in line and not line.strip().startswith(foreign)]
    if not known or known[-1] + 1 >= len(lines):
        return ""
    _, file, rest = lines[known[-1]].split('"', 2)
    number = rest.removeprefix(", line ").partition(",")[0]
    return f"{file}:{number}, '{lines[known[-1] + 1].strip()}': "


class _LostBackwardError(Exception):
    """A custom backward would be lost."""


@contextmanager
def _watched() -> Iterator[None]:
    """Refuses custom backwards and tensor hooks, which a forward graph cannot hold, and silences torch's messages."""
    original_apply, original_hook = torch.autograd.Function.__dict__["apply"], Tensor.register_hook

    def register_hook(tensor: Tensor, *_: Any) -> Any:
        raise _LostBackwardError(
            f"the hook on a tensor of shape {tuple(tensor.shape)} would be lost; change its gradient in the forward, or"
            " make this module a unit of an nn.Sequential, whose units run as they are"
        )

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            raise _LostBackwardError(f"the backward of the autograd function {cls.__name__} would be lost")
        return original_apply.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    Tensor.register_hook = register_hook  # type: ignore[method-assign]
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()):
            yield
    finally:
        torch.autograd.Function.apply = original_apply  # type: ignore[method-assign]
        Tensor.register_hook = original_hook  # type: ignore[method-assign]
        logging.disable(level)


def _refusal(model: nn.Module, error: Exception) -> str:
    """Returns the error text for a model that cannot be traced, with the innermost source line outside torch."""
    foreign = (str(Path(torch.__file__).parent), __file__, trace_guard.__file__, "<string>", "<eval", *_LIBRARY)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(foreign)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}, '{frames[-1].line}': " if frames else ""
    if isinstance(error, GuardOnDataDependentSymNode):
        why = "what runs next depends on the values of a tensor; decide it by shapes or outside the model"
    else:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"a {type(model).__name__} cannot be cut: {where}{why}; {_REMEDY}"
