import pytest

pytest.importorskip("torch")

import torch

from pipedejavu.zoo import build

SIZE = {"layers": 2, "width": 16, "context": 8}


def test_the_pair_passes_to_the_last_decoder() -> None:
    task = build("seq2seq-tiny", **SIZE)
    flow, _ = task.data.batch([0, 1])
    widths = []
    for _, unit in task.model.units():
        flow = unit(flow)
        widths.append(len(flow) if isinstance(flow, tuple) else 1)
    assert [name for name, _ in task.model.units()] == [
        "embedding", "encoder0", "encoder1", "decoder0", "decoder1", "head",
    ]  # fmt: skip
    assert widths == [2, 2, 2, 2, 1, 1]


def test_the_target_is_the_reversed_source_after_a_start_token() -> None:
    (source, begun), target = build("seq2seq-tiny", **SIZE).data.batch([3])
    assert target[0].tolist() == source[0].tolist()[::-1]
    assert begun[0].tolist() == [256, *target[0].tolist()[:-1]]


def test_outputs_see_the_whole_source_and_the_target_so_far() -> None:
    task = build("seq2seq-tiny", **SIZE)
    (source, begun), _ = task.data.batch([0])
    before = task.model((source, begun))
    other_source, other_begun = source.clone(), begun.clone()
    other_source[0, 7] = (other_source[0, 7] + 1) % 256
    other_begun[0, 4] = (other_begun[0, 4] + 1) % 256
    assert not torch.allclose(task.model((other_source, begun))[0, 0], before[0, 0], atol=1e-7, rtol=0)
    after = task.model((source, other_begun))
    assert torch.equal(after[0, :4], before[0, :4])
    assert not torch.allclose(after[0, 4:], before[0, 4:])
