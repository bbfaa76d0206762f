"""Moments of fewer bits: what the formats can hold, rounding without bias, and the same bits in all implementations."""

import math

import pytest
import torch
from torch import Tensor

from pipedejavu.optim import native
from pipedejavu.optim.arithmetic import AdamState, Part, Scalars, scalars_of, split, update_
from pipedejavu.optim.moment_format import (
    MOMENT_FORMATS,
    MomentFormat,
    Moments,
    convert_moments,
    moment_bytes,
    seed_of,
    widened,
    write_moments,
    zero_moments,
)
from pipedejavu.optim.native import HostUpdate, NativeTask

NARROW: tuple[MomentFormat, ...] = ("bf16", "int8")
SIZES = [1, 255, 256, 257, 2047, 2305, 32769, 70001]
"""Around the blocks of scales, and the blocks and chunks of native.c."""


def wide(moments: Moments) -> tuple[Tensor, Tensor]:
    return widened(moments.m, moments.m_scale), widened(moments.v, moments.v_scale)


def drawn(numel: int, seed: int, *, is_wild: bool = False) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    value = torch.randn(numel, generator=source)
    if not is_wild:
        return value
    value = torch.ldexp(value, torch.randint(-149, 127, (numel,), generator=source))
    return torch.where(torch.rand(numel, generator=source) < 0.05, 0.0, value)


def task_of(
    form: MomentFormat, numel: int, dtype: torch.dtype, s: Scalars, *, is_wild: bool, is_wide: bool = False
) -> NativeTask:
    weight, low = drawn(numel, 1, is_wild=is_wild), None
    gradient = drawn(numel, 2, is_wild=is_wild).to(torch.float32 if is_wide else dtype)
    if dtype == torch.bfloat16:
        weight, low = split(weight)
    moments = zero_moments(form, numel)
    write_moments(drawn(numel, 3, is_wild=is_wild) / 8, drawn(numel, 4, is_wild=is_wild).square(), moments, 5)
    state = AdamState(weight, low, *moments)
    return NativeTask(s, gradient, state, state)


def copied(state: AdamState) -> AdamState:
    return AdamState(*(None if tensor is None else tensor.clone() for tensor in state))  # type: ignore[arg-type]


def check_equal(one: AdamState, other: AdamState) -> None:
    for name, a, b in zip(AdamState._fields, one, other, strict=True):
        assert a is b is None or (a is not None and b is not None and a.view(torch.uint8).equal(b.view(torch.uint8))), (
            name
        )


SCALARS = {
    "first step": scalars_of(1, 1e-3, (0.9, 0.999), 1e-8, 0.01, 1.0),
    "late step, clipped": scalars_of(100_000, 3e-4, (0.9, 0.95), 1e-8, 0.1, 0.0371),
    "no eps, no moments": scalars_of(2, 1.0, (0.0, 0.0), 0.0, 0.0, 1.0),
    "huge": scalars_of(3, 1e30, (0.999, 0.9999), 1e20, 1e-30, 1e15),
}


@pytest.mark.skipif(native.library() is None, reason="_native.so was not built: no C compiler at install")
@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["split", "float32"])
@pytest.mark.parametrize("s", SCALARS.values(), ids=SCALARS.keys())
def test_the_native_pass_gives_the_bits_of_the_reference(form: MomentFormat, dtype: torch.dtype, s: Scalars) -> None:
    update = HostUpdate(2, is_native=True)
    for is_wild, is_wide, is_in_place in ((False, False, True), (True, False, False), (True, True, True)):
        tasks = [task_of(form, numel, dtype, s, is_wild=is_wild, is_wide=is_wide) for numel in SIZES]
        for task in tasks:
            old = copied(task.old)
            expected = copied(task.old)
            update_(s, task.gradient, old, expected)
            new = task.old if is_in_place else copied(task.old)
            update([task._replace(new=new)])
            check_equal(new, expected)
            check_equal(task.old, expected if is_in_place else old)
    update.close()


