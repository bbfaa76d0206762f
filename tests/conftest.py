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


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps measurements for the tests of one process, apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
