"""Whole forward passes: how many, in which mode, and with which arguments."""

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.profile.forward_pass import time_forward_passes


class Seen(torch.nn.Module):
    """Notes how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(2, 2), []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls.append((torch.is_grad_enabled(), self.training, x.device.type, y.shape))
        return self.linear(x) + y


@pytest.mark.parametrize("inputs", [(torch.ones(3, 2), torch.ones(2)), {"y": torch.ones(2), "x": torch.ones(3, 2)}])
def test_each_pass_is_one_call_without_gradients(inputs: object) -> None:
    model = Seen()
    assert len(time_forward_passes(model, inputs, torch.device("cpu"), 4)) == 4
    assert model.calls == [(False, True, "cpu", (2,))] * 4


def test_inputs_that_are_one_tensor_are_one_argument() -> None:
    assert min(time_forward_passes(torch.nn.Linear(2, 1), torch.ones(5, 2), torch.device("cpu"), 2)) > 0