@pytest.mark.skipif(native.library() is None, reason="_native.so was not built: no C compiler at install")
@pytest.mark.parametrize("form", MOMENT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["split", "float32"])
@pytest.mark.parametrize("is_native", [True, False])
def test_weights_first_and_moments_later_are_one_update(
    form: MomentFormat, dtype: torch.dtype, is_native: bool
) -> None:
    task = task_of(form, 3000, dtype, SCALARS["first step"], is_wild=False)
    expected, whole = copied(task.old), copied(task.old)
    update_(task.s, task.gradient, expected, expected)
    update = HostUpdate(2, is_native=is_native)
    update([task._replace(part=Part.WEIGHTS)])
    assert task.new.m.equal(whole.m)
    assert task.new.weight.equal(expected.weight)
    update([task._replace(part=Part.MOMENTS)])
    update.close()
    check_equal(task.new, expected)


@pytest.mark.parametrize("form", NARROW)
def test_rounding_has_no_bias(form: MomentFormat) -> None:
    numel, rounds = 512, 1500
    m = drawn(numel, 0) * torch.logspace(-2, 0, numel)
    v, sums = m.square(), torch.zeros(2, numel, dtype=torch.float64)
    moments = zero_moments(form, numel)
    for n in range(rounds):
        write_moments(m, v, moments, seed_of(n))
        sums += torch.stack(wide(moments))
    # A code is at most 1/8 (bf16: 1/128) of its value away; the mean of n draws has this standard deviation at most.
    spread = (1 / 8 if form == "int8" else 1 / 128) / 2 / math.sqrt(rounds)
    for total, value in zip(sums, (m, v), strict=True):
        assert ((total / rounds - value) / value).abs().max() < 5 * spread


@pytest.mark.parametrize("form", NARROW)
def test_a_second_moment_follows_its_gradients_down(form: MomentFormat) -> None:
    """Rounded to the nearest it would stay at its first value: a thousandth is less than half a unit."""
    s = [scalars_of(n, 0.0, (0.9, 0.999), 1e-8, 0.0, 1.0) for n in range(1, 2001)]
    state = AdamState(torch.zeros(2048), None, *zero_moments(form, 2048))
    write_moments(torch.zeros(2048), torch.full((2048,), 1.0), state.moments, 0)
    for each in s:
        update_(each, torch.full((2048,), 0.1), state, state)
    expected = 0.01 + 0.99 * 0.999**2000
    assert wide(state.moments)[1].mean().item() == pytest.approx(expected, rel=0.03)


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    v = torch.tensor([1e30, 1e-3, 1e-20, 1e-38, 1e-44, 0.0])
    for form in NARROW:
        moments = zero_moments(form, 6)
        for seed in range(50):
            write_moments(torch.zeros(6), v, moments, seed)
            values = wide(moments)[1]
            assert (values[:5] > 0).all()
            assert values[5] == 0


def test_what_is_not_finite_stays_so() -> None:
    for bad in (math.inf, math.nan):
        for form in NARROW:
            moments = zero_moments(form, 300)
            value = torch.ones(300)
            value[7] = bad
            write_moments(-value, value, moments, 3)
            for wide_moment in wide(moments):
                assert not wide_moment[7].isfinite()


@pytest.mark.parametrize("form", NARROW)
def test_what_a_format_holds_survives_float32_bit_for_bit(form: MomentFormat) -> None:
    moments, again = (zero_moments(form, 700) for _ in range(2))
    write_moments(drawn(700, 1) * torch.logspace(-6, 0, 700), drawn(700, 2).square(), moments, 11)
    plain = zero_moments("fp32", 700)
    convert_moments(moments, plain)
    convert_moments(plain, again)
    check_equal(AdamState(plain.m, None, *again), AdamState(plain.m, None, *moments))
    assert all(a.equal(b) for a, b in zip(wide(moments), plain[:2], strict=True))


def test_bytes_of_the_formats() -> None:
    assert [moment_bytes(form, 1024) for form in MOMENT_FORMATS] == [8192, 4096, 2048 + 2 * 4 * 4]
    assert moment_bytes("int8", 1) == 2 + 2 * 4
    assert moment_bytes("int8", 0) == 0
