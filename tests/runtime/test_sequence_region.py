"""Divided sequences and vocabularies: losses and all gradients equal those of whole units."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipedejavu.profile import cut_model
from pipedejavu.profile.unit_graph import unit_graphs
from pipedejavu.runtime.compiled_unit import LossCall
from pipedejavu.runtime.divided_unit import UnitDivider
from pipedejavu.runtime.division import Division, divide
from pipedejavu.zoo.gpt import Gpt
from pipedejavu.zoo.transformer import TransformerSize
from tests.runtime.test_division import Counted, _config
from tests.runtime.test_tensor_group import on_threads

SEQUENCE, VOCABULARY = {"has_sequence": True}, {"has_vocabulary": True}
LAYOUTS = {
    "sequence": SEQUENCE,
    "vocabulary": VOCABULARY,
    "both": SEQUENCE | VOCABULARY,
    "context": {"layout": "context"},
}


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def calls_of(calls: list[str]) -> dict[str, int]:
    return dict(sorted(Counter(calls).items()))


def check(model: nn.Module, inputs: Any, targets: Tensor, size: int, loss: Any, options: Any) -> tuple[Division, list]:
    """Compares a divided model with the whole one, in float64; returns the division, and the calls of each pass."""
    cut = cut_model(model, inputs)
    for _, unit in cut.units:
        unit.double()
    head = LossCall(lambda value, target: loss(cut.output(value), target), targets)
    graphs = unit_graphs(cut.units, cut.flat(inputs), head)
    value = cut.flat(inputs)
    for _, unit in cut.units:
        value = unit(value)
    expected = loss(cut.output(value), targets)
    expected.backward()
    division = divide(graphs, size, **options)
    names = [*(name if cut.method == "chain" else "" for name, _ in cut.units), ""]

    def work(group: Any) -> Any:
        counted = Counted(group)
        units = UnitDivider(counted).add(division, names)
        value = cut.flat(inputs)
        for unit in units[:-1]:
            value = unit(value)
        widest = max(t.numel() for t in (value if isinstance(value, tuple) else (value,)))
        result = units[-1]((*(value if isinstance(value, tuple) else (value,)), targets))
        forward = [*counted.calls]
        result.backward()
        gradients = {n: p.grad for (u, unit) in zip(names, units, strict=True) for n, p in unit.named_parameters(u)}
        layouts = {n: layout for unit in units for n, layout in unit.layouts.items()}
        return result.detach(), gradients, layouts, forward, counted.calls[len(forward) :], widest

    ranks = on_threads(size, work)
    for result, *_ in ranks:
        torch.testing.assert_close(result, expected.detach(), rtol=1e-12, atol=1e-12)
    named = {n: p for (u, unit) in zip(names, cut.units, strict=False) for n, p in unit[1].named_parameters(u)}
    for name in ranks[0][1]:
        parts, layouts = [rank[1][name] for rank in ranks], ranks[0][2]
        if name not in layouts:  # what is not divided has the same bits on all ranks
            assert all(torch.equal(part, parts[0]) for part in parts)
        joined = layouts[name].whole(parts) if name in layouts else parts[0]
        torch.testing.assert_close(joined, named[name].grad, rtol=1e-12, atol=1e-12)
    return division, [calls_of(ranks[0][3]), calls_of(ranks[0][4]), ranks[0][5]]


def next_token(output: Any, labels: Tensor) -> Tensor:
    """The loss that a model of transformers computes itself."""
    return output.loss * 3


def tokens_loss(**options: Any) -> Any:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)

    return loss


def labelled(count: int = 8) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 64, (2, count))
    labels = ids.clone()
    labels[0, : count // 2] = -100
    return ids, labels


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Qwen2", "BERT"])
def test_models_of_transformers_equal_the_whole_ones(name, size, layout):
    ids, labels = labelled()
    model = _config(name)
    _, (forward, backward, widest) = check(
        model, {"input_ids": ids, "labels": labels}, labels, size, next_token, LAYOUTS[layout]
    )
    assert widest == 2 * 8 * 64 // size  # logits
    if layout == "context":
        # Queries, keys, values and the result, of each of two attentions.
        assert forward == {"all_reduce": 1, "swap": 8}
        assert backward["swap"] == 8
    elif layout != "vocabulary":
        assert "all_reduce" in backward  # gradients of what norms read
        assert forward["reduce_scatter"] >= 4
        assert backward["all_gather"] >= 4


def gpt(**options: Any) -> Gpt:
    return Gpt(TransformerSize(**{"layers": 2, "width": 8, "context": 16, "vocabulary": 64, "heads": 4, **options}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_a_gpt_of_the_zoo_equals_the_whole_one(size, is_tied, layout):
    ids, labels = labelled()
    _, (forward, backward, _) = check(gpt(is_tied=is_tied), ids, labels, size, tokens_loss(), LAYOUTS[layout])
    if layout == "sequence":
        # Per block, tokens are gathered before attention and MLP, and sums are scattered after them.
        assert forward == {"all_gather": 4, "all_reduce": 1, "reduce_scatter": 4}
        # The same for their gradients; products gather their inputs again, and positions have a gradient of each rank.
        assert (backward["reduce_scatter"], backward["all_gather"]) == (4, 4 + 4 + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [{"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 7}, {"label_smoothing": 0.2, "reduction": "sum"}],
    ids=str,
)
def test_losses_reduce_as_the_whole_ones(layout, options):
    ids, labels = labelled()
    labels[labels == -100] = options.get("ignore_index", -100)
    check(gpt(), ids, labels, 2, tokens_loss(**options), LAYOUTS[layout])


def test_class_weights_divide_tokens_but_not_the_vocabulary():
    ids, labels = labelled()
    loss = tokens_loss(weight=torch.rand(64) + 0.5)
    check(gpt(), ids, labels, 2, loss, LAYOUTS["context"])
    check(gpt(), ids, labels, 2, loss, LAYOUTS["sequence"])
    graphs = unit_graphs(gpt().units(), ids, LossCall(loss, labels))
    division = divide(graphs, 2, has_vocabulary=True)
    assert not any(str(node.target) == "logit.weight" for region in division.regions for node in region.splits)


@pytest.mark.parametrize("layout", ["sequence", "context"])
def test_heads_that_cannot_be_divided_gather_keys_and_values(layout):
    ids, labels = labelled()
    check(gpt(heads=1), ids, labels, 2, tokens_loss(), LAYOUTS[layout])


def test_logits_of_which_the_loss_drops_a_token_are_gathered_for_it():
    ids, labels = labelled()

    def shifted(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    _, (forward, *_) = check(gpt(), ids, labels, 2, shifted, LAYOUTS["context"])
    assert forward["all_gather"] == 1


def test_a_sequence_that_cannot_be_divided_stays_whole():
    graphs = unit_graphs(gpt().units(), torch.randint(0, 64, (2, 7)))
    assert divide(graphs, 2, layout="context").is_whole


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("layout", ["sequence", "both", "context"])
def test_a_rank_saves_its_share_of_the_bytes(layout, size):
    model, (ids, labels) = gpt(dropout=0.1), labelled(16)
    head = LossCall(lambda value, target: tokens_loss()(value, target), labels)
    graphs = unit_graphs(model.units(), ids, head)
    whole = divide(graphs, 1)
    part = divide(graphs, size, **LAYOUTS[layout])

    def saved_by(group: Any, division: Division) -> list[int]:
        units = UnitDivider(group).add(division, ["", "", "", "", ""])
        value, sizes = ids, []
        for unit in units:
            kept: dict[int, Tensor] = {}
            held = {t.untyped_storage().data_ptr() for u in units for t in (*u.parameters(), *u.buffers(), ids, labels)}

            def note(tensor: Tensor, kept: Any = kept) -> Tensor:
                kept[tensor.untyped_storage().data_ptr()] = tensor
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                value = unit((value, labels) if unit is units[-1] else value)
            floats = [t for key, t in kept.items() if key not in held and t.is_floating_point()]
            sizes.append(sum(t.untyped_storage().nbytes() for t in floats if t.numel() > 1))
        return sizes

    (one,) = on_threads(1, lambda group: saved_by(group, whole))
    ranks = on_threads(size, lambda group: saved_by(group, part))
    assert ranks[0] == ranks[-1]
    # Attention kernels keep a few more bytes for a single head.
    for all_, share in zip(one, ranks[0], strict=True):
        assert all_ / size <= share <= 1.03 * all_ / size
