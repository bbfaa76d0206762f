"""Hard caps of a GPU: what a card of that size would refuse is avoided, and the bits are those without a cap."""

import gc
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products; read when CUDA starts

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from pipedejavu.facts import InputError
from pipedejavu.hybrid.hybrid_adamw import HybridAdamW
from pipedejavu.runtime.device_memory import allocator_settings, fixed_segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

WIDTH, BLOCKS, WORDS, STEPS = 1024, 18, 16384, 4
GB = 10**9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (16, 64)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        length = x.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        shares = (q @ k.mT / 8).masked_fill(later, float("-inf")).softmax(-1)
        x = x + self.out((shares @ v).transpose(1, 2).flatten(2))
        gate, value = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(silu(gate) * value)


class Llama(nn.Module):
    """A Llama of about 320 million parameters that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(cap: int | None = None, spoil: Any = None, **options: Any) -> tuple[dict[str, Tensor], HybridAdamW, int]:
    """Returns the weights after some steps, the optimizer, and the most bytes that were reserved."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1.0 if cap is None else cap / total)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama().bfloat16()
    optimizer = HybridAdamW(model, **{"lr": 1e-3, "clip_norm": 1.0, "speculate": False, "head_chunks": 1, **options})
    if spoil is not None:
        spoil(model, optimizer)
    try:
        torch.cuda.reset_peak_memory_stats()
        for n in range(STEPS):
            tokens = torch.randint(0, WORDS, (4, 512), generator=torch.Generator().manual_seed(n)).cuda()
            model(tokens).backward()
            optimizer.step()
        optimizer.synchronize()
        return {n: p.detach().cpu().clone() for n, p in model.named_parameters()}, optimizer, _most_reserved()
    finally:
        optimizer.close()


def _most_reserved() -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


def check_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{len(different)} of {len(one)} differ: {different[:6]}"


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def uncapped() -> dict[str, Tensor]:
    torch.use_deterministic_algorithms(True)
    return train()[0]


@pytest.mark.parametrize("is_process_cap", [True, False], ids=["process", "budget"])
@pytest.mark.parametrize("cap", [int(6 * GB), int(4 * GB), int(3.2 * GB)])
def test_a_model_trains_alike_within_hard_caps(cap: int, is_process_cap: bool, uncapped: dict[str, Tensor]) -> None:
    options = {} if is_process_cap else {"gpu_budget": cap}
    weights, optimizer, reserved = train(cap if is_process_cap else None, **options)
    assert optimizer.plan is not None
    print(f"reserved {reserved}, plan {optimizer.plan.reserved_bytes}", *optimizer.plan.reasons, *optimizer.shortages,
          sep="\n")  # fmt: skip
    check_equal(uncapped, weights)
    assert reserved <= cap
    assert optimizer.plan.reserved_bytes <= cap


def test_a_cap_below_the_smallest_plan_is_refused() -> None:
    with pytest.raises(InputError, match=r"gpu_budget|budget"):
        train(gpu_budget=int(0.25 * GB), window=None)
    with pytest.raises(InputError, match=r"^gpu_budget is \d+ bytes, and this process may take \d+ of cuda:0"):
        train(gpu_budget=10**15)


@pytest.mark.parametrize("where", ["first", "second"])
def test_refused_memory_changes_no_bit(where: str, uncapped: dict[str, Tensor]) -> None:
    left = 2

    def spoil(model: Llama, optimizer: HybridAdamW) -> None:
        plain = model.head.forward

        def forward(x: Tensor) -> Tensor:
            nonlocal left
            if left and optimizer.scheduler.num_steps == (where == "second"):
                left -= 1
                torch.empty(2**50, dtype=torch.uint8, device="cuda")  # the allocator's own error
            return plain(x)

        model.head.forward = forward  # type: ignore[method-assign]

    weights, optimizer, _ = train(spoil=spoil)
    check_equal(uncapped, weights)
    assert left == 0
    assert len(optimizer.shortages) == 2


def test_segments_are_expandable_and_can_be_fixed_for_a_while(uncapped: dict[str, Tensor]) -> None:
    assert uncapped
    settings = allocator_settings()
    assert "expandable_segments:True" in settings
    with fixed_segments():
        weights, _, _ = train()
    assert allocator_settings() == settings
    check_equal(uncapped, weights)
