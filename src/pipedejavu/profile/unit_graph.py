"""Units as graphs of operations with the shapes of all tensors, to find what can be divided in them."""

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pipedejavu.profile.model_trace import trace
from pipedejavu.profile.segment import Segment, Value, make_body
from pipedejavu.runtime.axis_region import LOSS_UNIT, UnitGraph
from pipedejavu.runtime.compiled_unit import LossCall


class _Loss(nn.Module):
    """A loss as a last unit, which takes the tensors of the output and of the targets."""

    def __init__(self, head: LossCall, num_outputs: int):
        super().__init__()
        self.head, self.num_outputs = head, num_outputs
        self.leaves, self.spec = pytree.tree_flatten(head.targets)

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Returns the loss."""
        outputs, given = tensors[: self.num_outputs], iter(tensors[self.num_outputs :])
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        value = outputs if len(outputs) > 1 else outputs[0]
        return self.head.loss(value, pytree.tree_unflatten(leaves, self.spec))


def unit_graphs(units: Sequence[tuple[str, nn.Module]], value: Value, head: LossCall | None = None) -> list[UnitGraph]:
    """Returns the graphs of consecutive units, of which the first takes `value`; nothing is computed.

    A segment has its graph already; other modules are traced. Raises InputError if one cannot be. With a `head`, the
    last graph is that of the loss, which takes the tensors of the targets beside those of the output.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = value if isinstance(value, tuple) else (value,)
    fakes: tuple[Tensor, ...] = tuple(mode.from_tensor(tensor) for tensor in tensors)
    graphs = []
    for name, unit in units:
        body = _body(unit, fakes)
        with torch.enable_grad(), mode:
            fakes = _note_shapes(body, mode, fakes)
        graphs.append(UnitGraph(name, body))
    if head is not None:
        loss = _Loss(head, len(fakes))
        fakes = (*fakes, *(mode.from_tensor(leaf) for leaf in loss.leaves if isinstance(leaf, Tensor)))
        body = _body(loss, fakes)
        with torch.enable_grad(), mode:
            _note_shapes(body, mode, fakes)
        graphs.append(UnitGraph(LOSS_UNIT, body))
    return graphs


def _body(unit: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    if isinstance(unit, Segment):
        return unit.body_for(inputs).graph
    # A trace makes its own fake tensors of real ones; their memory is never touched.
    sample = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs)
    traced = trace(unit, sample if len(sample) == 1 else (sample,))
    outputs = [leaf for leaf in traced.outputs if isinstance(leaf, fx.Node)]
    return make_body(traced.nodes, list(traced.inputs), outputs, traced.states, traced.held)


def _note_shapes(body: fx.GraphModule, mode: FakeTensorMode, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Runs a graph on fake tensors, notes each node's result, and returns the outputs."""
    given = iter(inputs)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = next(given)
        elif node.op == "get_attr":
            path, _, key = str(node.target).rpartition(".")
            held = getattr(body.get_submodule(path), key)
            node.meta["val"] = mode.from_tensor(held) if isinstance(held, Tensor) else held
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    return tuple(node.meta["val"] for node in output.args[0])
