"""The newest weights of a running program: which worker holds each, and the tensors of the workers in this process."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from pipedejavu.engine.handlers import Handlers, pieces_of
from pipedejavu.engine.threads import final_weights
from pipedejavu.profile.sequential import Units
from pipedejavu.program import Program
from pipedejavu.run.run_folder import source_replica
from pipedejavu.session.trainer_ranks import TrainerRanks


class NewestWeights:
    """The newest parameters and buffers under their full names in the units; no tensor is copied.

    They are those of one replica; if replicas differ, by default those that a run ends with. Buffers are always those
    of the first replica. `handlers` are the workers of this process.
    """

    def __init__(self, program: Program, units: Units, handlers: Sequence[Handlers] = (), replica: int | None = None):
        self.handlers = handlers
        holders = [(worker, key) for worker in range(len(program.workers)) for key in pieces_of(program, worker)]
        source = source_replica(program, {key for _, key in holders}) if replica is None else replica
        self.worker_of: dict[str, int] = {}
        """The worker that holds each tensor."""
        self.tensors: dict[str, Tensor] = {}
        """The tensors that the workers of this process hold."""
        self.buffers: set[str] = set()
        for worker, (piece, holder) in holders:
            if holder == source:
                for number in program.pieces[piece].units:
                    name, module = units[number]
                    for full, _ in module.named_parameters(name, remove_duplicate=False):
                        self.worker_of[full] = worker
        first = min(replica for _, (_, replica) in holders)  # a server runs no forward, so it has no statistics
        for worker, (piece, holder) in holders:
            if holder == first:
                for number in program.pieces[piece].units:
                    name, module = units[number]
                    for full, _ in _saved_buffers(name, module):
                        self.worker_of[full] = worker
                        self.buffers.add(full)
        self.devices = {worker_state.index: worker_state.device for worker_state in handlers}
        """The devices of the workers of this process."""
        for worker_state in handlers:
            self._take(worker_state, source, first)

    def _take(self, handlers: Handlers, source: int, first: int) -> None:
        for key, weights in final_weights(handlers, source).items():
            runner = handlers.runners[key]
            kinds = {name: initial.dtype for name, initial in runner.initial.items()}  # a bf16 model has wider masters
            weights = {name: w.to(kinds.get(name, w.dtype)) for name, w in weights.items()}
            aliases = {full: weights[name] for full, name in runner.names.items()}
            self.tensors |= {full: tensor.detach() for full, tensor in (weights | aliases).items()}
        for key in handlers.runners:
            if key[1] == first:
                self.tensors |= dict(handlers.buffers_of(key))


def final_replicas(program: Program, units: Units) -> list[int]:
    """Returns the replicas that hold the weights which a run would end with, and the buffers of its first replica."""
    pieces = {key for worker in range(len(program.workers)) for key in pieces_of(program, worker)}
    last = source_replica(program, pieces)
    is_common = program.plan.version.kind == "sync" and not program.plan.feed.is_own
    has_statistics = any(True for name, module in units for _ in _saved_buffers(name, module))
    if not is_common or last == program.num_replicas or has_statistics:
        return [last]
    return sorted({replica for _, replica in pieces if replica < program.num_replicas})


def _saved_buffers(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, part in module.named_modules(prefix=name):
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                yield ".".join(filter(None, (path, key))), buffer


def copy_newest(weights: NewestWeights, units: Units, ranks: TrainerRanks | None) -> None:
    """Copies the newest weights into the model that the units were cut from; all ranks call it together."""
    with torch.no_grad():
        for name, module in units:
            tensors = [*module.named_parameters(name, remove_duplicate=False), *_saved_buffers(name, module)]
            for full, tensor in tensors:
                source = weights.worker_of.get(full)
                newest = weights.tensors.get(full)
                if ranks is not None and source is not None:
                    newest = ranks.broadcast_tensor(newest, source, tensor)
                if newest is not None and newest.data_ptr() != tensor.data_ptr():
                    tensor.copy_(newest)
