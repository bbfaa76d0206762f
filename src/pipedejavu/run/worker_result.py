"""The result of one worker, serialised for shared memory or the network."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

Weights = dict[tuple[int, int], dict[str, Tensor]]
"""Weights by (piece, replica), then by name."""

_FACTS = "facts"
"""Key of the JSON facts; keys of tensors contain slashes."""
_OTHER = "other"


class WorkerResult(NamedTuple):
    """A worker's weights, other tensors and facts."""

    weights: Weights
    others: dict[str, Tensor]
    """The worker's other model state: buffers and untrained parameters."""
    facts: dict[str, Any]
    """JSON: the spans of the last round, counts, and data that the disk has not taken."""

    @classmethod
    def of_dead(cls) -> "WorkerResult":
        """Returns the result of a worker that died while the others went on: it has left nothing."""
        counts = dict.fromkeys(("peak_live", "peak_versions", "peak_bytes", "base_bytes"), 0)
        return cls({}, {}, {**counts, "spans": [], "events": [], "skipped": {}, "left": {}, "is_dead": True})

    @property
    def is_lead(self) -> bool:
        """Whether the worker led the run: its result has what all share."""
        return "names" in self.facts

    def pack(self) -> bytes:
        """Returns the result in safetensors format."""
        flat = {f"{_OTHER}/{name}": tensor for name, tensor in self.others.items()}
        for (piece, replica), named in self.weights.items():
            flat |= {f"{piece}/{replica}/{name}": weight for name, weight in named.items()}
        flat = {key: _copied(tensor) for key, tensor in flat.items()}
        flat[_FACTS] = torch.frombuffer(bytearray(json.dumps(self.facts).encode()), dtype=torch.uint8)
        return save(flat)

    def on_host(self) -> "WorkerResult":
        """Returns the result as `unpack` does on what `pack` returns, with copies of all tensors on the host."""
        weights = {
            key: {name: _copied(weight) for name, weight in named.items()} for key, named in self.weights.items()
        }
        others = {name: _copied(tensor) for name, tensor in self.others.items()}
        return WorkerResult(weights, others, json.loads(json.dumps(self.facts)))

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor]) -> "WorkerResult":
        """Restores a result from the tensors of `pack`."""
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


def lead_of(results: Sequence[WorkerResult]) -> WorkerResult:
    """Returns the result of the worker that led the run."""
    return next(result for result in results if result.is_lead)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()
