"""Which parameters of a unit are stacked experts: found in its graph, or for a module that is not recorded by tracing
those of its parts whose parameters are all stacked.

Tracing changes torch's modules for all threads of the process, so no other thread may run a module meanwhile.
"""

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from pipedejavu.runtime.compiled_unit import GraphUnit
from pipedejavu.runtime.expert_span import Shape, find_spans
from pipedejavu.runtime.param_layout import ParamLayout

_PROBE_SLOTS = 2
_PLAIN = (bool, int, float, str, tuple, type(None))


def expert_layouts(unit: nn.Module) -> dict[str, ParamLayout]:
    """Returns the layout of each parameter of a unit that is divided with its experts, by name inside the unit."""
    names: dict[str, None] = {}
    if isinstance(unit, GraphUnit):
        for _, graph in recorded_graphs(unit):
            for span in find_spans(graph.graph, parameter_shapes(graph)):
                names |= dict.fromkeys(str(weight.target) for weight in span.weights)
    else:
        for path, part in slot_experts(unit):
            names |= dict.fromkeys(name for name, _ in part.named_parameters(prefix=path))
    shapes = parameter_shapes(unit)
    return {name: ParamLayout(shapes[name], dim=0) for name in names}


def parameter_shapes(module: nn.Module) -> dict[str, Shape]:
    """Returns the shapes of all parameters by name."""
    return {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}


def recorded_graphs(unit: nn.Module) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yields the graphs of a recorded unit, each for one shape of inputs, with their names."""
    for name, module in nn.Module.named_modules(unit):
        parent = name.rpartition(".")[0]
        if isinstance(module, fx.GraphModule) and not isinstance(unit.get_submodule(parent), fx.GraphModule):
            yield name, module


def slot_experts(unit: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost parts of a unit that take and return [experts, slots, width]."""
    seen: list[str] = []
    for path, part in unit.named_modules():
        if not any(path.startswith(f"{other}.") for other in seen) and _is_slot_experts(part):
            seen.append(path)
            yield path, part


def _is_slot_experts(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    if len({p.shape[0] if p.dim() >= 2 else 0 for p in parameters}) != 1 or parameters[0].shape[:1] in ((), (1,)):
        return False
    shapes = [tuple(p.shape) for p in parameters if p.dim() == 3]
    if parameters[0].dim() < 2 or not shapes or any(True for _ in module.buffers()):
        return False
    key = _key(module)
    if key not in _known:
        _known[key] = _traces_as_experts(module, shapes)
    return _known[key]


_known: dict[Hashable, bool] = {}
"""Whether modules of a form are experts: tracing takes longer than everything else here."""


def _key(module: nn.Module) -> Hashable:
    """Returns a key that modules share only if they have the same forward and parameters of the same shapes."""
    own = [
        (type(m), tuple((k, repr(v)) for k, v in vars(m).items() if isinstance(v, _PLAIN))) for m in module.modules()
    ]
    is_plain = not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in module.modules())
    return (tuple(own), tuple((n, p.shape, p.dtype) for n, p in module.named_parameters()), is_plain or id(module))


def _traces_as_experts(module: nn.Module, shapes: Sequence[Shape]) -> bool:
    parameters = list(module.parameters())
    widths = dict.fromkeys(width for shape in shapes for width in shape[1:])
    with _disable_current_modes():
        memo: dict[int, object] = {
            id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad) for p in parameters
        }
        probe = copy.deepcopy(module, memo)
        return any(_takes_slots(probe, shapes[0][0], width, parameters[0].dtype) for width in widths)


def _takes_slots(probe: nn.Module, experts: int, width: int, dtype: torch.dtype) -> bool:
    """Whether a module without memory is one span of experts from its input to its output."""
    rows = torch.empty(experts, _PROBE_SLOTS, width, device="meta", dtype=dtype)
    try:
        graph = make_fx(lambda value: probe(value), pre_dispatch=True)(rows)
    except Exception:
        return False  # it takes something else
    spans = find_spans(graph.graph, _constant_shapes(graph))
    (given,) = graph.graph.find_nodes(op="placeholder")
    (output,) = graph.graph.find_nodes(op="output")
    return len(spans) == 1 and spans[0].rows is given and output.args[0] is spans[0].output


def _constant_shapes(graph: fx.GraphModule) -> Mapping[str, Shape]:
    held = {str(n.target): getattr(graph, str(n.target)) for n in graph.graph.nodes if n.op == "get_attr"}
    return {name: tuple(tensor.shape) for name, tensor in held.items() if isinstance(tensor, Tensor)}
