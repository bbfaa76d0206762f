import gc

import pytest

from pipedejavu.facts import MEMORY_CLASSES, FaultsError, MemoryCurve, Span, Timeline, WorkerSummary, paused_collector


def timeline() -> Timeline:
    curve = MemoryCurve(
        memory="device",
        capacity_bytes=100,
        times_s=(0.0, 1.0),
        classes=dict.fromkeys(MEMORY_CLASSES, (1.0, 0.5)),
        peak_bytes=6.0,
        peak_classes=dict.fromkeys(MEMORY_CLASSES, 1.0),
    )
    summary = WorkerSummary(
        worker=0,
        device="g",
        busy_s=2.0,
        peak_bytes=6.0,
        peak_live_microbatches=1,
        weight_versions=1,
        memory=(curve,),
    )
    return Timeline(
        origin="predicted",
        makespan_s=3.0,
        bubble_fraction=1 / 3,
        workers=(summary,),
        worker=(0, 0),
        lane=("compute", "compute"),
        action=("F0.0@0", "B0.0@0"),
        start_s=(0.0, 1.0),
        end_s=(1.0, 3.0),
    )


def test_rows() -> None:
    assert list(timeline().spans()) == [
        Span(0, "compute", "F0.0@0", 0.0, 1.0),
        Span(0, "compute", "B0.0@0", 1.0, 3.0),
    ]
    assert len(timeline()) == 2


def test_round_trip() -> None:
    found = timeline()
    assert Timeline.from_json(found.to_json()) == found
    assert Timeline.from_json(found.to_json(indent=None).encode()) == found


def test_an_empty_timeline() -> None:
    empty = timeline().replace(workers=(), worker=(), lane=(), action=(), start_s=(), end_s=())
    assert len(empty) == 0
    assert list(empty.spans()) == []
    assert Timeline.from_json(empty.to_json()) == empty


def test_columns_have_one_length() -> None:
    text = timeline().to_json(indent=None).replace('"start_s":[0.0,1.0]', '"start_s":[0.0]')
    with pytest.raises(FaultsError) as caught:
        Timeline.from_json(text, source="t.json")
    assert str(caught.value) == ("t.json: the columns differ in length: worker 2, lane 2, action 2, start_s 1, end_s 2")


def test_the_origin_is_one_of_two() -> None:
    with pytest.raises(FaultsError) as caught:
        Timeline.from_json(timeline().to_json().replace("predicted", "predict"))
    assert str(caught.value) == "timeline: origin: 'predict' is not one of its values; did you mean 'predicted'?"


def test_the_collector_runs_again_after_a_pause() -> None:
    def fail_in_a_pause() -> None:
        with paused_collector():
            assert not gc.isenabled()
            with paused_collector():
                pass
            assert not gc.isenabled()
            raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fail_in_a_pause()
    assert gc.isenabled()


def test_actions_end_after_they_start_on_a_worker_that_is_there() -> None:
    text = timeline().to_json(indent=None).replace('"end_s":[1.0,3.0]', '"end_s":[1.0,0.5]')
    with pytest.raises(FaultsError) as caught:
        Timeline.from_json(text.replace('"worker":[0,0]', '"worker":[0,7]'))
    assert caught.value.faults == (
        "worker 7 has actions but no summary",
        "action 'B0.0@0' ends at 0.5 s, before it starts at 1.0 s",
    )
