"""The tests of the model check in float64, so that rounding lies far below what a lie changes."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _double(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.path.name.startswith("test_model_"):
        yield
        return
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
