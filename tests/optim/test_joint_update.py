"""Updates of split weights from bf16 and float32 gradients: the native pass has the bits of the reference."""

import pytest
import torch

from pipedejavu.optim import native
from pipedejavu.optim.arithmetic import AdamState, join, scalars_of, split, update_
from pipedejavu.optim.joint_update import update_all
from pipedejavu.optim.native import NativeTask

SHAPES = ((70, 1000), (33,), (1,), (0, 4))
"""The first has more elements than a chunk of the native pass."""


def task_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> NativeTask:
    source = torch.Generator().manual_seed(seed)
    high, low = split(torch.randn(shape, generator=source))
    gradient = torch.randn(shape, generator=source).to(dtype)
    old = AdamState(high, low, torch.randn(shape, generator=source) / 8, torch.rand(shape, generator=source) / 8)
    s = scalars_of(3, 1e-2, (0.9, 0.99), 1e-6, 0.1, 0.25)
    return NativeTask(s, gradient, old, old._replace(weight=torch.empty_like(high)))


def copied(task: NativeTask) -> NativeTask:
    old = AdamState(*(None if part is None else part.clone() for part in task.old))  # type: ignore[arg-type]
    return NativeTask(task.s, task.gradient.clone(), old, old._replace(weight=torch.empty_like(old.weight)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_native", [True, False])
def test_gradients_of_both_formats_give_the_bits_of_the_reference(monkeypatch, is_native, dtype) -> None:
    if not is_native:
        monkeypatch.setattr(native, "_shared_updates", {})
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("_native.so was not built: no C compiler at install")
    tasks = [task_of(shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
    expected = [copied(task) for task in tasks]
    update_all(tasks)
    for task, other in zip(tasks, expected, strict=True):
        before = other.old.weight.clone()
        update_(*other)
        assert task.old.weight.equal(before), "the old version stays"
        for part, reference in zip(task.new, other.new, strict=True):
            assert part is reference is None or part.equal(reference)


def test_a_library_of_an_older_source_is_not_used(monkeypatch) -> None:
    if native.library() is None:
        pytest.skip("_native.so was not built: no C compiler at install")
    monkeypatch.setattr(native, "VERSION", "pdv_adamw_0")
    assert native.library.__wrapped__() is None


def test_halves_join_to_the_master() -> None:
    master = torch.randn(10_000) * torch.logspace(-30, 30, 10_000)
    high, low = split(master)
    assert join(high, low).equal(master)
    assert (high.float() - master).abs().le(master.abs() * 2**-8).all()
