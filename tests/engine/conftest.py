"""The cases of `case`, in float64."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.engine.case import Case, make_case


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def make() -> Callable[..., Case]:
    """Makes a case of a preset."""
    return make_case
