"""The Trainer in a user's own loop."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import Sgd
from pipedejavu.facts import InputError
from pipedejavu.train import Trainer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(6, 3)).double()


def loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum")


def batch(size: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return inputs, (inputs.sum(1) > 0).long()


@pytest.mark.parametrize("plan", ["1f1b", "ddp", "zb-h1", "chimera", "interleaved", "coarse"])
def test_steps_equal_a_plain_loop_also_with_uneven_batches(plan) -> None:
    plain, batches = model(), [batch(size, size) for size in (30, 25, 19)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        mean = loss(plain(inputs), targets) / len(targets)
        mean.backward()
        optimizer.step()
        expected.append(mean.item())
    trainer = Trainer(model(), loss, sample=batches[0], plan=plan, workers=2, optimizer=Sgd(lr=0.1, momentum=0.9))
    assert [trainer.step(b) for b in batches] == pytest.approx(expected, rel=1e-12)
    trained = trainer.save_to_model()
    for own, other in zip(trained.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-13)


def test_a_batch_smaller_than_the_microbatches_is_refused() -> None:
    trainer = Trainer(model(), loss, sample=batch(8), workers=2)
    with pytest.raises(InputError, match="a batch of 3 samples has fewer than the plan's 4 microbatches"):
        trainer.step(batch(3))


def test_plans_without_a_common_update_are_refused() -> None:
    with pytest.raises(InputError, match="use a synchronous plan"):
        Trainer(model(), loss, sample=batch(8), plan="pipedream", workers=2)


def test_a_module_that_is_no_chain_is_refused() -> None:
    with pytest.raises(InputError, match="a Linear cannot be cut into units yet"):
        Trainer(nn.Linear(2, 2), loss, sample=batch(8))


def test_a_step_is_predicted() -> None:
    trainer = Trainer(copy.deepcopy(model()), loss, sample=batch(16), workers=2)
    assert [w.peak_live_microbatches for w in trainer.predict().workers] == [2, 1]
