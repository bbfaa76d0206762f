"""Running out of GPU memory leads to a smaller plan and to the same bits, with a modelled GPU that refuses for real.

The modelled GPU counts the bytes of all tensors that torch's operations make, but those in host slabs, and refuses
what exceeds its cap.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipedejavu.facts import InputError
from pipedejavu.hybrid import budget
from pipedejavu.hybrid.unit_state import UnitState
from pipedejavu.runtime.device_memory import DeviceMemory

STEPS = 5


class ModelledGpu(TorchDispatchMode, DeviceMemory):
    """The memory of a GPU, played by CPU tensors of this thread."""

    def __init__(self, model: nn.Module, cap_bytes: float = float("inf")) -> None:
        super().__init__()
        self.is_gpu, self.cap_bytes, self.peak, self.most, self.num_refused = True, cap_bytes, 0, 0, 0
        self.storages: dict[int, weakref.ref[Any]] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._see(tensor)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage._cdata, weakref.ref(storage, self._forget(storage._cdata)))

    def _forget(self, key: int) -> Callable[[Any], None]:
        return lambda _: self.storages.pop(key, None) and None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        before, new = set(self.storages), [value for value in tree_leaves(output) if isinstance(value, Tensor)]
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in new:
            if tensor.untyped_storage()._cdata not in inputs:  # not a view, of a host slab for example
                self._see(tensor)
        size = sum(tensor.untyped_storage().nbytes() for tensor in new
                   if tensor.untyped_storage()._cdata in self.storages.keys() - before)  # fmt: skip
        if size and self.allocated_bytes() > self.cap_bytes:
            self.num_refused += 1
            text = f"CUDA out of memory. Tried to allocate {size} bytes."
            del output, new, args, kwargs, tensor
            raise torch.OutOfMemoryError(text)
        self.peak, self.most = (max(most, self.allocated_bytes()) for most in (self.peak, self.most))
        return output

    def allocated_bytes(self) -> int:
        alive = [storage for reference in list(self.storages.values()) if (storage := reference()) is not None]
        return sum(storage.nbytes() for storage in alive)

    reserved_bytes = allocated_bytes

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.allocated_bytes()

    def release(self) -> None:
        pass

    def limit_bytes(self) -> int:
        return int(min(self.cap_bytes, 2**40))

    def cap(self, size_bytes: int) -> Callable[[], None]:
        self.cap_bytes = size_bytes
        return lambda: None


class Whole(nn.Module):
    """A model that returns its loss, with random numbers and a buffer that each forward changes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        self.count += 1
        logits = dropout(self.net(tokens).float(), 0.1)
        return scale * cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


