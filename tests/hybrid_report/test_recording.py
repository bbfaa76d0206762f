"""The record of a hybrid run: spans of a tiny model on CPU stand-ins, numbered by step."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from pipedejavu.facts import InputError
from pipedejavu.hybrid import HybridAdamW
from pipedejavu.hybrid_report import HybridRun, read_run
from pipedejavu.hybrid_report.recording import LANES, LaneWork, RecordedUnit

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
            assert ("B", n, step) in found
            moves = {(kind, n, step) for kind in ("OFFLOAD:d", "UPDATE~host", "FETCH:w")}
            assert (moves <= found) if unit.place == "host" else not (moves & found)
            assert (("UPDATE", n, step) in found) == (unit.place in ("gpu", "visit"))
            assert (("FETCH:o", n, step) in found) == (("OFFLOAD:o", n, step) in found) == (unit.place == "visit")
    assert [unit.place for unit in run.units[:gpu_units]] == ["gpu"] * gpu_units
    assert sum(unit.num_parameters for unit in run.units) == sum(
        p.numel() for p in optimizer.scheduler.model_state.params
    )
    optimizer.close()


def test_nothing_of_the_lanes_is_lost_but_what_the_step_before_left() -> None:
    optimizer, run = train(gpu_units=0, clip_norm=0.1, speculate=False)
    spans = Counter(action for lane, action, _, _ in run.spans if lane in LANES)
    kept = Counter(_recorded_name(work) for work in run.work)
    assert not kept - spans
    # Moments that follow the weights are recorded, but the program of a review has whole updates only.
    left = Counter({action: n for action, n in (spans - kept).items() if not action.endswith("~moments")})
    assert all(action[:3] in ("UPD", "FET", "OFF", "wai", "loo") for action in left)
    assert len(run.everything) == sum(spans.values())
    assert all(count == 1 for action, count in left.items() if action.startswith("UPDATE"))
    timeline = run.timeline()
    assert len(timeline) == len(run.work)
    assert set(timeline.lane) == {lane for lane, _, _, _ in run.spans} & set(LANES)
    optimizer.close()


def _recorded_name(work: LaneWork) -> str:
    kind, _, place = work.kind.partition("~")
    return kind if kind == "loop" else f"{kind}{work.unit}" + (f"~{place}" if place else "")


def test_the_compute_lane_has_no_gaps_between_its_spans() -> None:
    optimizer, run = train(gpu_units=1, clip_norm=0.1, speculate=False)
    compute = [(start, end) for lane, _, start, end in run.spans if lane == "compute"]
    assert all(before[1] == after[0] for before, after in pairwise(compute))
    optimizer.close()


@pytest.mark.parametrize("window", [1, 2])
def test_weights_that_come_through_a_window_are_told_apart(window: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), "head": nn.Linear(8, 2)})
    optimizer = HybridAdamW(model, lr=1e-2, host_threads=1, clip_norm=0.1, window=window, speculate=False)
    recorder = None
    for n in range(5):
        if n == 2:
            recorder = optimizer.record()
        x = torch.randn(4, 8)
        for block in model["blocks"]:
            x = block(x).tanh()
        model["head"](x).pow(2).mean().backward()
        optimizer.step()
    optimizer.synchronize()
    assert recorder is not None
    run = read_run(optimizer, recorder.finish())
    optimizer.close()
    assert run.places == ("window",) * 4 + ("device",)
    names = Counter(work.action for work in run.work if work.kind == "FETCH:w")
    # once for the forward of a step, and once for its backward but where the block is still there
    stays = {1: {3}, 2: {2, 3}}[window]
    for block in range(4):
        assert [names[f"FETCH:w{block}@{step}"] for step in (2, 3)] == [1 if block in stays else 2] * 2
    assert {work.unit for work in run.everything if work.kind == "wait"} == set(range(5))


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
    updates = [(w.action, w.start_s, w.end_s) for w in run.work if w.kind == "UPDATE~host"]
    assert updates == [("UPDATE0@2~host", 2.5, 3.0), ("UPDATE0@3~host", 6.0, 7.0)]


def test_a_host_clock_that_is_ahead_is_set_by_the_weights_that_an_update_sends() -> None:
    updates = [("host", "UPDATE0~host", n + 0.5, n + 1.0) for n in (3.0, 7.0, 11.0)]
    fetches = [("copy-in", "FETCH:w0", n, n + 0.1) for n in (3.75, 7.75, 11.25)]  # the last update noted its end late
    run = made(*STEP, ("compute", "F0", 9.0, 10.0), *updates, *fetches)
    found = [(w.start_s, w.end_s) for w in run.work if w.kind == "UPDATE~host"]
    assert found == [(3.25, 3.75), (7.25, 7.75), (11.25, 11.25)]


def test_copies_of_one_lane_run_one_after_the_other() -> None:
    run = made(*STEP, ("copy-in", "FETCH:o0", 3.0, 3.5), ("copy-in", "FETCH:o0", 3.2, 4.0), places="v")
    assert [(w.start_s, w.end_s) for w in run.work if w.lane == "copy-in"] == [(3.0, 3.5), (3.5, 4.0)]


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
