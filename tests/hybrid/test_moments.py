"""HybridAdamW with moments of fewer bits: saving, changing the format, and the bytes of a plan."""

import copy
from typing import Any

import pytest
import torch

from pipedejavu.facts import InputError
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.optim.moment_format import MomentFormat, num_scales, widened


@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_training_continues_bit_for_bit_in_another_placement(
    moments: MomentFormat, dtype: torch.dtype, lab: Any, bits: Any, compare: Any
) -> None:
    model, other = lab.net(dtype), lab.net(dtype)
    optimizer = lab.hybrid(model, clip_norm=0.5, moments=moments, gpu_units=2)
    lab.train(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    lab.train(model, optimizer, range(5, 9))
    second = lab.hybrid(other, clip_norm=0.5, moments=moments, gpu_units=4, window=1)
    other.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    lab.train(other, second, range(5, 9))
    compare(bits(optimizer, model), bits(second, other))


def test_the_format_may_change_with_a_saved_state(lab: Any) -> None:
    """int8 moments go to float32 and back unchanged, and float32 moments are rounded to the nearest code."""
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=0.5, moments="int8", gpu_units=2)
    lab.train(model, optimizer, range(4))
    state = copy.deepcopy(optimizer.state_dict())
    for path in (("fp32", "int8"), ("int8", "bf16", "int8")):
        for moments in path:
            other = lab.net()
            second = lab.hybrid(other, clip_norm=0.5, moments=moments, gpu_units=3)
            lab.train(other, second, range(1))  # decides the places
            other.load_state_dict(model.state_dict())
            second.load_state_dict(state)
            state = copy.deepcopy(second.state_dict())
        for n, entry in optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                assert torch.equal(state["state"][n][key], value), (path, key)


def test_codes_hold_what_float32_would_to_an_eighth(lab: Any) -> None:
    found = {}
    for moments in ("fp32", "int8"):
        model = lab.net()
        optimizer = lab.hybrid(model, clip_norm=0.5, moments=moments)
        lab.train(model, optimizer, range(1))
        optimizer.synchronize()
        found[moments] = [p.state for p in optimizer.scheduler.model_state.params.values()]
    for exact, coded in zip(found["fp32"], found["int8"], strict=True):
        m, v = widened(coded.m, coded.m_scale), widened(coded.v, coded.v_scale)
        assert ((m - exact.m).abs() <= exact.m.abs() / 8 + exact.m.abs().max() * 2**-14).all()
        assert ((v - exact.v).abs() <= exact.v / 8 + exact.v.max() * 2**-30).all()


def test_torch_does_not_take_codes_for_moments(lab: Any) -> None:
    model = lab.net(torch.float32)
    optimizer = lab.hybrid(model, clip_norm=0.5, moments="int8")
    lab.train(model, optimizer, range(2))
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(optimizer.state_dict())
    optimizer.close()
    model.loss(lab.tokens(2)).backward()
    with pytest.raises(KeyError, match="exp_avg"):
        plain.step()


def test_a_state_with_missing_scales_is_refused(lab: Any) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=0.5, moments="int8")
    lab.train(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0]["exp_avg_scale"]
    with pytest.raises(
        InputError, match=r"^the state of 'embed\.weight' has no 'exp_avg_scale'; it is not that of an A"
    ):
        optimizer.load_state_dict(state)


def test_an_unknown_format_is_refused(lab: Any) -> None:
    with pytest.raises(InputError, match=r"^moments is 'fp8'; give 'fp32', 'bf16' or 'int8'$"):
        HybridAdamW(lab.net(), moments="fp8")  # type: ignore[arg-type]


def test_a_plan_counts_the_bytes_of_the_format(lab: Any) -> None:
    for moments, of_one in (("fp32", 10), ("bf16", 6), ("int8", 4)):
        model = lab.net()
        optimizer = lab.hybrid(model, clip_norm=0.5, moments=moments, gpu_units=6)
        lab.train(model, optimizer, range(1))
        params = optimizer.scheduler.model_state.params.values()
        scales = sum(2 * 4 * num_scales(p.numel) for p in params) if moments == "int8" else 0
        total = sum(size.gpu_bytes for size in optimizer.scheduler.model_state.sizes)
        assert total == of_one * sum(p.numel for p in params) + scales
        assert total == sum(t.nbytes for p in params for t in p.state[1:] if t is not None)
