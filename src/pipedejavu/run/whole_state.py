"""A model's full state dict under its own names: the tensors that units train or change, and the rest."""

from collections.abc import Mapping

from torch import Tensor, nn

from pipedejavu.profile.sequential import Units


class WholeState:
    """Maps the units' tensor names to the model's names, and keeps the tensors that no unit trains or changes."""

    def __init__(self, model: nn.Module, units: Units):
        state = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        first: dict[int, str] = {}
        for name, tensor in state.items():
            first.setdefault(id(tensor), name)
        self.names: dict[str, str] = {}
        """Names in the model's state dict, by the names that units use."""
        held: set[int] = set()
        for unit, module in units:
            parameters = [*module.named_parameters(unit, remove_duplicate=False)]
            trained = [(name, p) for name, p in parameters if p.requires_grad]
            for name, tensor in (*trained, *module.named_buffers(unit, remove_duplicate=False)):
                model_name = name if name in state else first.get(id(tensor))
                if model_name is not None:
                    self.names[name] = model_name
                    held |= {id(tensor), id(state[model_name])}
        self.rest = {name: tensor.detach() for name, tensor in state.items() if id(tensor) not in held}
        """Frozen and unused parameters, and unused buffers."""

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors that belong to the model's state dict, under the model's names."""
        return {self.names[name]: tensor for name, tensor in tensors.items() if name in self.names}

    def saved_rest(self) -> dict[str, Tensor]:
        """Returns CPU copies of the rest, under the names that checkpoints use."""
        return {f"buffer/{name}": tensor.to("cpu", copy=True) for name, tensor in self.rest.items()}
