"""The learning rate over a run."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.facts import InputError
from pipedejavu.run.options import TrainOptions
from pipedejavu.source.rate_schedule import rate_schedule
from pipedejavu.source.task import prepare


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_rate_falls_as_with_the_schedulers_of_torch(kind) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = torch.optim.lr_scheduler
    peer = (
        schedulers.CosineAnnealingLR(optimizer, T_max=10)
        if kind == "cosine"
        else schedulers.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=10)
    )
    factor = rate_schedule(kind, 0, 10)
    for update in range(10):
        assert factor(update) == pytest.approx(peer.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        peer.step()


def test_the_rate_rises_over_the_warmup_and_then_stays() -> None:
    factor = rate_schedule("constant", 3, 10)
    assert [factor(update) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rate_schedule("constant", 0, 10) is None
    with pytest.raises(InputError, match="--warmup is 10, and the run has 10 steps; give fewer, or more --steps"):
        rate_schedule("cosine", 10, 10)


def test_a_job_has_the_schedule_of_its_options() -> None:
    options = TrainOptions(model="mlp", data="random:64", steps=4, lr=0.5, schedule="linear", optimizer="sgd")
    optimizer = prepare(options, (2,)).job.optimizer
    assert [optimizer.rate(update) for update in range(4)] == [0.5, 0.375, 0.25, 0.125]
    with pytest.raises(InputError, match=r"--momentum 0.9 is for sgd, and the optimizer is adamw; leave it out"):
        prepare(options.replace(optimizer="adamw", momentum=0.9), (2,))
