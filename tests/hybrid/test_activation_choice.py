"""What blocks keep of their forward changes memory and no bit."""

from typing import Any

import pytest
import torch

from pipedejavu.facts import InputError
from pipedejavu.runtime import block_offload
from pipedejavu.runtime.block_offload import OffloadedTensor

STEPS = 4


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[OffloadedTensor]:
    """Offloads tensors of every size; returns those that were fetched again."""
    fetched: list[OffloadedTensor] = []
    take = OffloadedTensor.take

    def note(offloaded: OffloadedTensor) -> torch.Tensor:
        fetched.append(offloaded)
        return take(offloaded)

    monkeypatch.setattr(block_offload, "MIN_BYTES", 0)
    monkeypatch.setattr(OffloadedTensor, "take", note)
    return fetched


def blocks(lab: Any) -> list[str]:
    optimizer = lab.hybrid(lab.net())
    return [unit_state.unit.name for unit_state in optimizer.scheduler.unit_states if unit_state.unit.is_block]


@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("choice", ["recompute", "offload", "mixed"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_every_choice_gives_the_same_bits(
    choice: str,
    window: int | None,
    clip_norm: float | None,
    lab: Any,
    bits: Any,
    compare: Any,
    taken: list[OffloadedTensor],
) -> None:
    values = ["offload", "recompute", "keep", "offload"]
    activations = dict(zip(blocks(lab), values, strict=False)) if choice == "mixed" else choice
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=clip_norm, gpu_units=1, window=window, activations=activations)
    lab.train(model, optimizer, range(STEPS))
    compare(bits(optimizer, model), lab.plain_bits(torch.bfloat16, clip_norm, STEPS))
    assert bool(taken) == (choice != "recompute")


def test_nothing_leaves_without_a_backward_pass_and_small_tensors_stay(lab: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=None, window=None, activations="offload")
    lanes = optimizer._lanes
    recorder = optimizer.record()
    with torch.no_grad():
        model.loss(lab.tokens(0))
    lab.train(model, optimizer, range(1))
    optimizer.synchronize()
    assert lanes.copy_out.recorder is recorder
    assert not [span for span in recorder.finish() if span[1] == "OFFLOAD:s"]


def test_a_closed_optimizer_gives_the_forwards_back(lab: Any) -> None:
    model = lab.net()
    before = [module.forward for module in model.modules()]
    optimizer = lab.hybrid(model, activations="recompute")
    assert [module.forward for module in model.modules()] != before
    optimizer.close()
    lab.made.clear()
    assert [module.forward for module in model.modules()] == before


@pytest.mark.parametrize(
    ("activations", "text"),
    [
        ({"nowhere": "keep"}, "activations names 'nowhere', which is no block; the blocks are "),
        ("forget", "is 'forget'; give keep, recompute or offload"),
    ],
)
def test_what_is_no_choice_is_refused(activations: Any, text: str, lab: Any) -> None:
    with pytest.raises(InputError, match=text):
        lab.hybrid(lab.net(), activations=activations)
