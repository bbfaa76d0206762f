"""Divided units: outputs and all gradients equal those of the whole units, with the collectives that are said."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.profile import cut_model
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.runtime.divided_unit import UnitDivider
from pipedejavu.runtime.division import Division, divide
from pipedejavu.zoo.transformer import TransformerBlock, TransformerSize
from tests.runtime.test_tensor_group import on_threads


class Counted:
    """A group that counts its collectives."""

    def __init__(self, group: Any):
        self.group, self.rank, self.size, self.calls = group, group.rank, group.size, []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.group, name)


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def check(model: nn.Module, inputs: Any, size: int, layout: Any = "pairs", loss: Any = None) -> tuple[Division, list]:
    """Compares a divided model with the whole one; returns the division, and the calls of forward and backward."""
    loss = loss or (lambda output: (output**2).sum())
    cut = cut_model(model, inputs)
    graphs = unit_graphs(cut.units, cut.flat(inputs))
    names = [name if cut.method == "chain" else "" for name, _ in cut.units]
    whole = copy.deepcopy(model)
    expected = loss(whole(**inputs) if isinstance(inputs, dict) else whole(inputs))
    expected.backward()
    division = divide(graphs, size, layout=layout)

    def work(group: Any) -> Any:
        counted = Counted(group)
        units = UnitDivider(counted).add(division, names)
        value = cut.flat(inputs)
        for unit in units:
            value = unit(value)
        result = loss(cut.output(value))
        forward = [*counted.calls]
        result.backward()
        gradients = {n: p.grad for (u, unit) in zip(names, units, strict=True) for n, p in unit.named_parameters(u)}
        layouts = {n: layout for unit in units for n, layout in unit.layouts.items()}
        return result.detach(), gradients, layouts, forward, counted.calls[len(forward) :]

    ranks = on_threads(size, work)
    for result, *_ in ranks:
        torch.testing.assert_close(result, expected.detach(), rtol=1e-12, atol=1e-12)
    layouts = ranks[0][2]
    named = dict(whole.named_parameters())
    assert {*ranks[0][1]} <= {*named}
    for name in ranks[0][1]:
        parts = [rank[1][name] for rank in ranks]
        if name not in layouts:  # what is not divided has the same bits on all ranks
            assert all(torch.equal(part, parts[0]) for part in parts)
        joined = layouts[name].whole(parts) if name in layouts else parts[0]
        torch.testing.assert_close(joined, named[name].grad, rtol=1e-12, atol=1e-12)
    return division, [ranks[0][3], ranks[0][4]]


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def units(self) -> list[tuple[str, nn.Module]]:
        return [(f"blocks.{n}", block) for n, block in enumerate(self.blocks)]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_transformer_block_has_two_sums_each_way(size):
    shape = TransformerSize(layers=2, width=8, heads=4)
    model = Blocks(TransformerBlock(shape, is_causal=True), TransformerBlock(shape, is_causal=False))
    # The residual before the first block needs a gradient, as it has in a model with an embedding.
    x = torch.randn(2, 5, 8, requires_grad=True)
    division, (forward, backward) = check(model, x, size)
    if size > 1:
        assert forward == ["all_reduce"] * 4
        assert backward == ["all_reduce"] * 4
    said = division.collectives()
    assert sorted((c.unit, c.is_forward) for c in said) == [(u, f) for u in (0, 1) for f in (False, False, True, True)]
    assert {c.size_bytes for c in said} == {2 * 5 * 8 * 8}


class Gated(nn.Module):
    """A gated MLP with a fused gate, and grouped queries with shared keys and values that are repeated."""

    def __init__(self, shared: int, is_fused: bool) -> None:
        super().__init__()
        self.shared, self.is_fused = shared, is_fused
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 4 * 2 * shared), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 48, bias=False), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 4).transpose(1, 2)
        k, v = self.kv(x).split(4 * self.shared, -1)
        k, v = (y.view(b, t, self.shared, 4).transpose(1, 2) for y in (k, v))
        if self.is_fused:
            k, v = (y[:, :, None].expand(b, self.shared, 4 // self.shared, t, 4).reshape(b, 4, t, 4) for y in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=not self.is_fused)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, 16))
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_grouped_queries_divide_and_shared_heads_divide_if_there_are_enough(size, shared, is_repeated):
    division, _ = check(nn.Sequential(Gated(shared, is_repeated)), torch.randn(2, 3, 16, requires_grad=True), size)
    names = {
        str(node.target): split.parts
        for r in division.regions
        for node, split in r.splits.items()
        if node.op == "get_attr"
    }
    assert names["q.weight"] == (16,)
    assert names["up.weight"] == (24, 24)
    assert ("kv.weight" in names) == (shared % size == 0)
    assert names.get("kv.weight", (4 * shared,) * 2) == (4 * shared,) * 2


def network(stride: int, padding: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, stride, padding, bias=stride == 1),
        nn.BatchNorm2d(12), nn.Tanh(), nn.Conv2d(12, 16, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["pairs", "stationary-x", "stationary-y", "stationary-w"])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1), (1, 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_convolutions_equal_the_whole_ones(layout, stride, padding, size):
    division, (forward, backward) = check(network(stride, padding), torch.randn(2, 3, 8, 8), size, layout)
    inner = {
        "pairs": ([], []),
        "stationary-x": (["reduce_scatter"] * 2, ["all_gather"] * 2),
        "stationary-y": (["all_gather"] * 2, ["reduce_scatter"] * 2),
        # Over two ranks blocks are 1 × 2, and x alone is gathered; of 2 × 2 both, by all-to-alls of half of the ranks.
        "stationary-w": (["all_gather"] * 2, ["reduce_scatter"] * 2) if size == 2 else (["all_to_all"] * 4,) * 2,
    }[layout]
    if layout != "pairs":
        assert (forward, backward) == ([*inner[0], "all_reduce"], inner[1])
        assert [(o.reads, o.makes) for o in division.operators.values()] == [
            (False, True), (True, True), (True, True), (True, False)
        ]  # fmt: skip


class Grouped(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 16, 3, padding=1, groups=groups)
        self.norm, self.c = nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(functional.relu(self.b(self.a(x)))))


@pytest.mark.parametrize(("groups", "can"), [(2, True), (8, True), (3, None)])
def test_grouped_convolutions_divide_at_whole_groups(groups, can):
    if can is None:  # four ranks cannot have whole groups of two
        division, _ = check(nn.Sequential(Grouped(2)), torch.randn(2, 4, 4, 4), 4)
        assert "b.weight" not in _divided(division)
        return
    division, _ = check(nn.Sequential(Grouped(groups)), torch.randn(2, 4, 4, 4), 2)
    assert {"a.weight", "b.weight", "c.weight", "norm.weight"} <= _divided(division)


def test_a_model_without_a_pair_is_not_divided():
    division, _ = check(nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)), torch.randn(2, 5), 2)
    assert not division.regions


def _divided(division: Division) -> set[str]:
    return {str(n.target) for r in division.regions for n in r.splits if n.op == "get_attr"}


def _config(name: str) -> Any:
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    gpt2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0}
    gpt2 |= {"embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **sizes)),
        "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "Qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(num_key_value_heads=2, **sizes)),
        "Qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(num_key_value_heads=2, head_dim=8, **sizes)),
        "Phi-3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(num_key_value_heads=2, pad_token_id=0, **sizes)),
        "GPT-NeoX": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes)),
        "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(**sizes, **calm)),
    }[name]()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Qwen2", "Qwen3", "Phi-3", "GPT-NeoX", "BERT"])
def test_models_of_transformers_equal_the_whole_ones(name, size):
    ids = torch.randint(0, 64, (2, 8))
    model = _config(name)
    division, (forward, backward) = check(model, {"input_ids": ids, "labels": ids}, size, loss=lambda out: out.loss)
    # Phi-3's fused queries, keys and values have too few shared heads for four ranks.
    regions = 2 if (name, size) == ("Phi-3", 4) else 4
    assert len(division.regions) == regions
    assert forward == ["all_reduce"] * regions
    # Qwen3's norms of the heads of queries, and of keys if they are divided, have weights that all ranks share.
    norms = (4 if size == 2 else 2) if name == "Qwen3" else 0
    assert backward.count("all_reduce") == regions + norms
