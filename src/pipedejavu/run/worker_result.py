"""What one worker leaves at its end, as bytes that memory or a wire can carry."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

Weights = dict[tuple[int, int], dict[str, Tensor]]
"""By (piece, replica) and name."""

_FACTS = "facts"
"""The name of what is no tensor; names of tensors have slashes."""
_OTHER = "other"


class WorkerResult(NamedTuple):
    """A worker's weights, and as JSON the spans of its last round, its counts, and what no disk has taken yet."""

    weights: Weights
    others: dict[str, Tensor]
    """The rest of the model's state that it has: buffers, and what is not trained."""
    facts: dict[str, Any]

    def pack(self) -> bytes:
        """Returns the result in the format of safetensors."""
        flat = {f"{_OTHER}/{name}": tensor for name, tensor in self.others.items()}
        for (piece, replica), named in self.weights.items():
            flat |= {f"{piece}/{replica}/{name}": weight for name, weight in named.items()}
        flat = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in flat.items()}
        flat[_FACTS] = torch.frombuffer(bytearray(json.dumps(self.facts).encode()), dtype=torch.uint8)
        return save(flat)

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor]) -> "WorkerResult":
        """Returns the result that such tensors hold."""
        weights: Weights = {}
        others: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if kind == _OTHER:
                others[name] = tensor
            elif key != _FACTS:
                replica, _, name = name.partition("/")
                weights.setdefault((int(kind), int(replica)), {})[name] = tensor
        return cls(weights, others, json.loads(tensors[_FACTS].numpy().tobytes()))
