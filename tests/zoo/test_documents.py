"""Models of the zoo compute several documents in a row as each of them alone."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.zoo import build, separates_documents
from pipedejavu.zoo.loss import IGNORED

LENGTHS = ((5, 3, 8), (1, 15))
"""Of the documents in each row."""


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny"])
def test_a_packed_row_has_the_loss_and_the_gradients_of_its_documents_alone(name) -> None:
    assert separates_documents(name)
    task = build(name, layers=2, width=32, context=16, data="random")
    task.model.double()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 200, (2, 16), generator=generator)
    positions = torch.tensor([[n for length in row for n in range(length)] for row in LENGTHS])
    targets = torch.randint(1, 200, (2, 16), generator=generator).masked_fill(positions == 0, IGNORED)
    packed = gradients(task, task.loss(task.model((tokens, positions)), targets))
    alone = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        parts = zip(tokens[row].split(lengths), targets[row].split(lengths), strict=True)
        alone = alone + sum(task.loss(task.model(ids[None]), labels[None]) for ids, labels in parts)
    expected = gradients(task, alone)
    assert packed[0] == pytest.approx(expected[0], rel=1e-12)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(packed[1], expected[1], strict=True))
    crossing = task.loss(task.model(tokens), targets).item()
    assert abs(crossing - expected[0]) > 1e-6


def gradients(task, loss):
    task.model.zero_grad()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in task.model.parameters()]
