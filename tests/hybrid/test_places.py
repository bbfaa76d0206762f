"""Every place that a unit's state can have, mixed at random; and lanes that are late or fail."""

import copy
import random
import time
from typing import Any

import pytest
import torch

from pipedejavu.hybrid import state_placer
from pipedejavu.hybrid.hybrid_adamw import HybridAdamW
from pipedejavu.hybrid.placement import Placement, host_bytes
from pipedejavu.optim.native import HostUpdate

UNITS = 6
STEPS = 8


def placed(monkeypatch: pytest.MonkeyPatch, places: list[str], arrivals: dict[int, tuple[int, ...]]) -> None:
    """Gives these places to the next optimizers; streamed state that no arrival names is fetched for its update."""

    def choose(units: Any, *_: object) -> Placement:
        total = host_bytes(units, places)  # type: ignore[arg-type]
        no_shadow = (False,) * len(places)
        return Placement(
            places=tuple(places), has_shadow=no_shadow, gpu_bytes=0, host_bytes=total, reasons=(), arrivals=arrivals
        )  # type: ignore[arg-type]

    monkeypatch.setattr(state_placer, "choose_placement", choose)


def check(lab: Any, bits: Any, compare: Any, dtype: torch.dtype, clip_norm: float | None, **options: Any) -> None:
    model = lab.net(dtype)
    optimizer = lab.hybrid(model, clip_norm=clip_norm, **options)
    lab.train(model, optimizer, range(STEPS))
    compare(bits(optimizer, model), lab.plain_bits(dtype, clip_norm, STEPS, options.get("moments", "fp32")))


@pytest.mark.parametrize(
    ("seed", "moments"), [*((seed, "fp32") for seed in range(8)), (0, "bf16"), (1, "int8"), (2, "int8"), (3, "int8")]
)
def test_any_mix_of_places_agrees_bit_for_bit(
    seed: int, moments: str, lab: Any, bits: Any, compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    clip_norm = draw.choice([0.5, 1e9])
    places = [draw.choice(["gpu", "visit", "host", "lean"]) for _ in range(UNITS)]
    streamed = [n for n, place in enumerate(places) if place == "visit"]
    arrivals: dict[int, tuple[int, ...]] = {}
    for n in streamed:
        if draw.random() < 0.7:
            after = draw.randrange(UNITS)
            arrivals[after] = (*arrivals.get(after, ()), n)
    placed(monkeypatch, places, arrivals)
    check(lab, bits, compare, draw.choice([torch.bfloat16, torch.float32]), clip_norm, moments=moments)
    (optimizer,) = lab.made
    placer = optimizer.scheduler.placer
    streamed_bytes = sum(streamed.slab.size_bytes for streamed in placer.streamed.values())
    slabs = [
        *placer.staging._slabs,
        *(slab for unit_state in optimizer.scheduler.unit_states for slab in unit_state._slabs),
    ]
    assert streamed_bytes + sum(slab.size_bytes for slab in slabs) == optimizer.plan.host_bytes


@pytest.mark.parametrize("places", [["lean"] * 6, ["gpu", "lean", "host", "lean", "lean", "gpu"]])
def test_units_without_a_copy_of_their_weights_agree_without_clipping(
    places: list[str], lab: Any, bits: Any, compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed(monkeypatch, places, {})
    check(lab, bits, compare, torch.bfloat16, None)


DELAYED = ["host", "fetch", "arrive", "leave", "copy-in", "copy-out"]


@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e9])
def test_late_lanes_give_the_same_bits(
    clip_norm: float | None, window: int | None, lab: Any, bits: Any, compare: Any
) -> None:
    draw = random.Random(3)
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=clip_norm, gpu_units=2, window=window)
    for lane in optimizer._lanes.all:
        assert lane.name in DELAYED
        lane.delay = lambda: time.sleep(draw.choice([0, 0, 0.001, 0.004]))
    lab.train(model, optimizer, range(STEPS))
    compare(bits(optimizer, model), lab.plain_bits(torch.bfloat16, clip_norm, STEPS))


