"""A batch with fewer samples than microbatches, where workers divide tokens or the vocabulary of the loss.

The samples that filled the other microbatches counted as if they were of the batch.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from pipedejavu import Trainer
from pipedejavu.plan import preset

WORDS, WIDTH, TOKENS = 12, 8, 4


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


class Net(nn.Module):
    """One block of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        parts = (self.query, self.key, self.value)
        heads = (part(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        return self.head(x + self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("name", ["sequence", "vocabulary", "context", "megatron"])
def test_samples_that_fill_a_microbatch_do_not_count(name):
    base, batches = Net(), [torch.randint(WORDS, (count, TOKENS)) for count in (4, 2, 4)]
    plain, model = copy.deepcopy(base), copy.deepcopy(base)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(plain(batch), batch).backward()
        optimizer.step()
    plan = preset(name).at(workers=2, microbatches=4, samples=1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_of, plan=plan, precision="fp64")
    for batch in batches:
        trainer.step((batch, batch))
    trainer.save_to_model()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-13)
