"""Published numbers: makespans, peaks and versions at 4 workers and 8 microbatches, F = 1 and B = 2.

And the program text of every preset at a small size, in programs/. Run with PDV_UPDATE_GOLDENS=1 to write those
again; the change then shows in the diff.
"""

import os
from pathlib import Path

import pytest

from pipedejavu.analysis import verify
from pipedejavu.plan import preset, presets
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import Prediction, parse_unit_costs, simulate, unit_costs

PROGRAMS = Path(__file__).parent / "programs"


def predict(name: str, costs: str = "F=1,B=2", *, microbatches: int = 8, **sizes: int) -> Prediction:
    found = preset(name)
    workers = None if found.grows == "none" else 4
    plan = found.at(workers=workers, microbatches=microbatches, **sizes)
    program = compile_plan(*unit_costs(plan, parse_unit_costs(costs)))
    return simulate(program, verify(program))


def peaks(prediction: Prediction) -> list[int]:
    return [w.peak_live_microbatches for w in prediction.workers]


def versions(prediction: Prediction) -> list[int]:
    return [w.weight_versions for w in prediction.workers]


TABLE = {
    # name: (makespan, peak live microbatches or half-chunks)
    "gpipe": (33, [8, 8, 8, 8]),
    "gpipe-recompute": (44, [8, 8, 8, 8]),
    "1f1b": (33, [4, 3, 2, 1]),
    "chimera": (30, [3, 4, 4, 3]),
    "interleaved": (28.5, [11, 9, 7, 5]),
    "zb-h1": (27, [4, 4, 4, 4]),
    "zb-v": (25.5, [8, 8, 8, 8]),
    "dualpipe-v": (25.5, [9, 9, 9, 9]),
    "gems": (75, [1, 1, 1, 1]),
    "gems-master": (75, [1, 1, 1, 1]),
    "model-parallel": (96, [1, 1, 1, 1]),
    "axonn": (33, [4, 4, 4, 1]),
}


@pytest.mark.parametrize("name", TABLE)
def test_makespan_and_peaks_are_the_published_ones(name):
    makespan, live = TABLE[name]
    prediction = predict(name)
    assert prediction.makespan_s == makespan
    if name == "dualpipe-v":
        assert max(peaks(prediction)) == 9  # a bound over all workers
    else:
        assert peaks(prediction) == live
    assert [w.busy_s for w in prediction.workers] == [32.0 if name == "gpipe-recompute" else 24.0] * 4
    busy = 32 if name == "gpipe-recompute" else 24
    assert prediction.bubble_fraction == pytest.approx(1 - busy / makespan)


def test_the_bubble_of_gpipe_is_p_minus_1_over_m_plus_p_minus_1():
    assert predict("gpipe").bubble_fraction == pytest.approx(3 / 11)


def test_chimera_beats_1f1b_at_equal_costs():
    assert predict("chimera", "F=1,B=1").makespan_s == 18
    assert predict("1f1b", "F=1,B=1").makespan_s == 22


def test_the_bubble_of_zb_h1_is_p_minus_1_times_f_plus_i_minus_w():
    # Where a weight half fits beside a forward; a longer one delays the stages before it.
    for forward, first, second in ((1, 1, 1), (2, 3, 1), (2, 2, 2), (3, 1, 1), (1.5, 1.25, 1)):
        prediction = predict("zb-h1", f"F={forward},I={first},W={second}")
        work = 8 * (forward + first + second)
        assert prediction.makespan_s == work + 3 * (forward + first - second)


def test_each_worker_of_zb_v_spans_exactly_its_work():
    prediction = predict("zb-v")
    for index in range(4):
        spans = [s for s in prediction.timeline().spans() if s.worker == index and s.lane == "compute"]
        spans = [s for s in spans if not s.action.startswith("UPDATE")]
        assert max(s.end_s for s in spans) - min(s.start_s for s in spans) == 24


def test_pipedream_keeps_p_minus_s_versions_and_vertical_sync_p_everywhere():
    assert versions(predict("pipedream")) == [4, 3, 2, 1]
    assert versions(predict("pipedream-vertical")) == [4, 4, 4, 4]


def test_2bw_keeps_two_versions():
    # The last stage reads the older buffer like all others, so it too holds two.
    assert versions(predict("pipedream-2bw")) == [2, 2, 2, 2]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-v", "chimera", "ddp", "zero-2", "axonn"])
def test_synchronous_presets_keep_one_version(name):
    assert set(versions(predict(name))) == {1}


def test_pipedream_keeps_the_pipeline_full():
    # No flush: 8 microbatches fill and drain once, as 1F1B does for one batch.
    assert predict("pipedream").makespan_s == 33
    # Three batches of 2BW in one go: 24 microbatches behind one ramp.
    assert predict("pipedream-2bw", steps=3).makespan_s == (24 + 3) * 3
    assert predict("1f1b", steps=3).makespan_s == 3 * 33


@pytest.mark.parametrize("name", presets())
def test_the_text_of_each_program_is_the_recorded_one(name):
    found = preset(name)
    plan = found.at(workers=None if found.grows == "none" else 2, microbatches=4)
    program = compile_plan(*unit_costs(plan, {}), fold=False)
    verify(program)
    path = PROGRAMS / f"{name}.txt"
    if os.environ.get("PDV_UPDATE_GOLDENS") == "1":
        PROGRAMS.mkdir(exist_ok=True)
        path.write_text(program.to_text(), encoding="utf-8")
    assert program.to_text() == path.read_text(encoding="utf-8")


def test_each_recorded_program_belongs_to_a_preset():
    assert {path.stem for path in PROGRAMS.glob("*")} == set(presets())
