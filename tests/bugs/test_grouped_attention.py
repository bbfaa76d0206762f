"""Operations of attention whose query heads share keys and values ended measuring with an AssertionError of torch."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pipedejavu.profile.operator_count import count_step


class Attention(nn.Module):
    def __init__(self, num_shared: int):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2, num_shared, 8, 4))

    def forward(self, query: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, self.keys, self.keys, enable_gqa=True)


def test_shared_heads_count_as_heads_of_their_own() -> None:
    query = torch.randn(2, 6, 8, 4)

    def flop(num_shared: int) -> list[int]:
        parts = count_step(Attention(num_shared), query, lambda output: output.sum(), False).parts
        return [sum(work.flop for work in parts[name]) for name in ("forward", "backward")]

    assert flop(2) == flop(6)
    assert flop(2)[0] == 2 * 2 * (2 * 6) * 8 * 8 * 4  # two products of 2 × 6 heads
