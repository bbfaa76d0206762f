"""A tiny model with every kind of unit, and AdamW as a plain loop to compare with, which shares the arithmetic alone.

On a machine without a GPU all lanes are threads that work on CPU tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

from pipedejavu.hybrid.hybrid_adamw import HybridAdamW
from pipedejavu.hybrid.model_unit import find_units
from pipedejavu.optim.arithmetic import AdamState, join, scalars_of, update_
from pipedejavu.optim.moment_format import MomentFormat, zero_moments

torch.set_num_threads(1)

WIDTH, WORDS, BLOCKS = 8, 11, 3
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm and head; six units."""

    def __init__(self, *, is_tied: bool = False, checkpoints: bool = False, is_sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=is_sparse)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.checkpoints, self.skipped = checkpoints, set[int]()
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for n, block in enumerate(self.blocks):
            if n not in self.skipped:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        return cross_entropy(self(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


NUM_UNITS = 1 + BLOCKS + 2


class Plain:
    """AdamW with split masters as a loop over parameters: nothing moves, nothing waits."""

    def __init__(
        self, model: nn.Module, groups: Sequence[dict[str, Any]] | None = None, *, clip_norm: float | None,
        moments: MomentFormat = "fp32",
    ):  # fmt: skip
        self.model, self.clip_norm, self.num_skipped, self.norm = model, clip_norm, 0, 0.0
        own = [{"params": [p for p in model.parameters() if p.requires_grad]}] if groups is None else groups
        self.param_groups = [{**SETTINGS, **group} for group in own]
        self.states: dict[Tensor, AdamState] = {}
        self.steps: dict[Tensor, int] = {}
        for group in self.param_groups:
            for p in group["params"]:
                low = torch.zeros(p.numel(), dtype=torch.int16, device=p.device) if p.dtype == torch.bfloat16 else None
                zeros = zero_moments(moments, p.numel(), p.device)
                self.states[p], self.steps[p] = AdamState(p.data.view(-1), low, *zeros), 0

    @torch.no_grad()
    def step(self) -> None:
        units = [[p for p in unit.parameters.values() if p in self.states] for unit in find_units(self.model)]
        norms = {
            p: torch._foreach_norm([p.grad.reshape(-1)], 2, torch.float32)[0].cpu()
            for unit in units for p in unit if p.grad is not None
        }  # fmt: skip
        if not norms:
            return
        scale, is_partly_left = 1.0, False
        if self.clip_norm is not None:
            self.norm = float(torch.linalg.vector_norm(torch.stack(list(norms.values()))))
            scale = min(1.0, self.clip_norm / (self.norm + 1e-6))
        for unit in units:
            found = [p for p in unit if p in norms]
            together = list(norms.values()) if self.clip_norm is not None else [norms[p] for p in found]
            if not all(n.isfinite() for n in together):
                is_partly_left = True
                continue
            for p in found:
                self._update(p, scale)
        self.num_skipped += is_partly_left
        self.zero_grad()

    def _update(self, p: Tensor, scale: float) -> None:
        group = next(group for group in self.param_groups if any(p is other for other in group["params"]))
        self.steps[p] += 1
        factors = (float(group[key]) if key == "lr" else group[key] for key in ("lr", "betas", "eps", "weight_decay"))
        assert p.grad is not None
        update_(scalars_of(self.steps[p], *factors, scale), p.grad.reshape(-1), self.states[p], self.states[p])

    def zero_grad(self) -> None:
        for p in self.states:
            p.grad = None


Optimizer = HybridAdamW | Plain
Bits = dict[str, Tensor]
Loop = Callable[["Lab", Net, Any], None]


def bits_of(optimizer: Optimizer, model: nn.Module) -> Bits:
    """Returns masters, moments and steps of all parameters, on the CPU."""
    found: Bits = {}
    if isinstance(optimizer, HybridAdamW):
        optimizer.synchronize()
    for name, p in model.named_parameters():
        found[name] = p.detach().cpu().clone()
        if isinstance(optimizer, Plain):
            state, step = optimizer.states.get(p), optimizer.steps.get(p, 0)
        else:
            param = optimizer.scheduler.model_state.params.get(p)
            state, step = (param.state, param.step) if param else (None, 0)
        if state is None:
            continue
        found[f"{name}: step"] = torch.tensor(step)
        for key, tensor in zip(AdamState._fields[1:], state[1:], strict=True):
            if tensor is not None:
                found[f"{name}: {key}"] = tensor.cpu().clone()
    return found


def check_equal(one: Bits, other: Bits) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{len(different)} of {len(one)} differ: {different[:6]}"


@dataclass
class Lab:
    """Makes models and optimizers, trains them and compares their bits."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    made: list[HybridAdamW] = field(default_factory=list)
    plain: dict[tuple[Any, ...], Bits] = field(default_factory=dict)

    def net(self, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Net:
        torch.manual_seed(7)
        return Net(**options).to(self.device, dtype)

    def tokens(self, step: int) -> Tensor:
        return torch.randint(0, WORDS, (3, 5), generator=torch.Generator().manual_seed(step)).to(self.device)

    def hybrid(self, model: nn.Module, params: Any = None, **options: Any) -> HybridAdamW:
        optimizer = HybridAdamW(model, params, **{**SETTINGS, "host_threads": 2, **options})
        self.made.append(optimizer)
        return optimizer

    def train(self, model: Net, optimizer: Any, steps: Sequence[int], before_step: Callable[[int], None] | None = None
    ) -> None:  # fmt: skip
        for n in steps:
            model.loss(self.tokens(n)).backward()
            if before_step is not None:
                before_step(n)
            optimizer.step()
            optimizer.zero_grad()

    def plain_bits(
        self, dtype: torch.dtype, clip_norm: float | None, num_steps: int, moments: MomentFormat = "fp32"
    ) -> Bits:
        """Returns what a plain loop arrives at; each is made once."""
        key = (dtype, clip_norm, num_steps, moments)
        if key not in self.plain:
            model = self.net(dtype)
            reference = Plain(model, clip_norm=clip_norm, moments=moments)
            self.train(model, reference, range(num_steps))
            self.plain[key] = bits_of(reference, model)
        return self.plain[key]

    def check_same(
        self, loop: Loop, *, dtype: torch.dtype = torch.bfloat16, options: dict[str, Any], **net: Any
    ) -> None:
        """Runs a loop with the hybrid optimizer and with the plain one, and compares all bits."""
        clip_norm, moments = options.get("clip_norm"), options.get("moments", "fp32")
        first, second = self.net(dtype, **net), self.net(dtype, **net)
        reference, hybrid = Plain(first, clip_norm=clip_norm, moments=moments), self.hybrid(second, **options)
        loop(self, first, reference)
        loop(self, second, hybrid)
        check_equal(bits_of(reference, first), bits_of(hybrid, second))
        assert hybrid.num_skipped == reference.num_skipped


PLAIN: dict[tuple[Any, ...], Bits] = {}


@pytest.fixture
def lab() -> Iterator[Lab]:
    found = Lab(plain=PLAIN)
    yield found
    for optimizer in found.made:
        optimizer.close()


@pytest.fixture
def cuda_lab() -> Iterator[Lab]:
    torch.use_deterministic_algorithms(True)
    found = Lab(torch.device("cuda", 0))
    yield found
    for optimizer in found.made:
        optimizer.close()
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def compare() -> Callable[[Bits, Bits], None]:
    return check_equal


@pytest.fixture
def bits() -> Callable[[Optimizer, nn.Module], Bits]:
    return bits_of


@pytest.fixture
def plain_optimizer() -> type[Plain]:
    return Plain


@pytest.fixture
def masters() -> Callable[[Bits, str], Tensor]:
    """Returns a parameter's float32 master."""

    def of(found: Bits, name: str) -> Tensor:
        low = found.get(f"{name}: low")
        return found[name] if low is None else join(found[name].view(-1), low).view(found[name].shape)

    return of
