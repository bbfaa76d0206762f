"""Initial weights of a run from a file, in place of random ones."""

import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.store import read_weights


@torch.no_grad()
def load_weights(model: nn.Module, source: str) -> None:
    """Loads weights from a file or folder of safetensors into a model, matched by name.

    All parameters must be present, tied ones under any of their names. Buffers may be missing, and unknown names are
    ignored.
    """
    weights, state = read_weights(source), model.state_dict(keep_vars=True)
    names: dict[Tensor, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(tensor, []).append(name)
    chosen = {tensor: next((name for name in tied if name in weights), None) for tensor, tied in names.items()}
    missing = [names[t][0] for t, name in chosen.items() if name is None and isinstance(t, nn.Parameter)]
    if missing:
        count = sum(1 for _ in model.parameters())
        raise InputError(
            f"{source} has no '{missing[0]}'{_more(missing)} of the model's {count} parameters; give weights that were"
            " saved under the model's own names"
        )
    matched = {name: tensor for tensor, name in chosen.items() if name is not None}
    wrong = [name for name, tensor in matched.items() if weights[name].shape != tensor.shape]
    if wrong:
        theirs, ours = tuple(weights[wrong[0]].shape), tuple(matched[wrong[0]].shape)
        raise InputError(
            f"'{wrong[0]}'{_more(wrong)} in {source} is {theirs}, and the model's is {ours}; give weights of a model of"
            " this size"
        )
    for name, tensor in matched.items():
        tensor.copy_(weights[name])


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
