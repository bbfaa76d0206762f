"""What a test changes in torch for the whole process is put back."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _default_type() -> Iterator[None]:
    yield
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
