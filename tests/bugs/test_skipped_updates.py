"""Updates that are left out with `on_nan="skip"`: told of, undone in full, and not for ever.

Nothing told of them, BatchNorm's statistics became NaN, a sample of 1e30 left Adam's state infinite, and a run whose
every update was left out went on to its end.
"""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, Byzantine
from pipedejavu.engine.engine_state import take_all
from pipedejavu.engine.threads import Threads
from pipedejavu.facts import InputError
from pipedejavu.plan import Reduce
from tests.engine.case import Case, make_case


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def skipping(name: str, model: str, bad: float, **settings: object) -> Case:
    """Four updates of a preset, of which the second has one bad sample."""
    extra = {"on_nan": "skip", "max_consecutive_skips": 2}
    case = make_case(name, model, workers=2, clip="global", optimizer=AdamW(lr=0.01), extra=extra, **settings)
    case.batches.x[case.program.update_size][0] = bad
    return case


def plain_loop(case: Case, skipped: set[int], replicas: int) -> dict[str, Tensor]:
    """Trains one uncut model with torch's AdamW, without the updates that are left out.

    Each replica has buffers of its own, as the workers of data-parallel training have.
    """
    model = nn.Sequential(*(copy.deepcopy(module) for _, module in case.units))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    size = case.program.update_size
    buffers = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(replicas)]
    for update in range(len(case.batches.counts) // size):
        members = range(update * size, (update + 1) * size)
        if update in skipped:
            continue
        optimizer.zero_grad()
        for i in members:
            own = buffers[(i - members[0]) * replicas // size]
            model.load_state_dict(own, strict=False)
            output = model(case.batches.inputs(i))
            nn.functional.cross_entropy(output, case.batches.targets(i), reduction="sum").backward()
            own.update({n: b.clone() for n, b in model.named_buffers()})
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= sum(case.batches.count(i) for i in members)
        optimizer.step()
    named = {f"weight/u{n}": p.detach() for n, p in model.named_parameters()}
    for replica, own in enumerate(buffers):
        prefix = f"replica/{replica}/" if replica else ""
        named |= {f"{prefix}buffer/u{n}": b for n, b in own.items()}
    return named


@pytest.mark.parametrize(("steps", "rounds"), [(1, 4), (4, 1)])
@pytest.mark.parametrize("bad", [math.nan, 1e30])
@pytest.mark.parametrize(("name", "replicas"), [("1f1b", 1), ("ddp", 2)])
def test_weights_and_statistics_are_those_of_a_loop_without_the_update(name, replicas, bad, steps, rounds) -> None:
    case = skipping(name, "convnet", bad, microbatches=2, steps=steps, rounds=rounds)
    threads = Threads(case.program, case.job, case.batches)
    for _ in range(rounds):
        threads.run()
    found, expected = take_all(threads), plain_loop(case, {1}, replicas)
    assert found.keys() >= expected.keys()
    for full, tensor in expected.items():
        assert torch.allclose(found[full].double(), tensor.double(), rtol=0, atol=1e-5), full
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    reasons = {step: reason for own in threads.handlers for step, reason in own.log.skipped.items()}
    assert reasons.keys() == {2}
    assert " in step 2" in reasons[2]


def test_an_overflow_of_adam_is_left_out_by_all_and_replayed() -> None:
    case = skipping("1f1b", "mlp", 1e30, microbatches=2, steps=4, units=2)
    case.units[:] = [("u0", nn.Linear(5, 5)), ("u1", nn.Linear(5, 3))]
    case.batches.y[2][0] = (case.units[1][1](case.units[0][1](case.batches.x[2][0])).argmax() + 1) % 3
    assert case.audit() <= 1e-4
    assert {step for log in case.outcome.logs for step in log.skipped} == {2}
    expected = plain_loop(case, {1}, 1)
    for (piece, _), weights in case.outcome.weights.items():
        for name, weight in weights.items():
            assert torch.allclose(weight, expected[f"weight/{name}"], rtol=0, atol=1e-5), (piece, name)


@pytest.mark.parametrize("bad", [{2, 4}, {2, 3}])
def test_updates_in_a_row_that_are_left_out_stop_the_run(bad: set[int]) -> None:
    case = skipping("1f1b", "mlp", math.nan, microbatches=2, steps=4)
    for step in bad:
        case.batches.x[(step - 1) * case.program.update_size][0] = math.nan
    threads = Threads(case.program, case.job, case.batches)
    if bad == {2, 4}:
        threads.run()
        return
    said = (
        r"2 updates in a row were left out \(--max-consecutive-skips 2\), the last because the .* in step 3.* lower the"
    )
    with pytest.raises(InputError, match=said):
        threads.run()


def test_a_server_that_can_trust_no_contribution_tells_of_the_update() -> None:
    """Zeno drops contributions whose square Adam cannot hold, as it drops those that are no numbers."""
    extra = {"on_nan": "skip", "byzantine": Byzantine(1, "scale", 1e30)}
    reduce = Reduce(wire="server", gate="barrier", combiner="score-trim")
    settings = {"workers": 3, "microbatches": 1, "steps": 3, "optimizer": AdamW(lr=0.01)}
    case = make_case("zeno", **settings, extra=extra, reduce=reduce)
    for number in range(3, 6):
        case.batches.x[number][0] = math.nan
    assert all(bool(w.isfinite().all()) for weights in case.outcome.weights.values() for w in weights.values())
    skipped = {step: reason for log in case.outcome.logs for step, reason in log.skipped.items()}
    assert skipped == {2: "no contribution to step 2 has a score that is a number"}
    assert case.audit() <= 1e-4
