"""Weights that a run begins with, in place of those that its seed makes."""

import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.store import read_weights


@torch.no_grad()
def load_weights(model: nn.Module, source: str) -> None:
    """Gives a model the weights in a file or folder of safetensors, by its own names.

    All of its parameters must be there, tied ones under any of their names; buffers need not, and what the model does
    not have is left.
    """
    given, own = read_weights(source), model.state_dict(keep_vars=True)
    names: dict[Tensor, list[str]] = {}
    for name, tensor in own.items():
        names.setdefault(tensor, []).append(name)
    found = {tensor: next((name for name in of if name in given), None) for tensor, of in names.items()}
    missing = [names[t][0] for t, name in found.items() if name is None and isinstance(t, nn.Parameter)]
    if missing:
        count = sum(1 for _ in model.parameters())
        raise InputError(
            f"{source} has no '{missing[0]}'{_more(missing)} of the model's {count} parameters; give weights that were"
            " saved under the model's own names"
        )
    matched = {name: tensor for tensor, name in found.items() if name is not None}
    wrong = [name for name, tensor in matched.items() if given[name].shape != tensor.shape]
    if wrong:
        theirs, ours = tuple(given[wrong[0]].shape), tuple(matched[wrong[0]].shape)
        raise InputError(
            f"'{wrong[0]}'{_more(wrong)} in {source} is {theirs}, and the model's is {ours}; give weights of a model of"
            " this size"
        )
    for name, tensor in matched.items():
        tensor.copy_(given[name])


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
