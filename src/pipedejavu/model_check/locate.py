"""Locates where a model and its units first differ: the unit and, for a traced model, the line of source.

The uncut model runs under a dispatch mode that records the result of every operation. The units then run, a traced unit
operation by operation; the first result that the model never produced is the location.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipedejavu.model_check.model_pass import WholeModel, placed
from pipedejavu.profile import ModelCut, Units
from pipedejavu.profile.segment import Segment

Seed = Callable[[int], None]
"""Seeds all random generators for a pass."""


def find_place(
    model: nn.Module, cut: ModelCut, samples: Sequence[tuple[Any, Any]], number: int, device: torch.device, seed: Seed
) -> str:
    """Returns the unit, and the line if known, where the forward pass `number` first differs from the model's.

    Passes 0 to `number` run on new copies, with `seed` before each. Empty if no unit differs.
    """
    whole = WholeModel(model, cut.method == "chain", lambda output, _: output, device)
    units = [(name, unit.to(device)) for name, unit in copy.deepcopy(list(cut.units))]
    recorder = _Recorder()
    for n in range(number + 1):
        inputs = samples[n % len(samples)][0]
        seed(n)
        if n < number:
            whole.forward(inputs)
            value = cut.flat(placed(inputs, device))
            seed(n)
            for _, unit in units:
                value = unit(value)
            continue
        recorder.add(placed(inputs, device))
        with recorder:
            whole.forward(inputs)
        seed(n)
        return _first_unit(units, cut.flat(placed(inputs, device)), recorder)
    return ""


def _first_unit(units: Units, value: Any, recorder: "_Recorder") -> str:
    for name, unit in units:
        steps = None
        if isinstance(unit, Segment):
            graph = unit.body_for(value).graph
            steps = _GraphSteps(graph, recorder)
            graph.forward = steps.run  # a copy's
        value = unit(value)
        if steps is not None and steps.line:
            return f"unit '{name}' at {steps.line}"
        if steps is None and recorder.lacks(value):
            return f"unit '{name}'"
    return ""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a hash of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.contents: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and records its results."""
        results = func(*args, **(kwargs or {}))
        self.add(results)
        return results

    def add(self, value: Any) -> None:
        """Records the tensors of a value."""
        self.contents.update(_content(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))

    def lacks(self, value: Any) -> bool:
        """Whether a value has a floating-point tensor that was not recorded."""
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return any(_content(leaf) not in self.contents for leaf in leaves)


def _content(tensor: Tensor) -> int:
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        return hash(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


class _GraphSteps(fx.Interpreter):
    """Runs a traced graph and finds the first operation whose result the model never produced."""

    def __init__(self, graph: fx.GraphModule, recorder: _Recorder):
        super().__init__(graph)
        self.recorder = recorder
        self.line = ""

    def run_node(self, n: fx.Node) -> Any:
        """Runs an operation and compares its result."""
        result = super().run_node(n)
        if not self.line and n.op == "call_function" and self.recorder.lacks(result):
            self.line = _line(n.meta.get("stack_trace")) or str(n.target)
        return result


def _line(trace: str | None) -> str:
    """Returns the innermost line of a stack outside torch, as 'FILE:NUMBER, 'SOURCE''."""
    rows = (trace or "").splitlines()
    frames = [(row, rows[n + 1].strip() if n + 1 < len(rows) else "") for n, row in enumerate(rows) if "File " in row]
    user_frames = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    if not user_frames:
        return ""
    head, source = user_frames[-1]
    file, line = head.split('"')[1], head.split("line ")[1].split(",")[0]
    return f"{file}:{line}, '{source}'"
