"""A device that runs out of memory in a step of a user's own loop is told in one sentence."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import AdamW
from pipedejavu.session import Trainer


class Greedy(nn.Linear):
    """Runs out of memory once it is armed."""

    def forward(self, x):
        if self.in_features and torch.is_grad_enabled() and ARMED:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.\nMore of torch's text.")
        return super().forward(x)


ARMED: list[bool] = []


@pytest.mark.parametrize(("plan", "workers"), [("cotrain", 1), ("1f1b", 2)])
def test_a_step_without_memory_is_told_in_one_sentence(plan: str, workers: int) -> None:
    ARMED.clear()
    batch = torch.randn(8, 6), torch.randint(0, 3, (8,))
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Greedy(6, 6), nn.Linear(6, 3))
    trainer = Trainer(
        model, nn.functional.cross_entropy, sample=batch, plan=plan, workers=workers, optimizer=AdamW(lr=0.1)
    )
    trainer.step(batch)
    ARMED.append(True)
    for _ in range(2):  # after a failed step the state is lost, and the next step says the same
        with pytest.raises(torch.OutOfMemoryError) as error:
            trainer.step(batch)
        said = str(error.value)
        assert f" ran out of memory in step 2: plan '{plan}' with " in said
        assert said.endswith("a plan that recomputes (CUDA out of memory. Tried to allocate 2.50 GiB)")
        assert "\n" not in said
