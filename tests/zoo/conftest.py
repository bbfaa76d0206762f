"""Every model of the zoo in a size that trains in a moment."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

_TOKENS = {"layers": 2, "width": 32, "context": 12}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"widths": [12, 16, 8, 3]}),
    "vgg": ("vgg-small", {"stages": [[4], [8, 8]], "side": 8}),
    "vgg-plain": ("vgg-small", {"stages": [[4], [8, 8]], "side": 8, "has_batch_norm": False}),
    "resnet18": ("resnet18", {"blocks": [1, 2], "width": 4, "side": 8}),
    "resnet50": ("resnet50", {"blocks": [1, 2], "width": 4, "side": 8}),
    "resnet-large": ("resnet18", {"blocks": [1, 1], "width": 4, "side": 64}),
    "gpt": ("gpt-tiny", _TOKENS),
    "gpt-tied": ("gpt-tiny", {**_TOKENS, "is_tied": True, "heads": 4}),
    "bert": ("bert-tiny", _TOKENS),
    "bert-tied": ("bert-tiny", {**_TOKENS, "is_tied": True}),
    "seq2seq": ("seq2seq-tiny", _TOKENS),
    "seq2seq-tied": ("seq2seq-tiny", {**_TOKENS, "is_tied": True}),
    "moe": ("moe-tiny", _TOKENS),
    "moe-one": ("moe-tiny", {**_TOKENS, "top": 1, "capacity_factor": 0.5, "is_tied": True}),
}


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A name and the options that make it small."""
    return TINY[request.param]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keeps threads from waiting for each other over tensors this small."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
