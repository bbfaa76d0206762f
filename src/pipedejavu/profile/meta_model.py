"""Models without memory: tensors that have a form and a device, but no values, so that any size fits anywhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

Mode = FakeTensorMode


def make_mode() -> Mode:
    """Returns rules under which operations work out forms alone; tensors of one mode mix with no others."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def mode_of(tensors: Any) -> Mode:
    """Returns the mode of tensors without memory, or a new one for all others."""
    found = [leaf.fake_mode for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, FakeTensor)]
    return found[0] if found else make_mode()


def meta_like(tree: Any, mode: Mode) -> Any:
    """Returns tensors as they would be in a host's memory, without any."""

    def blank(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    with mode:
        return pytree.tree_map_only(Tensor, blank, tree)


def make_meta_model(model: nn.Module, mode: Mode) -> None:
    """Replaces a model's tensors, which may be on the device 'meta', in place; tied parameters stay tied."""
    made: dict[int, Tensor] = {}
    before: list[Tensor] = []  # so that no identity is used again

    def once(tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        before.append(tensor)
        if id(tensor) not in made:
            made[id(tensor)] = make(meta_like(tensor, mode))
        return made[id(tensor)]

    for part in model.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                own: Any = once(parameter, partial(nn.Parameter, requires_grad=parameter.requires_grad))
                part._parameters[key] = own
        for place in (part._buffers, vars(part)):
            for key, tensor in list(place.items()):
                if isinstance(tensor, Tensor):
                    place[key] = once(tensor, lambda tensor: tensor)
