"""Meta models: tensors with shape, dtype and device but no storage, so that a model of any size fits."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from pipedejavu.runtime.compute_precision import FULL, ComputeFormat, parameters_of

Mode = FakeTensorMode


def make_mode() -> Mode:
    """Returns a mode in which operations compute shapes only; tensors of different modes cannot be mixed."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def mode_of(tensors: Any) -> Mode:
    """Returns the mode of fake tensors, or a new mode if there are none."""
    modes = [leaf.fake_mode for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, FakeTensor)]
    return modes[0] if modes else make_mode()


def meta_like(tree: Any, mode: Mode) -> Any:
    """Returns fake CPU tensors with the shapes, strides and dtypes of a tree's tensors."""

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    with mode:
        return pytree.tree_map_only(Tensor, fake, tree)


def fake_copy(module: nn.Module, mode: Mode, form: ComputeFormat = FULL) -> nn.Module:
    """Returns a copy of a module with fake tensors, with its weights in the formats that they are computed with."""
    copies: dict[int, Any] = {id(buffer): meta_like(buffer, mode) for buffer in module.buffers()}
    with mode:
        for part, parameter in parameters_of(module):
            fake = meta_like(parameter, mode)
            fake = fake.to(torch.bfloat16) if form.is_lowered(part, parameter) else fake
            copies[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
    return copy.deepcopy(module, copies)


def make_meta_model(model: nn.Module, mode: Mode) -> None:
    """Replaces a model's tensors in place by fake ones; tied parameters stay tied. They may be on the meta device."""
    made: dict[int, Tensor] = {}
    before: list[Tensor] = []  # keeps ids unique

    def once(tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        before.append(tensor)
        if id(tensor) not in made:
            made[id(tensor)] = make(meta_like(tensor, mode))
        return made[id(tensor)]

    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                replacement: Any = once(parameter, partial(nn.Parameter, requires_grad=parameter.requires_grad))
                module._parameters[key] = replacement
        for attributes in (module._buffers, vars(module)):
            for key, tensor in list(attributes.items()):
                if isinstance(tensor, Tensor):
                    attributes[key] = once(tensor, lambda tensor: tensor)
