"""bf16 and fp16 on a GPU: the kernel has the host's bits, and plans have those of a plain loop on the device."""

from dataclasses import replace

import pytest
import torch

from pipedejavu.engine import AdamW, judge
from pipedejavu.optim.arithmetic import AdamState, scalars_of, split, update_
from pipedejavu.optim.joint_update import update_all
from pipedejavu.optim.native import NativeTask
from pipedejavu.plan import Precision
from tests.engine.bf16 import in_precision, train_plainly
from tests.engine.case import make_case
from tests.engine.gpu import PLACES, case_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
ADAMW = AdamW(lr=0.01, eps=0.01, weight_decay=0.1)


@pytest.fixture(autouse=True)
def _float32() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def task_of(numel: int, is_split: bool, is_wide: bool, seed: int) -> NativeTask:
    """Returns an update on the host that writes its new weight elsewhere."""
    source = torch.Generator().manual_seed(seed)
    weight, low = torch.randn(numel, generator=source), None
    gradient = torch.randn(numel, generator=source)
    if is_split:
        weight, low = split(weight)
    if is_split and not is_wide:
        gradient = gradient.bfloat16()
    m, v = torch.randn(numel, generator=source) / 8, torch.rand(numel, generator=source) / 8
    old = AdamState(weight, low, m, v)
    s = scalars_of(3, 1e-2, (0.9, 0.99), 1e-6, 0.1, 0.25)
    return NativeTask(s, gradient, old, old._replace(weight=torch.empty_like(weight)))


def on_gpu(task: NativeTask) -> NativeTask:
    old = AdamState(*(None if part is None else part.cuda() for part in task.old))  # type: ignore[arg-type]
    return NativeTask(task.s, task.gradient.cuda(), old, old._replace(weight=torch.empty_like(old.weight)))


@pytest.mark.parametrize(("is_split", "is_wide"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("sizes", [(1, 1023, 70_001), (4096, 2**16), (5,) * 40])
def test_the_kernel_writes_new_weights_with_the_bits_of_the_host(sizes, is_split, is_wide) -> None:
    tasks = [task_of(numel, is_split, is_wide, n) for n, numel in enumerate(sizes)]
    there = [on_gpu(task) for task in tasks]
    before = [task.old.weight.clone() for task in there]
    update_all(there)
    for task, other, weight in zip(tasks, there, before, strict=True):
        assert other.old.weight.equal(weight), "the old version stays"
        update_(*task)
        for part, again in zip(task.new, other.new, strict=True):
            assert part is None or part.equal(again.cpu())


def assert_bits(case) -> None:
    expected = train_plainly(case)
    for weights in case.outcome.weights.values():
        for name, weight in weights.items():
            assert weight.cpu().equal(expected[name]), (name, float((weight.cpu() - expected[name]).abs().max()))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_gpu_has_the_bits_of_a_plain_loop(microbatches) -> None:
    case = make_case("ddp", "mlp", replicas=1, microbatches=microbatches, steps=3, optimizer=ADAMW, type_="gpu")
    assert_bits(in_precision(case))


def test_two_workers_of_a_gpu_have_the_bits_of_a_plain_loop() -> None:
    case = make_case("1f1b", "mlp", workers=2, microbatches=4, steps=3, rounds=2, optimizer=ADAMW, type_="gpu")
    assert_bits(in_precision(case))


@pytest.mark.parametrize("name", ["zero-offload", "l2l", *PLACES])
def test_every_place_of_weights_and_state_has_the_bits_of_a_plain_loop(name) -> None:
    assert_bits(in_precision(case_of(name, "mlp")))


@pytest.mark.parametrize("model", ["mlp", "convnet", "calm-gpt"])
@pytest.mark.parametrize("masters", ["split", "fp32"])
def test_the_audit_passes_on_a_gpu(model, masters) -> None:
    case = make_case(
        "1f1b", model, workers=2, microbatches=4, steps=4, optimizer=AdamW(lr=0.01), sizes=(8,), type_="gpu"
    )
    case = in_precision(case, Precision(compute="bf16", masters=masters))
    verdict = judge(case.program, case.job, case.batches, case.outcome)
    assert verdict.is_passed, verdict


def test_tf32_passes_its_audit_on_a_gpu() -> None:
    case = make_case("1f1b", "mlp", workers=2, microbatches=4, steps=4, optimizer=ADAMW, sizes=(8,), type_="gpu")
    case = in_precision(case, Precision(compute="tf32"))
    before = torch.backends.cuda.matmul.allow_tf32
    verdict = judge(case.program, case.job, case.batches, case.outcome)
    assert verdict.is_passed, verdict
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_fp16_leaves_overflows_out_on_a_gpu() -> None:
    case = make_case(
        "1f1b", "mlp", workers=2, microbatches=2, steps=1, rounds=6, optimizer=AdamW(lr=0.01, eps=1e-4), clip="global",
        sizes=(4,), type_="gpu",
    )  # fmt: skip
    case = replace(case, plan=case.plan.replace(precision=Precision(compute="fp16", masters="fp32")))
    case.job.__dict__["loss"] = lambda output, target: (
        64 * torch.nn.functional.cross_entropy(output, target, reduction="sum")
    )
    skipped = {step for log in case.outcome.logs for step in log.skipped}
    assert skipped == set(range(1, len(skipped) + 1))
    assert 0 < len(skipped) < 6
    verdict = judge(case.program, case.job, case.batches, case.outcome)
    assert verdict.is_passed, verdict
