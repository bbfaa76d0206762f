"""Tests run on all cores, and each process takes one; what a test changes in torch for all of it is put back."""

import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes of two threads each wait for each other on two cores


@pytest.fixture(autouse=True)
def _default_type() -> Iterator[None]:
    yield
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