class Fault(torch.autograd.Function):
    """Passes a value through; may refuse memory in forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, refuse: Callable[[str], None]) -> Tensor:
        ctx.refuse = refuse
        refuse("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.refuse("backward")
        return gradient, None


class Run:
    """Trains a model and returns the bits that it arrives at."""

    def __init__(self, lab: Any, bits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.bits, self.monkeypatch = lab, bits, monkeypatch
        self.optimizer: Any = None
        self.model: Any = None

    def __call__(self, cap: float | None = None, gpu: type[ModelledGpu] = ModelledGpu, uses_closure: bool = False,
                 before: Callable[[Any], None] = lambda _: None, **options: Any) -> Any:  # fmt: skip
        self.model = Whole(self.lab.net())
        self.gpu = gpu(self.model, float("inf") if cap is None else cap)
        self.monkeypatch.setattr(budget, "DeviceMemory", lambda _: self.gpu)
        before(self.model)
        torch.manual_seed(3)
        with self.gpu:
            given = {} if cap is None else {"gpu_budget": int(cap)}
            self.optimizer = self.lab.hybrid(self.model, **{"clip_norm": 0.5, "speculate": False, **given, **options})
            for n in range(STEPS):
                self.step(n, uses_closure)
        return self.bits(self.optimizer, self.model)

    def step(self, n: int, uses_closure: bool) -> None:
        tokens = self.lab.tokens(n).repeat(4, 3)

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.model(tokens)
            loss.backward()
            return loss

        if uses_closure:
            assert self.optimizer.step(closure).isfinite()
        else:
            closure()
            self.optimizer.step()


@pytest.fixture
def run(lab: Any, bits: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(lab, bits, monkeypatch)
    yield made
    lab.made[:] = [optimizer for optimizer in lab.made if optimizer.plan is not None]  # the rest has been refused


def uncapped(run: Run, **options: Any) -> tuple[Any, int]:
    bits = run(**options)
    assert run.gpu.num_refused == 0
    assert run.optimizer.shortages == []
    return bits, run.gpu.most


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [0.5, None])
@pytest.mark.parametrize("uses_closure", [False, True], ids=["loop", "closure"])
def test_a_model_trains_alike_within_each_cap_or_is_refused_in_one_sentence(
    uses_closure: bool, clip_norm: float | None, run: Run, compare: Any
) -> None:
    expected, most = uncapped(run, clip_norm=clip_norm)
    trained, with_shortage, refusals = [], 0, list[str]()
    for percent in (95, 75, 55, 40):
        cap = most * percent // 100
        try:
            actual = run(cap, clip_norm=clip_norm, uses_closure=uses_closure)
        except InputError as error:
            refusals.append(str(error))
            continue
        compare(expected, actual)
        assert run.gpu.most <= cap
        assert run.optimizer.plan.reserved_bytes <= cap
        trained.append(percent)
        with_shortage += bool(run.optimizer.shortages)
    print(f"{trained} percent of {most} bytes trained, {with_shortage} after a shortage; {len(refusals)} were refused")
    assert len(trained) >= 3
    assert with_shortage
    assert refusals
    assert all("give more" in text or "smallest gpu_budget" in text for text in refusals), refusals


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"gpu_units": 3}, {"clip_norm": None, "gpu_units": 3}, {"window": 2}, {"activations": "recompute"}],
    ids=["all", "half", "no clip", "window", "recompute"],
)
def test_refused_memory_changes_no_bit(
    options: dict[str, Any], times: int, phase: str, step: int, run: Run, compare: Any
) -> None:
    expected, _ = uncapped(run, **options)
    left = times

    def refuse(now: str) -> None:
        nonlocal left
        if now == phase and left and run.optimizer.scheduler.num_steps == step:
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    def spoil(model: Any) -> None:
        head = model.net.head
        plain = type(head).forward
        head.forward = lambda x: Fault.apply(plain(head, x), refuse)

    actual = run(before=spoil, uses_closure=phase == "backward", **options)
    compare(expected, actual)
    assert left == 0
    assert len(run.optimizer.shortages) == times
    assert f"in the {phase} pass of one of the first steps (2.5 GiB beside" in run.optimizer.shortages[0]


def test_the_backward_pass_of_a_plain_loop_is_rehearsed(run: Run, compare: Any) -> None:
    expected, _ = uncapped(run)
    left = 2

    def refuse(now: str) -> None:
        nonlocal left
        if now == "backward" and left:
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 10 bytes.")

    class Tight(ModelledGpu):
        def limit_bytes(self) -> int:
            return 1000

    def spoil(model: Any) -> None:
        plain = type(model.net.head).forward
        model.net.head.forward = lambda x: Fault.apply(plain(model.net.head, x), refuse)
        run.monkeypatch.setattr(budget.MemoryMeter, "is_tight", lambda *_: True)

    compare(expected, run(before=spoil))
    assert len(run.optimizer.shortages) == 2
    assert "gradients leave the GPU in the first backward pass" in run.optimizer.shortages[0]


def test_the_last_plan_is_refused_with_the_least_that_could_do(run: Run) -> None:
    class Refusing(ModelledGpu):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._log_softmax.default:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
            return super().__torch_dispatch__(func, types, args, kwargs)

    with pytest.raises(InputError, match=r"^the smallest plan does not fit into the GPU: it needs 3\.0 GiB beside .*"
                       r"a budget of 3\d{9} bytes is the least that could do: give more \(gpu_budget"):  # fmt: skip
        run(gpu=Refusing)
    said = run.optimizer.shortages
    expected = ["3 blocks recompute", "at most 2 blocks", "holds 1 blocks"]
    assert [what in text for what, text in zip(expected, said, strict=True)] == [True, True, True]


def test_state_that_the_gpu_refuses_rests_on_the_host(run: Run, compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = uncapped(run)
    settle, refused = UnitState.settle, 2

    def short(unit_state: UnitState, place: Any, **options: Any) -> None:
        nonlocal refused
        if place == "gpu" and unit_state.index >= 4:
            refused -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        settle(unit_state, place, **options)

    monkeypatch.setattr(UnitState, "settle", short)
    compare(expected, run())
    assert refused == 0
    plan = run.optimizer.plan
    assert plan.places == ("gpu",) * 4 + ("host",) * 2
    assert plan.host_bytes > 0
    assert any("2 units rest in a smaller place than was planned" in reason for reason in plan.reasons)


def test_host_memory_that_is_refused_leads_to_no_copies_or_to_a_sentence(
    run: Run, compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = uncapped(run, gpu_units=0)
    settle = UnitState.settle
    refused_places = ["host"]

    def short(unit_state: UnitState, place: Any, **options: Any) -> None:
        if place in refused_places and unit_state.index == 2:
            raise MemoryError("CUDA could not pin 1,000 bytes of host memory (error 2)")
        settle(unit_state, place, **options)

    monkeypatch.setattr(UnitState, "settle", short)
    monkeypatch.setattr("pipedejavu.hybrid.placement._choose_streamed", lambda *_: ({}, 0))
    compare(expected, run(gpu_units=0))
    assert run.optimizer.plan.places == ("host", "host", "lean", "host", "host", "host")
    refused_places.append("lean")
    with pytest.raises(
        InputError, match=r"^the host refused memory for the state of 'net\.blocks\.1' \(.* of .*\): CUDA could not pin"
    ):
        run(gpu_units=0)
    run.lab.made.pop()._lanes.close()


def test_the_wrapped_forward_is_the_models_own_to_others(lab: Any) -> None:
    model = Whole(lab.net())
    signature = inspect.signature(model.forward)
    optimizer = lab.hybrid(model, clip_norm=1.0)
    assert inspect.signature(model.forward) == signature
    twin = copy.deepcopy(model)
    tokens = lab.tokens(0)
    with torch.no_grad():
        twin.net.head.weight.zero_()
    uniform = pytest.approx(float(torch.tensor(11.0).log()))
    assert twin(tokens).item() == uniform
    assert model(tokens).item() != uniform
    optimizer.close()
    lab.made.clear()
    assert "forward" not in model.__dict__
