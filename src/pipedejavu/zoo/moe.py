"""A GPT with mixture-of-experts blocks; each token is routed to a few experts.

Note "groups". Each sequence is routed separately, with its own capacity and balance loss. So a sample's loss does not
depend on the rest of its microbatch, and a batch may be divided in any way. Slots of an expert are assigned in the
order of the tokens, so that whether a token is dropped does not depend on later tokens.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.zoo.chain import Chain
from pipedejavu.zoo.transformer import Attention, Embedding, TokenHead, TransformerSize, transformer_std


class MoeSize(TransformerSize):
    """Size of a GPT with experts."""

    separates: ClassVar[bool] = False  # the tokens of a row share the experts' slots

    experts: int = Field(default=4, ge=1)
    """Experts per block."""
    top: int = Field(default=2, ge=1)
    """Experts per token."""
    capacity_factor: float = Field(default=1.25, gt=0)
    """Slots per expert, relative to those that an even distribution of tokens would fill."""
    balance: float = Field(default=0.01, ge=0)
    """Weight of the auxiliary loss, which is 1 per block if tokens are evenly distributed."""

    def disagreements(self) -> list[str]:
        """Returns a fault if there are fewer experts than each token needs."""
        faults = super().disagreements()
        if self.top > self.experts:
            faults.append(f"each token visits {self.top} experts, but there are {self.experts}; lower top")
        return faults

    @model_validator(mode="after")
    def _agree(self) -> Self:
        return self.agreed()


SIZES = {
    "moe-tiny": MoeSize(layers=4, width=128, context=256),
    "moe-small": MoeSize(layers=12, width=768, context=1024, experts=8),
}


class ExpertRoute(NamedTuple):
    """Routing of the tokens; each field except the last is [samples, tokens, top]."""

    expert: Tensor
    weight: Tensor
    slot: Tensor
    """Slot at the expert, in the order of the tokens."""
    is_kept: Tensor
    """Whether the slot is within the expert's capacity."""
    balance: Tensor
    """Auxiliary loss per sample: experts · Σ_e mean gate of e · fraction of tokens routed to e."""


class Router(nn.Module):
    """Chooses each token's experts by a softmax, in float32 or higher precision."""

    def __init__(self, size: MoeSize):
        super().__init__()
        self.gate = nn.Linear(size.width, size.experts, bias=False)
        self.top = size.top
        self.capacity_factor = size.capacity_factor

    def capacity(self, num_tokens: int) -> int:
        """Returns the slots per expert for one sequence."""
        wanted = math.ceil(self.capacity_factor * self.top * num_tokens / self.gate.out_features)
        return min(wanted, num_tokens)

    def forward(self, hidden: Tensor) -> ExpertRoute:
        """Routes each sequence of [samples, tokens, width] separately."""
        exact = torch.promote_types(hidden.dtype, torch.float32)
        with _no_autocast(hidden.device.type):
            gates = functional.linear(hidden.to(exact), self.gate.weight.to(exact)).softmax(dim=-1)
        weight, expert = gates.topk(self.top, dim=-1)
        assigned = functional.one_hot(expert.flatten(1), self.gate.out_features)  # [samples, tokens · top, experts]
        earlier = assigned.cumsum(dim=1) - assigned
        slot = earlier.gather(2, expert.flatten(1).unsqueeze(2)).view_as(expert)
        fraction = assigned.to(exact).mean(dim=1)
        balance = self.gate.out_features * (gates.mean(dim=1) * fraction).sum(dim=1)
        return ExpertRoute(expert, weight, slot, slot < self.capacity(hidden.shape[1]), balance)


def _no_autocast(device_type: str) -> AbstractContextManager[None]:
    """Disables autocast, which would lower the precision; does nothing for a device without autocast, such as meta."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


class Experts(nn.Module):
    """The experts of a block, each two matrices with GELU between them, run as batched products."""

    def __init__(self, size: MoeSize):
        super().__init__()
        experts, width = size.experts, size.width
        self.weight_in = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.bias_in = nn.Parameter(torch.empty(experts, 1, 4 * width))
        self.weight_out = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.bias_out = nn.Parameter(torch.empty(experts, 1, width))

    def forward(self, rows: Tensor) -> Tensor:
        """Takes and returns [experts, slots, width]."""
        inner = functional.gelu(rows @ self.weight_in + self.bias_in)
        return inner @ self.weight_out + self.bias_out


class Mixture(nn.Module):
    """Sends tokens to their experts and sums the results, weighted by the gates; a dropped token adds nothing."""

    def __init__(self, size: MoeSize):
        super().__init__()
        self.router = Router(size)
        self.experts = Experts(size)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Takes [samples, tokens, width]; returns the same shape and the balance [samples]."""
        route = self.router(hidden)
        samples, tokens, width = hidden.shape
        experts, capacity = self.router.gate.out_features, self.router.capacity(tokens)
        num_slots = experts * samples * capacity
        sample = torch.arange(samples, device=hidden.device).view(-1, 1, 1)
        row = (route.expert * samples + sample) * capacity + route.slot
        row = torch.where(route.is_kept, row, num_slots).flatten()  # dropped tokens share one extra row at the end
        sent = hidden.unsqueeze(2).expand(-1, -1, self.router.top, -1).reshape(-1, width)
        rows = hidden.new_zeros(num_slots + 1, width).index_add(0, row, sent)[:num_slots]
        back = self.experts(rows.view(experts, samples * capacity, width)).flatten(0, 1)
        back = torch.cat([back, back.new_zeros(1, width)])[row].view(samples, tokens, self.router.top, width)
        return (back * route.weight.to(back.dtype).unsqueeze(3)).sum(dim=2), route.balance


class MixtureBlock(nn.Module):
    """Attention and a mixture of experts, each with a residual connection; accumulates the balance loss."""

    def __init__(self, size: MoeSize):
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size, is_causal=True)
        self.norm2 = nn.LayerNorm(size.width)
        self.mixture = Mixture(size)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, flow: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Takes the hidden state, and after the first block the sum of balance losses; returns both."""
        hidden, balance = flow if isinstance(flow, tuple) else (flow, None)
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
        mixed, block_balance = self.mixture(self.norm2(hidden))
        return hidden + self.dropout(mixed), block_balance if balance is None else balance + block_balance


class BalancedHead(TokenHead):
    """A head that passes on the sum of balance losses."""

    def forward(self, flow: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns logits and the sum of balance losses [samples]."""
        hidden, balance = flow
        return super().forward(hidden), balance


class Moe(Chain):
    """A GPT with experts; the embedding, each block and the head are units."""

    def __init__(self, size: MoeSize, *, seed: int = 0, device: torch.device | str | None = None):
        with torch.device("meta"):
            embedding = Embedding(size)
            units = [
                ("embedding", embedding),
                *((f"block{n}", MixtureBlock(size)) for n in range(size.layers)),
                ("head", BalancedHead(size, embedding)),
            ]
        super().__init__(units, std=transformer_std(2 * size.layers), seed=seed, device=device)
