import pytest

pytest.importorskip("torch")

import torch

from pipedejavu.zoo import build
from pipedejavu.zoo.loss import IGNORED


def test_base_and_large_are_near_the_published_sizes() -> None:
    for name, parameters in (("bert-base", 110e6), ("bert-large", 340e6)):
        model = build(name, device="meta", vocabulary=30522, is_tied=True).model
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.02)


def test_every_token_sees_both_sides() -> None:
    task = build("bert-tiny", layers=1, width=16, context=8)
    tokens, _ = task.data.batch([0])
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    assert not torch.allclose(task.model(tokens)[0, 0], task.model(changed)[0, 0], atol=1e-7, rtol=0)


def test_masked_tokens_are_the_targets() -> None:
    task = build("bert-tiny", context=64)
    plain, _ = build("gpt-tiny", context=64).data.batch(range(200))
    inputs, targets = task.data.batch(range(200))
    is_masked = inputs == 256
    assert torch.equal(is_masked, targets != IGNORED)
    assert torch.equal(targets[is_masked], plain[is_masked])
    assert torch.equal(inputs[~is_masked], plain[~is_masked])
    assert is_masked.any(dim=1).all()
    assert float(is_masked.double().mean()) == pytest.approx(0.15, abs=0.01)
    assert task.count(targets) == int(is_masked.sum())
    assert torch.equal(task.data.batch([7])[0][0], inputs[7])
