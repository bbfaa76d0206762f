"""Units with divided experts, against the same units on one rank: outputs and all gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.profile.model_cut import cut_model
from pipedejavu.runtime.divided_experts import DividedExperts
from pipedejavu.runtime.expert_span import find_spans
from pipedejavu.runtime.stacked_experts import expert_layouts, parameter_shapes, recorded_graphs
from pipedejavu.zoo.moe import MixtureBlock, MoeSize
from tests.runtime.test_expert_exchange import RowThread, drawn, on_threads


def block(**more) -> nn.Module:
    torch.manual_seed(0)
    unit = MixtureBlock(MoeSize(layers=1, width=8, heads=2, context=16, **more)).double()
    for parameter in unit.parameters():
        nn.init.normal_(parameter, std=0.5)
    return unit


def check_divided(unit: nn.Module, value: Tensor, counts: list[int], capacity: float | None = None) -> None:
    """Compares a unit with one whose experts are divided over ranks that have `counts` of the samples."""
    whole, leaf = copy.deepcopy(unit), value.clone().requires_grad_()
    expected = first_of(whole(leaf))
    (expected**2).sum().backward()

    groups = [Later(rank, len(counts)) for rank in range(len(counts))]
    # Made by one thread, as tracing needs.
    units = [DividedExperts("block", copy.deepcopy(unit), group, capacity) for group in groups]

    def work(group: RowThread) -> dict[str, Tensor]:
        divided = units[group.rank]
        groups[group.rank].group = group
        mine = value.split(counts)[group.rank].clone().requires_grad_()
        output = first_of(divided(mine))
        (output**2).sum().backward()
        return {"output": output.detach(), "input": mine.grad} | {n: p.grad for n, p in divided.named_parameters()}

    ranks = on_threads(len(counts), work)
    layouts = expert_layouts(unit)
    assert layouts
    assert sorted(ranks[0]) == sorted(["output", "input", *dict(unit.named_parameters())])
    wanted = {"output": expected.detach(), "input": leaf.grad} | {n: p.grad for n, p in whole.named_parameters()}
    for name, tensor in wanted.items():
        parts = [rank[name] for rank in ranks]
        joined = torch.cat(parts) if name in ("output", "input", *layouts) else sum(parts)
        torch.testing.assert_close(joined, tensor, rtol=1e-11, atol=1e-12, msg=name)


class Later:
    """A group whose threads are started later."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.group = rank, size, None

    def gather(self, counts: Tensor) -> Tensor:
        return self.group.gather(counts)

    def all_to_all(self, *args) -> Tensor:
        return self.group.all_to_all(*args)


def first_of(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("counts", [[3, 2], [1, 2, 1, 1]])
def test_a_zoo_block_with_divided_experts_equals_the_whole_block(counts: list[int]):
    check_divided(block(), drawn(sum(counts), 16, 8), counts)


class Sorted(nn.Module):
    """Experts as transformers groups them: rows sorted by expert, and grouped products."""

    def __init__(self, experts: int = 4):
        super().__init__()
        self.gate = nn.Linear(8, experts, bias=False)
        self.up = nn.Parameter(drawn(experts, 24, 8, seed=5))
        self.down = nn.Parameter(drawn(experts, 8, 12, seed=6))

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, 8)
        weight, expert = self.gate(rows).softmax(-1).topk(2)
        chosen, order = expert.reshape(-1).sort()
        count = torch.histc(chosen.double(), bins=len(self.up), min=0, max=len(self.up) - 1)
        ends = count.cumsum(0, dtype=torch.int32)
        gate, up = torch.ops.test_experts.grouped_mm(rows[order // 2], self.up.transpose(-2, -1), ends).chunk(2, -1)
        inner = nn.functional.silu(gate) * up
        result = torch.ops.test_experts.grouped_mm(inner, self.down.transpose(-2, -1), ends)
        result = result * weight.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return hidden + result[back].view(len(rows), 2, 8).sum(1).view_as(hidden)


@torch.library.custom_op("test_experts::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """A grouped product for any precision; torch's own takes float64 on no device."""
    parts = torch.tensor_split(rows, ends[:-1].tolist())
    return torch.cat([part @ weight[n] for n, part in enumerate(parts)])


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[2])


def _saved(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient: Tensor):
    rows, weight, ends = ctx.saved_tensors
    cuts = ends[:-1].tolist()
    pairs = list(zip(torch.tensor_split(rows, cuts), torch.tensor_split(gradient, cuts), strict=True))
    of_rows = torch.cat([g @ weight[n].T for n, (_, g) in enumerate(pairs)])
    return of_rows, torch.stack([r.T @ g for r, g in pairs]), None


grouped_mm.register_autograd(_backward, setup_context=_saved)


class Stack(nn.Module):
    """A model that is no chain, of blocks with sorted experts."""

    def __init__(self, experts: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(Sorted(experts) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def test_a_recorded_unit_is_divided_for_each_shape_of_its_inputs():
    torch.manual_seed(1)
    model = Stack().double()
    cut = cut_model(model, drawn(5, 6, 8))
    for samples in (3, 2):
        cut.fit(drawn(samples, 6, 8))
    name, unit = cut.units[1]
    assert name == "layers.1"
    assert len(list(recorded_graphs(unit))) == 3
    assert sorted(expert_layouts(unit)) == ["layers.1.down", "layers.1.up"]
    check_divided(unit, drawn(5, 6, 8, seed=7), [3, 2])
    check_divided(unit, drawn(5, 6, 8, seed=7), [3, 2], capacity=4.0)  # an expert has a slot for each row


def test_the_order_of_products_and_the_output_bound_a_span():
    cut = cut_model(Stack().double(), drawn(5, 6, 8))
    ((_, graph),) = recorded_graphs(cut.units[0][1])
    (span,) = find_spans(graph.graph, parameter_shapes(graph))
    assert (span.experts, len(span.weights)) == (4, 2)
    assert "grouped_mm" in str(span.nodes[0].target)
    assert "grouped_mm" in str(span.output.target)
    assert span.rows not in span.nodes


def test_parameters_that_only_look_stacked_are_no_experts():
    for unit in (nn.Conv1d(4, 2, 3, bias=False), nn.Bilinear(3, 3, 4), nn.Linear(4, 4), nn.LayerNorm(4)):
        assert expert_layouts(unit) == {}
    mixing = cut_model(nn.Sequential(nn.Conv1d(4, 2, 3)), drawn(2, 4, 8).float()).units[0][1]
    assert expert_layouts(mixing) == {}


@pytest.mark.parametrize(
    ("experts", "size", "sentence"),
    [
        (2, 4, "unit 'block' has 2 experts, and the plan divides them over 4 workers; use 2 shards or fewer"),
        (
            6,
            4,
            "unit 'block' has 6 experts, which 4 workers cannot divide evenly; use a number of shards that divides 6",
        ),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused(experts: int, size: int, sentence: str):
    class Alone:
        rank = 0

    Alone.size = size
    with pytest.raises(InputError, match=sentence):
        DividedExperts("block", block(experts=experts), Alone())


def test_a_capacity_for_experts_that_have_slots_of_their_own_is_refused():
    class Alone:
        rank, size = 0, 2

    with pytest.raises(InputError, match="has slots of its own for the tokens of each expert"):
        DividedExperts("block", block(), Alone(), 1.25)


def test_experts_that_are_not_trained_are_refused():
    class Alone:
        rank, size = 0, 2

    unit = block()
    unit.mixture.experts.requires_grad_(False)
    with pytest.raises(InputError, match="unit 'block' has experts that are not trained"):
        DividedExperts("block", unit, Alone())
