"""The ranks that a launcher such as torchrun started, as a Trainer uses them.

Every rank runs the user's script, and the workers of a plan are the ranks. Ranks exchange bytes, tensors and JSON, and
unpickle nothing.
"""

import atexit
import hashlib
import os
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.utils import _pytree as pytree

from pipedejavu.facts import InputError
from pipedejavu.facts.printable import tell
from pipedejavu.health.failure import is_lost
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.source.user_batch import UserBatch

BatchKind = Literal["auto", "global", "shard"]

_CALLS = (
    "step", "evaluate", "the end of evaluate", "save", "load", "state_dict", "the first batch", "the end of an epoch",
    "the end of the script", "wait",
)  # fmt: skip
"""What ranks do together; each begins with a comparison, so that ranks that do different things end with a sentence."""
_LAST_WORDS_S = 1.0
"""How long the first rank waits for others that fail with it."""
_joined: "TrainerRanks | None" = None


class TrainerRanks:
    """This rank among all ranks, for as long as the process lives."""

    def __init__(self, group: RankGroup):
        self.group, self.rank, self.size = group, group.rank, group.size
        self._is_over = False
        self._numbers: dict[str, int] = {}
        self._said: set[str] = set()
        self._hook = sys.excepthook
        sys.excepthook = self._end_with
        atexit.register(self._end)

    @classmethod
    def join(cls, batches: BatchKind) -> "TrainerRanks | None":
        """Joins the ranks of this run once per process; returns None in a process that has no others."""
        global _joined
        if batches not in get_args(BatchKind):
            raise InputError(f"batches is {batches!r}; give one of {', '.join(map(repr, get_args(BatchKind)))}")
        if _joined is None:
            is_launched = bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))
            if not dist.is_initialized() and not is_launched:
                return None
            _joined = cls(RankGroup.join())
        return _joined

    def store(self, name: str) -> PrefixStore:
        """Returns a part of the ranks' store; the n-th call with a name returns the same part on all ranks."""
        assert self.group.store is not None
        self._numbers[name] = self._numbers.get(name, 0) + 1
        return PrefixStore(f"{name}{self._numbers[name]}", self.group.store)

    def agree(self, call: str, *numbers: int) -> list[list[int]]:
        """Returns the numbers of every rank; raises InputError on all ranks unless all make the same call."""
        mine = torch.tensor([_CALLS.index(call), *numbers, *[0] * (2 - len(numbers))])
        rows = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        table = [row.tolist() for row in rows]
        calls = [_CALLS[row[0]] for row in table]
        if len({*calls}) > 1:
            other = next(rank for rank in range(self.size) if calls[rank] != calls[0])
            self._is_over = True
            raise InputError(
                f"rank 0 is at {calls[0]} where rank {other} is at {calls[other]}; let all ranks make the same calls of"
                " the Trainer, state_dict() of its model included, with as many batches on each"
            )
        return [row[1:] for row in table]

    def agree_on(self, call: str, folder: str | Path) -> None:
        """Raises InputError on all ranks unless all make the same call with the same folder."""
        path = str(Path(folder).absolute())
        if len({digest for digest, _ in self.agree(call, zlib.crc32(path.encode()))}) > 1:
            self._is_over = True
            raise InputError(
                f"the ranks call {call} with different folders, rank {self.rank} with {path}; give all ranks one folder"
                " that all of them see, not a temporary one of their own"
            )

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Returns the sum of each value over all ranks."""
        table = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(table)
        return table.tolist()

    def share_batch(self, batch: Any, kind: BatchKind, form: UserBatch, call: str) -> tuple[Any, BatchKind]:
        """Returns the batch of all ranks, and whether each rank has given all of it or its share."""
        leaves = pytree.tree_leaves(batch if not isinstance(batch, Mapping) else dict(batch))
        digest = _digest(leaves)
        rows = self.agree(call, digest, form.num_items or 0)
        digests = [row[0] for row in rows]
        is_same = len({*digests}) == 1
        if kind == "auto" or self.size == 1:
            kind = "global" if is_same else "shard"
            self._say(
                f"all {self.size} ranks give the same batch: a step trains on it once"
                if is_same
                else f"each of the {self.size} ranks gives its share of a batch: a step trains on all of them"
            )
        elif kind == "global" and not is_same:
            other = next(rank for rank in range(self.size) if digests[rank] != digests[0])
            raise InputError(
                f"rank {other} gives another batch than rank 0, and batches are 'global'; seed the order of the loaders"
                " alike, or give batches='shard' if each rank has its share"
            )
        elif kind == "shard" and is_same:
            raise InputError(
                f"all {self.size} ranks give the same batch, and batches are 'shard', each rank's share; give the"
                " DataLoader a DistributedSampler, or batches='global' to train on it once"
            )
        if kind == "global":
            return batch, kind
        items = [row[1] for row in rows]  # of all ranks already, as transformers' Trainer counts, or of each
        whole = self._joined_shards(form)
        if any(items) and isinstance(whole, dict):
            whole["num_items_in_batch"] = items[0] if len({*items}) == 1 else sum(items)
        return whole, kind

    def _say(self, sentence: str) -> None:
        """Tells the user something once."""
        if self.size > 1 and self.rank == 0 and sentence not in self._said:
            tell(sentence)
        self._said.add(sentence)

    def _joined_shards(self, form: UserBatch) -> Any:
        """Returns the samples of all ranks in their order, as a batch of the user's form."""
        leaves, spec = pytree.tree_flatten_with_path((form.inputs, form.targets))
        own = {str(n): leaf.detach().cpu().contiguous() for n, (_, leaf) in enumerate(leaves) if _is_tensor(leaf)}
        ranks = [load(data) for data in self.group.all_gather(save(own))]
        for other, tensors in enumerate(ranks):
            forms = [(n, t.shape[1:], t.dtype) for n, t in sorted(tensors.items())]
            known = [(n, t.shape[1:], t.dtype) for n, t in sorted(ranks[0].items())]
            if forms != known:
                there, here = ([tuple(form[1]) for form in some] for some in (forms, known))
                raise InputError(
                    f"samples of rank {other} have shapes {there}, and of rank 0 {here}; pad the batches of all ranks"
                    " to one length, or give batches='global'"
                )
        joined = []
        for n, (path, leaf) in enumerate(leaves):
            is_target, name = pytree.keystr(path[:1]) == "[1]", pytree.keystr(path[1:]) or "of the model"
            if _is_tensor(leaf) and (is_target or name in form.per_sample):
                joined.append(torch.cat([tensors[str(n)] for tensors in ranks]))
            else:
                joined.append(leaf)
        inputs, targets = pytree.tree_unflatten(joined, spec)
        return inputs if form.has_own_loss and isinstance(inputs, dict) and "labels" in inputs else (inputs, targets)

    def broadcast_text(self, text: str) -> str:
        """Returns the first rank's text on all ranks."""
        return self.group.broadcast(text.encode()).decode()

    def gather_text(self, text: str) -> list[str]:
        """Returns the text of every rank, on all ranks."""
        return [data.decode() for data in self.group.all_gather(text.encode())]

    def broadcast_tensor(self, tensor: Tensor | None, source: int, like: Tensor) -> Tensor:
        """Returns one rank's tensor in host memory, on all ranks; `like` has its shape and dtype."""
        if tensor is None or self.rank != source:
            tensor = torch.empty(like.shape, dtype=like.dtype)
        tensor = tensor.detach().cpu().contiguous()
        dist.broadcast(tensor, source)
        return tensor

    def _end(self) -> None:
        """Waits, when the script has ended, until that of every rank has; then a rank may exit."""
        if self._is_over:
            return
        self._is_over = True
        try:
            self.agree("the end of the script")
            self.group.finish()
        except BaseException as error:
            self._end_with(type(error), error, error.__traceback__)
        with suppress(RuntimeError):
            dist.destroy_process_group()

    def _end_with(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Ends this process with an error, which the first rank that has it prints; the others end too."""
        self._is_over = True
        if issubclass(kind, KeyboardInterrupt):
            self._hook(kind, error, trace)
            return
        store = self.group.store
        assert store is not None
        with suppress(RuntimeError):  # the store may have gone with its rank
            if is_lost(error) and store.check(["failed"]):
                os._exit(1)
            store.set("failed", str(self.rank))
            store.set(f"ended/{self.rank}", "")
            if self.rank == 0:
                self._wait_for_errors(store)
        self.group.leave(error)

    def _wait_for_errors(self, store: Store) -> None:
        """Lets other ranks print the same error first: the store ends with the first rank if that serves it."""
        last_s = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < last_s and not store.check([f"ended/{rank}" for rank in range(self.size)]):
            time.sleep(_LAST_WORDS_S / 20)
        time.sleep(_LAST_WORDS_S / 5)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _digest(leaves: Sequence[Any]) -> int:
    """Returns a number for the contents of a batch."""
    total = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            raw = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            total = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), total)
            total = zlib.crc32(raw, total)
        else:
            total = zlib.crc32(hashlib.sha256(repr(leaf).encode()).digest(), total)
    return total
