"""Batches as a DataLoader yields them: mappings, lengths that vary, and a last batch that is short."""

import copy
from collections import UserDict

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu import Trainer
from pipedejavu.facts import InputError


class Tagger(nn.Module):
    """Computes its own loss over labels that are not -100; no chain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(11, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
        self.head = nn.Linear(8, 11, dtype=torch.float64)

    def forward(self, input_ids, labels):
        x = self.token(input_ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(size: int, length: int) -> UserDict:
    ids = torch.randint(11, (size, length), generator=torch.Generator().manual_seed(size * length))
    return UserDict(input_ids=ids, labels=ids.roll(-1, 1).where(ids > 2, -100))


def test_mappings_of_varying_length_train_as_in_a_plain_loop(capsys) -> None:
    model, plain = Tagger(), Tagger()
    batches = [batch(8, 6), batch(8, 9), batch(3, 6), batch(8, 4)]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for some in batches:
        optimizer.zero_grad()
        loss = plain(**some)["loss"]
        loss.backward()
        optimizer.step()
        assert trainer.step(some) == pytest.approx(loss.item(), rel=1e-12)
    for own, other in zip(model.state_dict().values(), copy.deepcopy(plain).state_dict().values(), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-12)
    assert capsys.readouterr().err.count("batches vary in shape") == 1


def test_batches_of_other_tensors_are_refused() -> None:
    trainer = Trainer(Tagger())
    trainer.step(batch(8, 6))
    other = {name: tensor.int() if name == "input_ids" else tensor for name, tensor in batch(8, 6).items()}
    with pytest.raises(InputError, match="give all batches tensors of as many dimensions and of one dtype"):
        trainer.step(other)


def test_a_batch_too_short_for_the_plan_is_refused_if_the_model_keeps_statistics() -> None:
    """Samples that only fill a microbatch would enter the running mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    rows = torch.randn(8, 4, dtype=torch.float64), torch.randint(2, (8,))
    trainer.step(rows)
    with pytest.raises(InputError, match=r"3 samples has fewer than the plan's 4 microbatches, .* '1.running_mean'"):
        trainer.step([tensor[:3] for tensor in rows])
    trainer.step(rows)
