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
"""The name of what is no weight; names of weights have slashes."""


class WorkerResult(NamedTuple):
    """A worker's weights, and as JSON the spans of its last round, its counts, and what no disk has taken yet."""

    weights: Weights
    facts: dict[str, Any]

    def pack(self) -> bytes:
        """Returns the result in the format of safetensors."""
        flat = {
            f"{piece}/{replica}/{name}": weight.detach().cpu().contiguous().clone()
            for (piece, replica), named in self.weights.items()
            for name, weight in named.items()
        }
        flat[_FACTS] = torch.frombuffer(bytearray(json.dumps(self.facts).encode()), dtype=torch.uint8)
        return save(flat)

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor]) -> "WorkerResult":
        """Returns the result that such tensors hold."""
        weights: Weights = {}
        for key, weight in tensors.items():
            if key != _FACTS:
                piece, replica, name = key.split("/", 2)
                weights.setdefault((int(piece), int(replica)), {})[name] = weight
        return cls(weights, json.loads(tensors[_FACTS].numpy().tobytes()))
