"""Steps of a divided graph that are no operations of torch: collectives, dropout and attention on parts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from pipedejavu.runtime import tensor_group
from pipedejavu.runtime.member_group import MemberGroup
from pipedejavu.runtime.param_layout import ParamLayout
from pipedejavu.runtime.reshape_rule import Split
from pipedejavu.runtime.tensor_group import TensorGroup


class Draws:
    """Where a unit draws its masks: a generator of its own on a CPU, as threads share the global one."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def mask(self, like: Tensor, shape: Sequence[int], p: float, split: Split | None, group: TensorGroup) -> Tensor:
        """Returns this rank's part of the mask that a dropout of the whole tensor draws."""
        if like.is_cuda:
            mask = functional.dropout(like.new_ones(tuple(shape)), p, True)
        else:
            mask = like.new_empty(tuple(shape)).bernoulli_(1 - p, generator=self.generator).div_(1 - p)
        if split is None:
            return mask
        return ParamLayout(tuple(shape), *split).local(mask, group.rank, group.size)


class Step(nn.Module):
    """A step of a divided graph that is no operation of torch."""

    def __init__(self, group: TensorGroup, **facts: Any):
        super().__init__()
        self.group, self.facts = group, facts


class SumForward(Step):
    """Adds up the parts of a sum."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks."""
        return tensor_group.sum_forward(tensor, self.group)


class SumBackward(Step):
    """Where a tensor of all ranks enters what is divided."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the tensor; its gradient is the sum over the ranks."""
        return tensor_group.sum_backward(tensor, self.group)


class Gather(Step):
    """Gathers the parts of some ranks, for operators of which each computes another part."""

    def __init__(self, group: TensorGroup, **facts: Any):
        members = facts.get("members", range(group.size))
        super().__init__(group if len(members) == group.size else MemberGroup(group, members), **facts)

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the parts of the ranks, joined along the divided dimension."""
        return tensor_group.gather(tensor, self.facts["dim"], self.group, self.facts.get("parts", ()))


class GatherOnce(Gather):
    """Gathers the parts of all ranks; what saves the whole tensor for its backward saves its part instead."""

    def forward(self, tensor: Tensor) -> tuple[Tensor, "Regather"]:  # type: ignore[override]
        """Returns the whole tensor, and how to gather it again."""
        return super().forward(tensor), Regather(tensor.detach(), self)


class Regather:
    """Gathers a tensor again in the backward, once for all products that read it."""

    def __init__(self, part: Tensor, gather: GatherOnce):
        self.part, self.gather = part, gather
        self._whole: Tensor | None = None
        self._waiting = 0

    def save(self) -> "Regather":
        """Notes that a product has saved the tensor."""
        self._waiting += 1
        return self

    def whole(self, part: Tensor) -> Tensor:
        """Returns the whole tensor; it is freed when all products have had it."""
        whole = self._whole if self._whole is not None else Gather.forward(self.gather, part)
        self._waiting -= 1
        self._whole = whole if self._waiting > 0 else None
        return whole


class GatheredProduct(Step):
    """A matrix product of a gathered tensor; keeps this rank's part of it for the backward."""

    def forward(self, source: Regather, *args: Any) -> Tensor:
        """Returns the product of the arguments, of which the one at `position` is the gathered tensor."""
        position, target = self.facts["position"], self.facts["target"]
        whole: Tensor = args[position]
        if torch.is_autocast_enabled(whole.device.type) and whole.dtype != torch.float64:
            whole = whole.to(torch.get_autocast_dtype(whole.device.type))
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack, unpack = outer or (_same, _same)

        address, count = whole.data_ptr(), whole.numel()  # autograd keeps `save`, which must not keep the tensor

        def save(tensor: Tensor) -> Any:
            if tensor.numel() == count and tensor.data_ptr() == address:
                return source.save(), pack(source.part), tensor.shape, tensor.dtype
            return pack(tensor)

        def load(saved: Any) -> Tensor:
            if not (isinstance(saved, tuple) and saved and isinstance(saved[0], Regather)):
                tensor: Tensor = unpack(saved)
                return tensor
            kept, part, shape, dtype = saved
            whole: Tensor = kept.whole(unpack(part))
            return whole.to(dtype).view(shape)

        with saved_tensors_hooks(save, load):
            product: Tensor = target(*args[:position], whole, *args[position + 1 :])
        return product


