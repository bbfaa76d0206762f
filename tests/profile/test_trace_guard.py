"""What a model is told while it is recorded: the way that it takes is that of training."""

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

from pipedejavu.facts import InputError
from pipedejavu.profile import cut_model
from pipedejavu.profile.model_trace import trace
from tests.profile.case import compare, tokens

MASKS = "transformers.masking_utils"
REFUSED = r"a {} cannot be cut: .*test_trace_guard.py:\d+, '{}.*depends on the values of a tensor"


class Placed(nn.Module):
    """Takes one layer where its positions count up, and the other where they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.counting, self.jumping = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens, positions=None):
        if positions is None:
            positions = self.positions(tokens)
        found = self.embedding(tokens)
        if (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) == 1).all():
            return self.counting(found)
        return self.jumping(found)

    def positions(self, tokens):
        return (torch.arange(tokens.shape[1], device=tokens.device) + 3).unsqueeze(0).expand(len(tokens), -1)


class Doubled(Placed):
    def positions(self, tokens):
        return super().positions(tokens) * 2


class Moved(Placed):
    """Positions that an input changes behind the view that is asked."""

    def positions(self, tokens):
        found = torch.arange(tokens.shape[1])
        shown = found.unsqueeze(0)
        found += tokens[0]
        return shown


class Filled(Placed):
    def positions(self, tokens):
        return torch.full((len(tokens), tokens.shape[1]), tokens[0, 0])


class Written(Placed):
    def positions(self, tokens):
        found = torch.zeros(1, tokens.shape[1], dtype=torch.int64)
        return torch.add(torch.arange(tokens.shape[1])[None], 1, out=found)


class Dropped(Placed):
    def positions(self, tokens):
        return functional.dropout(torch.arange(tokens.shape[1]).float()[None])


@pytest.mark.parametrize(("model", "layer"), [(Placed, "counting"), (Doubled, "jumping")])
def test_what_no_input_decides_is_known(model, layer: str) -> None:
    cut, found = compare(model(), tokens())
    assert [unit for unit, _ in cut.units] == ["embedding", layer]
    assert [difference for difference in found if not difference.is_none] == []


@pytest.mark.parametrize("model", [Moved, Filled, Written, Dropped])
def test_what_an_input_or_chance_decides_is_not_known(model) -> None:
    with pytest.raises(InputError, match=REFUSED.format(model.__name__, r"if \(torch.diff")):
        cut_model(model(), tokens())


def test_positions_that_are_given_are_not_known() -> None:
    with pytest.raises(InputError, match=REFUSED.format("Placed", r"if \(torch.diff")):
        cut_model(Placed(), {"tokens": tokens(), "positions": torch.arange(5).expand(2, -1)})


def test_a_model_without_memory_is_told_the_same() -> None:
    with torch.device("meta"):
        model, inputs = Placed(), torch.zeros(2, 5, dtype=torch.int64)
    found = trace(model, inputs)
    used = {
        found.states[node] for operation in found.nodes for node in operation.all_input_nodes if node in found.states
    }
    assert used == {"embedding.weight", "counting.weight", "counting.bias"}


def test_what_has_no_version_is_not_asked_for_it() -> None:
    class Inferring(nn.Linear):
        def forward(self, x):
            with torch.inference_mode():
                offset = torch.arange(4) + 1
            return super().forward(x) + offset

    _, found = compare(Inferring(4, 4), torch.randn(2, 4))
    assert [difference for difference in found if not difference.is_none] == []


def test_a_transformer_finds_out_that_its_mask_is_causal() -> None:
    class Detecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.transformer(source, target, tgt_mask=mask)

    cut, found = compare(Detecting(), (torch.randn(2, 5, 8), torch.randn(2, 4, 8)))
    assert len(cut.units) == 6
    assert [difference for difference in found if not difference.is_none] == []


def masks() -> ModuleType:
    """Returns what decides in transformers whether an attention gets a mask, in short."""
    room = ModuleType(MASKS)

    def make(positions, padding, length: int):
        breaks = (torch.diff(positions) != 1).cumsum(-1)
        is_packed = room.is_tracing(breaks) or not (breaks[:, -1] == 0).all()
        is_plain = not room.is_torchdynamo_exporting() and not room.is_tracing(padding)
        if not is_packed and is_plain and (padding is None or padding.sum() == padding.numel()):
            return None
        causal = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
        return causal if padding is None else causal & padding[:, None, None].bool()

    room.is_tracing = lambda tensor=None: torch.compiler.is_compiling()  # noqa: ARG005
    room.is_torchdynamo_exporting = torch.compiler.is_exporting
    room.make = make
    return room


class Grouped(nn.Module):
    """Attention whose four query heads share one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.out = nn.Linear(16, 16)

    def forward(self, x, mask):
        query, key, value = (
            layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if mask is None:
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            key, value = (tensor.expand(-1, 4, -1, -1) for tensor in (key, value))
            found = functional.scaled_dot_product_attention(query, key, value, mask)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Causal(nn.Module):
    """A language model as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(20, 16), nn.ModuleList(Grouped() for _ in range(3))
        self.head = nn.Linear(16, 20)

    def forward(self, tokens, padding=None):
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        mask, x = sys.modules[MASKS].make(positions, padding, tokens.shape[1]), self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


@pytest.fixture
def room(monkeypatch) -> ModuleType:
    made = masks()
    monkeypatch.setitem(sys.modules, MASKS, made)
    return made


def handed_on(cut) -> list[int]:
    """Returns the number of tensors that each unit takes."""
    return [len(unit.bodies[0].entries) for _, unit in cut.units]


def test_the_mask_is_left_to_the_kernel_as_in_training(room: ModuleType) -> None:
    torch.manual_seed(0)
    before = dict(vars(room))
    cut, found = compare(Causal(), tokens(length=8))
    assert handed_on(cut) == [1, 1, 1, 1, 1]
    assert [difference for difference in found if not difference.is_none] == []
    assert vars(room) == before


def test_a_mask_that_is_given_is_used_whatever_it_holds(room: ModuleType) -> None:
    torch.manual_seed(0)
    padding = torch.ones(2, 8, dtype=torch.int64)
    padding[1, 5:] = 0
    before = dict(vars(room))
    cut, found = compare(Causal(), {"tokens": tokens(length=8), "padding": padding})
    assert handed_on(cut) == [2, 2, 2, 2, 1]
    assert [difference for difference in found if not difference.is_none] == []
    assert vars(room) == before


def test_what_was_told_ends_with_a_refusal(room: ModuleType) -> None:
    before = dict(vars(room))
    with pytest.raises(InputError, match="cannot be cut"):
        trace(Moved(), tokens())
    assert vars(room) == before
