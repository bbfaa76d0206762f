"""Initial weights of a run from a file, in place of random ones."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
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


def describe_dtype(source: str, dtype: str) -> str:
    """Returns a sentence if weights on disk have another dtype than the run's; empty if not, or if it is unknown."""
    path = Path(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
    kinds: set[str] = set()
    try:
        for file in files if path.exists() else ():
            with safe_open(file, framework="pt") as tensors:
                kinds |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):  # loading them says what is wrong
        return ""
    others = sorted(names[kind] for kind in kinds & names.keys() if names[kind] != dtype)
    if not others:
        return ""
    kept = f"they are loaded into {dtype} parameters, which the run trains"
    return f"the weights in {source} are {' and '.join(others)}; {kept}"


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