def _same(tensor: Any) -> Any:
    return tensor


class ScatterSum(Gather):
    """Adds up parts of a sum over some ranks, each of which keeps a part of it."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of the sum."""
        return tensor_group.scatter_sum(tensor, self.facts["dim"], self.group, self.facts.get("parts", ()))


class TakePart(Step):
    """Takes this rank's part of a tensor of all ranks."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the part along the divided dimension."""
        dim, parts = self.facts["dim"], self.facts.get("parts", ())
        if tensor.requires_grad:
            return tensor_group.take_part(tensor, dim, self.group, parts)
        return ParamLayout(tuple(tensor.shape), dim, parts).local(tensor, self.group.rank, self.group.size)


class JoinParts(Step):
    """Gathers the parts of all ranks, for operations that all compute alike."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the whole tensor."""
        return tensor_group.join_parts(tensor, self.facts["dim"], self.group, self.facts["parts"])


class TakeHeads(Step):
    """Takes this rank's heads of keys or values that several heads share."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the keys or values of each of this rank's heads."""
        repeated = tensor.repeat_interleave(self.facts["heads"] // tensor.shape[1], 1)
        return tensor_group.take_part(repeated, 1, self.group)


class Dropout(Step):
    """A dropout whose mask is the part of the whole tensor's."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the tensor without the dropped elements."""
        facts, draws = self.facts, self.facts["draws"]
        mask: Tensor = draws.mask(tensor, facts["shape"], facts["p"], facts["split"], self.group)
        return tensor * mask


class MaskedAttention(Step):
    """Scaled dot-product attention with dropout, whose mask is the part of the whole attention's."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Tensor:
        """Returns the mixed values."""
        if key.shape[1] != query.shape[1]:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
        factor = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        scores = (query * factor) @ (key * factor).transpose(-2, -1)
        if is_causal:
            scores = scores.masked_fill(~_seen(scores.shape[-2], scores.shape[-1], scores.device), float("-inf"))
        elif mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        shares = torch.softmax(scores, -1)
        facts = self.facts
        shape = (*facts["shape"][:3], key.shape[2])
        kept: Tensor = shares * facts["draws"].mask(shares, shape, facts["p"], facts["split"], self.group)
        return kept @ value


class SequenceAttention(Step):
    """Scaled dot-product attention of tokens that are divided over the ranks.

    Ranks exchange tokens for heads, so that each has some heads of all tokens; if heads cannot be divided, each rank
    gathers all keys and values for its own queries.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Tensor:
        """Returns the mixed values of this rank's tokens."""
        group, heads, length = self.group, query.shape[1], query.shape[2] * self.group.size
        if heads % group.size:
            key, value = (tensor_group.gather(t, 2, group) for t in (key, value))
            rows = _seen(length, length, query.device) if is_causal else mask
            rows = rows if rows is None or rows.shape[-2] == 1 else rows.chunk(group.size, -2)[group.rank]
            return self._attend(query, key, value, rows, False, scale, Split(2, (length,)))
        if key.shape[1] % group.size:
            key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
        query, key, value = (tensor_group.transpose(t, 2, 1, group) for t in (query, key, value))
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask.chunk(group.size, -3)[group.rank]
        mixed = self._attend(query, key, value, mask, is_causal, scale, Split(1, (heads,)))
        return tensor_group.transpose(mixed, 1, 2, group)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        split: Split,
    ) -> Tensor:
        if self.facts["p"]:
            step = MaskedAttention(self.group, **self.facts | {"split": split})
            return step(query, key, value, mask, is_causal, scale)  # type: ignore[no-any-return]
        has_shared = key.shape[1] != query.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=has_shared
        )


def _seen(rows: int, columns: int, device: torch.device) -> Tensor:
    """Returns which tokens each token attends to, if it attends to none after it."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril()
