import torch
from torch import nn

from pipedejavu.hybrid.model_unit import ModelUnit, find_units
from pipedejavu.zoo import build


def shape(units: list[ModelUnit]) -> list[tuple[str, bool, list[str]]]:
    return [(unit.name, unit.is_block, list(unit.parameters)) for unit in units]


def test_the_children_of_a_sequential_are_blocks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False))
    assert shape(find_units(model)) == [("0", True, ["0.weight", "0.bias"]), ("2", True, ["2.weight"])]


def test_the_units_of_a_chain_are_blocks() -> None:
    found = find_units(build("gpt-tiny", device="meta").model)
    assert [unit.name for unit in found if unit.is_block] == [unit.name for unit in found]
    assert len(found) > 4


class Listed(nn.Module):
    """Blocks in a list, with modules before and after it, and a parameter of the model itself."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(2, 3, bias=False)


def test_a_list_gives_blocks_and_what_is_around_it_gives_units() -> None:
    found = find_units(Listed(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))))
    assert shape(found) == [
        ("", False, ["scale"]),
        ("embed", False, ["embed.weight"]),
        ("blocks.0", True, ["blocks.0.weight", "blocks.0.bias"]),
        ("blocks.1", True, ["blocks.1.0.weight", "blocks.1.0.bias"]),
        ("head", False, ["head.weight"]),
    ]


def test_the_children_of_nested_lists_are_blocks() -> None:
    pair = [nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)) for _ in range(2)]
    assert shape(find_units(nn.ModuleList(pair))) == [
        (f"{n}.{m}", True, [f"{n}.{m}.weight"]) for n in range(2) for m in range(2)
    ]


def test_a_list_inside_a_block_belongs_to_it() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))

    found = find_units(nn.ModuleList([Block(), Block()]))
    assert shape(found) == [(f"{n}", True, [f"{n}.experts.{m}.weight" for m in range(2)]) for n in range(2)]


def test_a_list_of_one_is_no_list_of_blocks() -> None:
    assert shape(find_units(nn.Sequential(nn.Linear(1, 1, bias=False)))) == [("0", False, ["0.weight"])]


def test_tied_weights_belong_to_the_first_and_the_others_share() -> None:
    model = Listed(nn.Linear(2, 2), nn.Linear(2, 2))
    model.head.weight = model.embed.weight
    found = find_units(model)
    names = [unit.name for unit in found]
    embed, head = found[names.index("embed")], found[names.index("head")]
    assert list(embed.parameters) == ["embed.weight"]
    assert head.parameters == {}
    assert head.shares == [embed]


def test_every_parameter_is_in_one_unit_frozen_ones_too() -> None:
    model = Listed(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model.embed.weight.requires_grad_(False)
    found = [id(p) for unit in find_units(model) for p in unit.parameters.values()]
    assert sorted(found) == sorted(id(p) for p in model.parameters())


def test_modules_without_parameters_are_no_units() -> None:
    assert find_units(nn.Sequential(nn.ReLU(), nn.Dropout())) == []