@pytest.mark.parametrize("name", DELAYED)
def test_each_late_lane_alone_gives_the_same_bits(
    name: str, lab: Any, bits: Any, compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed(monkeypatch, ["gpu", "visit", "visit", "host", "lean", "host"], {4: (1,), 3: (2,)})
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=1e9)
    (late,) = (lane for lane in optimizer._lanes.all if lane.name == name)
    late.delay = lambda: time.sleep(0.003)
    lab.train(model, optimizer, range(STEPS))
    compare(bits(optimizer, model), lab.plain_bits(torch.bfloat16, 1e9, STEPS))


def test_a_gradient_of_nan_is_left_out_though_its_norm_comes_late(
    lab: Any, bits: Any, compare: Any, plain_optimizer: Any
) -> None:
    """The copy of a norm may still wait when the step has ended."""

    def loop(lab: Any, model: Any, optimizer: Any) -> None:
        for n in range(4):
            loss = model.loss(lab.tokens(n))
            (loss * (float("nan") if n == 2 else 1.0)).backward()
            optimizer.step()

    first, second = lab.net(), lab.net()
    reference, hybrid = plain_optimizer(first, clip_norm=None), lab.hybrid(second, gpu_units=0, window=None)
    loop(lab, first, reference)
    hybrid._lanes.copy_out.delay = lambda: time.sleep(0.01)
    loop(lab, second, hybrid)
    compare(bits(reference, first), bits(hybrid, second))
    assert hybrid.num_skipped == 1


class BrokenError(Exception):
    pass


def fail() -> None:
    raise BrokenError("the lane broke")


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_what_a_lane_raises_reaches_the_caller(
    name: str, clip_norm: float | None, lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lab.net()
    if name in ("arrive", "leave"):
        placed(monkeypatch, ["gpu", "visit", "visit", "host", "lean", "host"], {4: (1,), 3: (2,)})
        clip_norm = 1.0
    optimizer = lab.hybrid(model, clip_norm=clip_norm, gpu_units=0, window=1 if name == "fetch" else None)
    lab.made.clear()  # a broken optimizer cannot end its work
    lab.train(model, optimizer, range(2))
    (broken,) = (lane for lane in optimizer._lanes.all if lane.name == name)
    broken.delay = fail
    with pytest.raises(BrokenError, match="the lane broke"):
        lab.train(model, optimizer, range(2, 4))
    optimizer._lanes.close()


def test_what_an_update_raises_reaches_the_caller(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab.net()
    optimizer = lab.hybrid(model, clip_norm=1.0, gpu_units=0)
    lab.made.clear()
    lab.train(model, optimizer, range(2))
    monkeypatch.setattr(HostUpdate, "__call__", lambda *_: fail())
    with pytest.raises(BrokenError, match="the lane broke"):
        lab.train(model, optimizer, range(2, 5))
    optimizer._lanes.close()


def test_gradients_that_leave_early_keep_copies_of_weights_only_while_the_host_has_room_for_all() -> None:
    """In the first backward pass units go to the host from the last on, before a placement is chosen."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)))
    trained, plans = [], []
    for budget in ("auto", None):
        other = copy.deepcopy(model).bfloat16()
        if budget is None:  # room for the copies of two units of four, and for the two buffers of the others
            sizes = plans[0][1]
            budget = sum(size.no_copy_bytes for size in sizes) + 4 * max(size.gradient_bytes for size in sizes)
        optimizer = HybridAdamW(other, lr=1e-2, clip_norm=1.0, host_budget=budget, gpu_units=0)
        optimizer.scheduler.meter.sends_all = True
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            (other(x) - x).square().mean().backward()
            optimizer.step()
        plans.append((optimizer.plan, optimizer.scheduler.model_state.sizes))
        trained.append({name: tensor.clone() for name, tensor in other.state_dict().items()})
        optimizer.close()
    assert plans[0][0].places == ("host",) * 4
    assert plans[1][0].places == ("lean", "lean", "host", "host")
    assert plans[1][0].host_bytes <= budget
    assert not any("ran out" in reason for reason in plans[1][0].reasons)
    assert all(torch.equal(tensor, trained[1][name]) for name, tensor in trained[0].items())
