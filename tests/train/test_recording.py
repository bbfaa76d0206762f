"""The record of a hybrid run: spans of a tiny model on CPU stand-ins, numbered by step."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.train import HybridRun, read_run
from pipedejavu.train.recording import LANES, RecordedUnit

NUM_BLOCKS, NUM_STEPS = 4, 3


def train(**settings: object) -> tuple[HybridAdamW, HybridRun]:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(NUM_BLOCKS))
    model = nn.Sequential(nn.Linear(8, 16), nn.ModuleList(blocks), nn.Linear(16, 4)).bfloat16()
    stem, body, head = model

    def step(x: Tensor) -> None:
        x = stem(x)
        for block in body:
            x = block(x)
        head(x).float().pow(2).mean().backward()
        optimizer.step()

    optimizer = HybridAdamW(model, lr=1e-2, host_threads=1, **settings)  # type: ignore[arg-type]
    for _ in range(2):
        step(torch.randn(4, 8).bfloat16())
    recorder = optimizer.record()
    for _ in range(NUM_STEPS):
        step(torch.randn(4, 8).bfloat16())

    optimizer.synchronize()
    return optimizer, read_run(optimizer, recorder.finish())


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("gpu_units", [0, 2, NUM_BLOCKS + 2])
def test_every_unit_has_its_work_in_every_step(gpu_units: int, clip_norm: float | None) -> None:
    optimizer, run = train(gpu_units=gpu_units, clip_norm=clip_norm, speculate=False)
    assert run.num_steps == NUM_STEPS
    assert run.is_clipped == (clip_norm is not None)
    steps = range(1, NUM_STEPS + 1)
    found = {(work.kind, work.unit, work.step) for work in run.work}
    for n, unit in enumerate(run.units):
        for step in steps:
            assert ("F", n, step) in found
            moves = {(kind, n, step) for kind in ("OFFLOAD:d", "UPDATE", "FETCH:w")}
            assert (moves <= found) if unit.place == "host" else not (moves & found)
            assert (("FETCH:o", n, step) in found) == (("OFFLOAD:o", n, step) in found) == (unit.place == "visit")
    assert [unit.place for unit in run.units[:gpu_units]] == ["gpu"] * gpu_units
    assert sum(unit.num_parameters for unit in run.units) == sum(p.numel() for p in optimizer.flow.members)
    optimizer.close()


def test_nothing_of_the_lanes_is_lost_but_what_the_step_before_left() -> None:
    optimizer, run = train(gpu_units=0, clip_norm=0.1, speculate=False)
    spans = Counter(action for lane, action, _, _ in run.spans if lane in LANES)
    kept = Counter(work.kind + str(work.unit) + "~host" * (work.kind == "UPDATE") for work in run.work)
    assert not kept - spans
    left = spans - kept
    assert all(action[:3] in ("UPD", "FET", "OFF") for action in left)
    assert all(count == 1 for action, count in left.items() if action.startswith("UPDATE"))
    timeline = run.timeline()
    assert len(timeline) == len(run.work)
    assert set(timeline.lane) == {lane for lane, _, _, _ in run.spans} & set(LANES)
    optimizer.close()


def test_a_run_comes_back_from_json() -> None:
    optimizer, run = train(gpu_units=1, clip_norm=0.1, speculate=False)
    assert HybridRun.from_json(run.to_json()) == run
    optimizer.close()


def made(*spans: tuple[str, str, float, float], places: str = "h") -> HybridRun:
    names = {"g": "gpu", "h": "host", "v": "visit"}
    units = tuple(
        RecordedUnit.model_validate(
            {"name": "unit", "place": names[p], "num_parameters": 10, "weight_bytes": 20, "gradient_bytes": 20,
             "state_bytes": 100}
        )
        for p in places
    )  # fmt: skip
    return HybridRun(units=units, spans=spans, is_clipped=True)


STEP = (("compute", "F0", 1.0, 2.0), ("compute", "F0", 5.0, 6.0))


def test_an_update_begins_when_its_gradient_is_there() -> None:
    early = ("host", "UPDATE0~host", 0.5, 3.0)  # taken up before the GPU came to the forward
    run = made(*STEP, early, ("copy-out", "OFFLOAD:d0", 2.0, 2.5), ("host", "UPDATE0~host", 6.0, 7.0))
    updates = [(w.action, w.start_s, w.end_s) for w in run.work if w.kind == "UPDATE"]
    assert updates == [("UPDATE0@2~host", 2.5, 3.0), ("UPDATE0@3~host", 6.0, 7.0)]


def test_state_that_leaves_in_the_next_forward_belongs_to_the_visit_before() -> None:
    run = made(
        *STEP, ("copy-out", "OFFLOAD:o0", 1.1, 1.2), ("copy-in", "FETCH:o0", 3.0, 4.0),
        ("copy-out", "OFFLOAD:o0", 5.1, 5.9), places="v",
    )  # fmt: skip
    assert [w.action for w in run.work if w.lane != "compute"] == ["FETCH:o0@1", "OFFLOAD:o0@2"]


def test_a_single_step_is_refused() -> None:
    with pytest.raises(InputError, match=r"^1 steps were recorded, and a step's length needs 2; record more$"):
        _ = made(STEP[0]).num_steps


def test_a_recording_without_the_last_updates_is_refused() -> None:
    with pytest.raises(InputError, match=r"^1 of 1 updates of the last step are not in .*; call the optimizer's sync"):
        _ = made(*STEP).num_steps


def test_a_span_of_a_missing_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="spans name unit 3, and there are 1"):
        made(("compute", "F3", 0.0, 1.0))


def test_an_optimizer_without_a_step_is_refused() -> None:
    optimizer = HybridAdamW(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"^the optimizer has made no step yet; train a few, then record$"):
        read_run(optimizer, [])
    optimizer.close()
