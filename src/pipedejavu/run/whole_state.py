"""A model's whole state under its own names: what its units train or change, and the rest."""

from collections.abc import Mapping

from torch import Tensor, nn

from pipedejavu.profile.sequential import Units


class WholeState:
    """Says what the units of a model call its tensors, and has those that no unit trains or changes."""

    def __init__(self, model: nn.Module, units: Units):
        state = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        first: dict[int, str] = {}
        for name, tensor in state.items():
            first.setdefault(id(tensor), name)
        self.names: dict[str, str] = {}
        """The model's own names by those of the units, for what is part of its state."""
        held: set[int] = set()
        for unit, module in units:
            parameters = [*module.named_parameters(unit, remove_duplicate=False)]
            members = [(name, p) for name, p in parameters if p.requires_grad]
            for name, tensor in (*members, *module.named_buffers(unit, remove_duplicate=False)):
                own = name if name in state else first.get(id(tensor))
                if own is not None:
                    self.names[name] = own
                    held |= {id(tensor), id(state[own])}
        self.rest = {name: tensor.detach() for name, tensor in state.items() if id(tensor) not in held}
        """Parameters that are frozen or not used, and buffers that are not."""

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors of the units that belong to the model's state, under its own names."""
        return {self.names[name]: tensor for name, tensor in tensors.items() if name in self.names}

    def saved_rest(self) -> dict[str, Tensor]:
        """Returns the rest as a checkpoint has it."""
        return {f"buffer/{name}": tensor.to("cpu", copy=True) for name, tensor in self.rest.items()}
