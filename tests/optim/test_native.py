import math
import os
import subprocess
import sys
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from pipedejavu.optim import native
from pipedejavu.optim.arithmetic import AdamState, Part, Scalars, join, scalars_of, split, update_
from pipedejavu.optim.native import HostUpdate, NativeTask

pytestmark = pytest.mark.skipif(native.library() is None, reason="_native.so was not built: no C compiler at install")

SIZES = [1, 15, 2047, 2049, 32769, 70001]
"""Around the blocks and chunks of native.c, so that several threads have a part."""


def wild(numel: int, generator: torch.Generator) -> Tensor:
    """Returns values of every magnitude, denormal ones and zeros among them."""
    exponent = torch.randint(-149, 127, (numel,), generator=generator)
    value = torch.ldexp(torch.randn(numel, generator=generator), exponent)
    return torch.where(torch.rand(numel, generator=generator) < 0.05, 0.0, value)


def tame(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=generator)


def make_task(numel: int, dtype: torch.dtype, s: Scalars, *, seed: int, is_wild: bool) -> NativeTask:
    generator = torch.Generator().manual_seed(seed)
    draw = wild if is_wild else tame
    gradient, weight, low = draw(numel, generator).to(dtype), draw(numel, generator), None
    if dtype == torch.bfloat16:
        weight, low = split(weight)
    state = AdamState(weight, low, draw(numel, generator), draw(numel, generator).abs())
    return NativeTask(s, gradient, state, state)


def copied(state: AdamState) -> AdamState:
    return AdamState(*(None if tensor is None else tensor.clone() for tensor in state))  # type: ignore[arg-type]


def bits(state: AdamState) -> list[Tensor]:
    """Returns master and moments as integers; all NaNs are one."""
    master = state.weight if state.low is None else join(state.weight, state.low)
    return [t.where(~t.isnan(), torch.full_like(t, math.nan)).view(torch.int32) for t in (master, state.m, state.v)]


def run(tasks: list[NativeTask], *, is_native: bool, num_threads: int, is_in_place: bool) -> list[list[Tensor]]:
    own = []
    for task in tasks:
        old = copied(task.old)
        own.append(task._replace(old=old, new=old if is_in_place else copied(old)))
    update = HostUpdate(num_threads, is_native=is_native)
    update(own)
    update.close()
    assert update.num_updated == sum(task.gradient.numel() for task in tasks)
    if not is_in_place:
        for task, given_task in zip(own, tasks, strict=True):
            assert all(a.equal(b) for a, b in zip(bits(task.old), bits(given_task.old), strict=True))
    return [bits(task.new) for task in own]


def check_equal(tasks: list[NativeTask], num_threads: int, is_in_place: bool) -> None:
    reference = run(tasks, is_native=False, num_threads=1, is_in_place=is_in_place)
    found = run(tasks, is_native=True, num_threads=num_threads, is_in_place=is_in_place)
    for one, other in zip(reference, found, strict=True):
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))


SCALARS = {
    "first step": scalars_of(1, 1e-3, (0.9, 0.999), 1e-8, 0.01, 1.0),
    "late step, clipped": scalars_of(100_000, 3e-4, (0.9, 0.95), 1e-8, 0.1, 0.0371),
    "no eps, no moments": scalars_of(2, 1.0, (0.0, 0.0), 0.0, 0.0, 1.0),
    "tiny": scalars_of(3, 1e-38, (0.9, 0.999), 1e-38, 1e-3, 1e-30),
    "huge": scalars_of(3, 1e30, (0.999, 0.9999), 1e20, 1e-30, 1e15),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["split", "float32"])
@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "copy"])
@pytest.mark.parametrize("s", SCALARS.values(), ids=SCALARS.keys())
def test_the_native_pass_gives_the_bits_of_the_reference(s: Scalars, is_in_place: bool, dtype: torch.dtype) -> None:
    for is_wild in (False, True):
        tasks = [make_task(numel, dtype, s, seed=numel, is_wild=is_wild) for numel in SIZES]
        check_equal(tasks, 2, is_in_place)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_several_jobs_of_both_kinds_on_any_number_of_threads(num_threads: int) -> None:
    kinds = [torch.bfloat16, torch.float32] * 3
    steps = [scalars_of(n, 1e-3 * n, (0.9, 0.99), 1e-8, 0.1, 1.0 / n) for n in range(1, 7)]
    tasks = [
        make_task(numel, dtype, s, seed=n, is_wild=False)
        for n, (numel, dtype, s) in enumerate(zip(SIZES, kinds, steps, strict=True))
    ]
    for is_in_place in (True, False):
        check_equal(tasks, num_threads, is_in_place)


