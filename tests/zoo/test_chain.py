from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from pipedejavu.facts import InputError
from pipedejavu.zoo import build
from pipedejavu.zoo.gpt import Gpt
from pipedejavu.zoo.mlp import Mlp, MlpSize
from pipedejavu.zoo.transformer import TransformerSize

Tiny = tuple[str, dict[str, Any]]


def flat(flow: Any) -> list[torch.Tensor]:
    return list(flow) if isinstance(flow, tuple) else [flow]


def test_a_model_is_its_units_one_after_another(tiny: Tiny) -> None:
    name, options = tiny
    task = build(name, **options)
    inputs, _ = task.data.batch([0, 1, 2])
    whole = task.model(inputs)
    flow = inputs
    for _, unit in build(name, **options).model.units():
        flow = unit(flow)
    assert [torch.equal(a, b) for a, b in zip(flat(whole), flat(flow), strict=True)] == [True] * len(flat(whole))


def test_names_of_parameters_begin_with_their_unit(tiny: Tiny) -> None:
    name, options = tiny
    model = build(name, **options).model
    names = [f"{unit_name}.{key}" for unit_name, unit in model.units() for key in unit.state_dict()]
    assert names == list(model.state_dict())
    assert len({unit_name for unit_name, _ in model.units()}) == len(model.units()) > 1


def test_what_travels_has_a_gradient(tiny: Tiny) -> None:
    name, options = tiny
    task = build(name, **options)
    flow, target = task.data.batch([0, 1])
    edges = []
    for _, unit in task.model.units():
        flow = unit(flow)
        for tensor in flat(flow):
            assert tensor.is_floating_point()
            tensor.retain_grad()
            edges.append(tensor)
    task.loss(flow, target).backward()
    assert all(tensor.grad is not None for tensor in edges)
    assert all(parameter.grad is not None for parameter in task.model.parameters())


def test_values_depend_on_the_seed_alone(tiny: Tiny) -> None:
    name, options = tiny
    torch.manual_seed(1)
    one = build(name, **options, seed=7).model.state_dict()
    torch.manual_seed(2)
    torch.rand(5)
    two = build(name, **options, seed=7).model.state_dict()
    other = build(name, **options, seed=8).model.state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_building_leaves_the_global_generator_alone(tiny: Tiny) -> None:
    before = torch.get_rng_state()
    name, options = tiny
    build(name, **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_two_parameters_of_one_shape_differ() -> None:
    model = Mlp(MlpSize(widths=(8, 8, 8)))
    first, second = (unit.linear.weight for _, unit in model.units())
    assert not torch.equal(first, second)


def test_values_have_the_spread_that_their_rule_says() -> None:
    weight = Mlp(MlpSize(widths=(400, 300, 2))).state_dict()["layer0.linear.weight"]
    assert float(weight.std()) == pytest.approx((2 / 400) ** 0.5, rel=0.02)
    size = TransformerSize(layers=2, width=256, context=8)
    state = Gpt(size).state_dict()
    assert float(state["block0.feed_forward.input.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(state["block0.feed_forward.output.weight"].std()) == pytest.approx(0.01, rel=0.02)
    assert torch.equal(state["block1.norm1.weight"], torch.ones(256))
    assert not state["block1.attention.query.bias"].any()


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "seq2seq-tiny", "moe-tiny"])
def test_a_tied_weight_is_one_parameter(name: str) -> None:
    size = {"layers": 1, "width": 16, "context": 4}
    tied = build(name, **size, is_tied=True).model
    units = dict(tied.units())
    assert units["head"].logit.weight is units["embedding"].token.weight
    assert {"embedding.token.weight", "head.logit.weight"} <= tied.state_dict().keys()
    free = build(name, **size).model
    saved = sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters())
    assert saved == tied.state_dict()["head.logit.weight"].numel()
    assert not torch.equal(free.state_dict()["embedding.token.weight"], free.state_dict()["head.logit.weight"])


def test_any_model_can_be_built_without_memory(tiny: Tiny) -> None:
    name, options = tiny
    with torch.device("meta"):
        model = build(name, **options).model
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    real = build(name, **options, seed=3).model
    model.materialise("cpu", seed=3)
    assert all(torch.equal(tensor, real.state_dict()[key]) for key, tensor in model.state_dict().items())


def test_some_units_get_memory_and_the_values_of_the_whole() -> None:
    options = {"layers": 3, "width": 16, "context": 4, "is_tied": True}
    whole = build("gpt-tiny", **options, seed=5).model
    part = build("gpt-tiny", **options, device="meta").model
    part.materialise("cpu", seed=5, units={"block1", "head"})
    for name, unit in part.units():
        is_here = name in {"block1", "head"}
        for key, tensor in unit.state_dict().items():
            assert tensor.is_meta is not is_here
            assert not is_here or torch.equal(tensor, whole.state_dict()[f"{name}.{key}"])


def test_memory_for_a_unit_that_is_not_there_is_refused() -> None:
    model = build("mlp", device="meta").model
    with pytest.raises(InputError, match=r"the model has no unit 'layer9'; did you mean 'layer\d'\?"):
        model.materialise("cpu", seed=0, units=["layer0", "layer9"])


def test_a_model_forwards_on_the_meta_device(tiny: Tiny) -> None:
    name, options = tiny
    task = build(name, **options, device="meta")
    inputs, _ = task.data.batch([0, 1])
    real = build(name, **options).model(inputs)
    made = task.model(tuple(t.to("meta") for t in inputs) if isinstance(inputs, tuple) else inputs.to("meta"))
    assert [t.shape for t in flat(made)] == [t.shape for t in flat(real)]
