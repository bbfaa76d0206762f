"""A model's forward as one flat graph of operations, with the model's own parameters and buffers.

It is `torch.export` that records the graph, for inputs of one shape. What it would lose is refused here with the line
of the user's source; where a graph may be cut is not known here.
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
"""Operations that only assert what held for the sample."""
_REMEDY = "the layers of an nn.Sequential are not recorded, and run as they are"
_LIBRARY = tuple(str(path) for path in Path(traceback.__file__).parent.glob("*.py"))
"""Files of Python's own."""


@dataclass(frozen=True)
class Form:
    """How a call's inputs become the tensors of a graph: the same call in other words."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """Of the sample, in the order of the graph."""
    names: tuple[str, ...]
    """Of the keyword arguments, in that order."""

    def flat(self, inputs: Any) -> Tensor | tuple[Tensor, ...]:
        """Returns the tensors of inputs that are like the sample."""
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
        tensors = tuple(leaf for leaf, own in zip(leaves, self.leaves, strict=True) if isinstance(own, Tensor))
        return tensors if len(tensors) > 1 else tensors[0]


def _is_like(leaf: Any, own: Any) -> bool:
    if isinstance(leaf, Tensor) or isinstance(own, Tensor):
        return isinstance(leaf, Tensor) and isinstance(own, Tensor)
    return bool(leaf == own)


@dataclass(frozen=True)
class Trace:
    """A recorded forward."""

    nodes: tuple[fx.Node, ...]
    """The operations, in the order in which they ran."""
    inputs: tuple[fx.Node, ...]
    """What stands for the tensors of the inputs."""
    states: Mapping[fx.Node, str]
    """What stands for parameters, buffers and constants, with the model's own names."""
    held: Mapping[str, Tensor | nn.Module]
    """Those by name, and the bodies of operations that have one."""
    outputs: tuple[Any, ...]
    """The leaves of the output: nodes, and what is no tensor."""
    spec: pytree.TreeSpec
    """Of the output."""
    form: Form


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that inputs stand for: a tuple is several, a mapping those with names."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def trace(model: nn.Module, inputs: Any) -> Trace:
    """Records a model's forward; raises InputError with the line where that cannot be done. Nothing is computed."""
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, as_call(inputs))  # else the same tensor twice is one input
    try:
        with _watched(), TraceGuard() as answers, masks_as_in_training(answers):
            exported = torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        raise InputError(_refusal(model, error)) from None
    names = tuple(pytree.tree_unflatten(range(exported.call_spec.in_spec.num_leaves), exported.call_spec.in_spec)[1])
    leaves, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in names}))
    form = Form(spec, tuple(leaves), names)
    own = _own_names(model)
    found: list[fx.Node] = []
    states: dict[fx.Node, str] = {}
    held: dict[str, Tensor | nn.Module] = {}
    given: list[fx.Node] = []
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            what = specs[node.name]
            if what.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                tensor = _member(model, str(what.target))
                states[node] = own[id(tensor)]
                held[states[node]] = tensor
            elif what.kind == InputKind.CONSTANT_TENSOR:
                states[node] = str(what.target)
                held[states[node]] = exported.constants[str(what.target)]
            elif what.kind == InputKind.USER_INPUT:
                given.append(node)
            else:
                kind = type(exported.constants.get(str(what.target))).__name__
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
            found.append(node)
    (output,) = (node for node in exported.graph.nodes if node.op == "output")
    tensors = tuple(node for node, leaf in zip(given, leaves, strict=True) if isinstance(leaf, Tensor))
    return Trace(tuple(found), tensors, states, held, tuple(output.args[0]), exported.call_spec.out_spec, form)


def _own_names(model: nn.Module) -> dict[int, str]:
    """Returns the first name of each parameter and buffer."""
    names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        names.setdefault(id(tensor), name)
    return names


def _member(model: nn.Module, name: str) -> Tensor:
    """Returns a parameter or buffer by its name."""
    path, _, key = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), key)
    return found


def _schema_name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _line_of(node: fx.Node) -> str:
    """Returns the line that a node was recorded at, the innermost that is not torch's, if it is known."""
    lines = str(node.meta.get("stack_trace") or "").splitlines()
    foreign = (f'File "{Path(torch.__file__).parent}', 'File "<')
    known = [n for n, line in enumerate(lines) if 'File "' in line and not line.strip().startswith(foreign)]
    if not known or known[-1] + 1 >= len(lines):
        return ""
    _, file, rest = lines[known[-1]].split('"', 2)
    number = rest.removeprefix(", line ").partition(",")[0]
    return f"{file}:{number}, '{lines[known[-1] + 1].strip()}': "


class _LostBackwardError(Exception):
    """A backward of the user's own would be lost."""


@contextmanager
def _watched() -> Iterator[None]:
    """Refuses what changes a backward, which a graph of forward operations has no place for, and keeps torch quiet."""
    before, hook = torch.autograd.Function.__dict__["apply"], Tensor.register_hook

    def register_hook(tensor: Tensor, *_: Any) -> Any:
        raise _LostBackwardError(
            f"the hook on a tensor of shape {tuple(tensor.shape)} would be lost; change its gradient in the forward, or"
            " make this module a unit of an nn.Sequential, whose units run as they are"
        )

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            raise _LostBackwardError(f"the backward of the autograd function {cls.__name__} would be lost")
        return before.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    Tensor.register_hook = register_hook  # type: ignore[method-assign]
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()):
            yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]
        Tensor.register_hook = hook  # type: ignore[method-assign]
        logging.disable(level)


def _refusal(model: nn.Module, error: Exception) -> str:
    """Returns the sentence for a model that could not be recorded, with the innermost line that is not torch's."""
    foreign = (str(Path(torch.__file__).parent), __file__, trace_guard.__file__, "<string>", "<eval", *_LIBRARY)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(foreign)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}, '{frames[-1].line}': " if frames else ""
    if isinstance(error, GuardOnDataDependentSymNode):
        why = "what runs next depends on the values of a tensor; decide it by shapes or outside the model"
    else:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"a {type(model).__name__} cannot be cut: {where}{why}; {_REMEDY}"