@settings(deadline=None, max_examples=60)
@given(
    step=st.integers(1, 10**6), lr=st.floats(0, 1e3), beta1=st.floats(0, 0.9999), beta2=st.floats(0, 0.999999),
    eps=st.floats(0, 1e3), weight_decay=st.floats(0, 10), scale=st.floats(0, 1), numel=st.integers(1, 5000),
    is_split=st.booleans(), is_in_place=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_scalars_give_the_bits_of_the_reference(
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, scale: float, numel: int,
    is_split: bool, is_in_place: bool, seed: int,
) -> None:  # fmt: skip
    s = scalars_of(step, lr, (beta1, beta2), eps, weight_decay, scale)
    dtype = torch.bfloat16 if is_split else torch.float32
    check_equal([make_task(numel, dtype, s, seed=seed, is_wild=True)], 2, is_in_place)


def test_tensors_that_begin_at_odd_addresses_work() -> None:
    s = SCALARS["first step"]
    whole = make_task(5000, torch.bfloat16, s, seed=5, is_wild=False)
    old = AdamState(*(None if t is None else t[1:] for t in whole.old))  # type: ignore[arg-type]
    check_equal([NativeTask(s, whole.gradient[1:], old, old)], 2, False)
    update = HostUpdate(2, is_native=True)
    new = AdamState(*(None if t is None else torch.empty(5001, dtype=t.dtype)[2:] for t in whole.old))  # type: ignore[arg-type]
    update([NativeTask(s, whole.gradient[1:], old, new)])
    update.close()
    (expected,) = run([NativeTask(s, whole.gradient[1:], old, old)], is_native=False, num_threads=1, is_in_place=True)
    assert all(a.equal(b) for a, b in zip(expected, bits(new), strict=True))


@pytest.mark.parametrize("is_native", [True, False])
def test_memory_is_zeroed_to_its_end_and_no_further(is_native: bool) -> None:
    memory = torch.ones(2**24 + 5000, dtype=torch.uint8)
    seen: list[int] = []
    update = HostUpdate(2, is_native=is_native)
    update.zero(memory.data_ptr(), memory.numel() - 1, seen.append)
    update.close()
    assert memory.sum() == 1
    assert memory[-1] == 1
    assert sum(seen) == memory.numel() - 1


def test_a_missing_library_is_named_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    assert not HostUpdate(1).is_native
    with pytest.raises(RuntimeError, match=r"_native\.so was not built; install the package where there is a C comp"):
        HostUpdate(1, is_native=True)


def task_of(seed: int, count: int = 100_000) -> NativeTask:
    source = torch.Generator().manual_seed(seed)
    gradient, weight, m = (torch.randn(count, generator=source) for _ in range(3))
    state = AdamState(weight, None, m, m.square())
    return NativeTask(scalars_of(3, 0.1, (0.9, 0.99), 1e-8, 0.1, 0.5), gradient, state, state)


def expected_of(seed: int) -> Tensor:
    task = task_of(seed)
    update_(*task)
    return task.new.weight


def test_threads_that_share_an_update_do_not_disturb_each_other() -> None:
    tasks = [task_of(seed) for seed in range(4)]
    threads = [threading.Thread(target=native.update_on_host, args=([task],)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, task in enumerate(tasks):
        assert task.new.weight.equal(expected_of(seed))


def test_a_new_weight_may_take_the_memory_of_its_gradient() -> None:
    task = task_of(7)
    before = task.old.weight.clone()
    native.update_on_host([task._replace(new=task.new._replace(weight=task.gradient))])
    assert task.gradient.equal(expected_of(7))
    assert task.old.weight.equal(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    """A child has none of its parent's threads: it would wait for them forever."""
    code = """
import os, sys, torch
from pipedejavu.optim import native
from pipedejavu.optim.arithmetic import AdamState, scalars_of
torch.set_num_threads(2)
def prepare():
    state = AdamState(torch.ones(100_000), None, torch.zeros(100_000), torch.zeros(100_000))
    return native.NativeTask(scalars_of(1, 0.1, (0.9, 0.99), 1e-8, 0.0, 1.0), torch.ones(100_000), state, state)
def updated(task):
    native.update_on_host([task])
    return task.new.weight[-1].item()
ours, theirs = prepare(), prepare()  # torch's own threads do not survive a fork either
first = updated(ours)
child = os.fork()
if child == 0:
    os._exit(0 if updated(theirs) == first else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize(
    ("dtype", "gradient"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)],
    ids=str,
)
def test_weights_and_then_moments_are_one_update(dtype: torch.dtype, gradient: torch.dtype, is_native: bool) -> None:
    s = scalars_of(3, 0.01, (0.9, 0.999), 1e-8, 0.1, 0.37)
    task = make_task(70001, dtype, s, seed=5, is_wild=True)
    task = task._replace(gradient=task.gradient.to(gradient))
    expected = copied(task.old)
    update_(s, task.gradient, expected, expected)
    update, before = HostUpdate(2, is_native=is_native), copied(task.old)
    update([task._replace(part=Part.WEIGHTS)])
    assert torch.equal(task.old.m, before.m)
    assert torch.equal(task.old.v, before.v)
    assert torch.equal(bits(task.old)[0], bits(expected)[0])
    update([task._replace(part=Part.MOMENTS)])
    update.close()
    assert all(torch.equal(one, other) for one, other in zip(bits(task.old), bits(expected), strict=True))
