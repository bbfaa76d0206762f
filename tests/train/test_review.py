"""Prediction beside measurement of hybrid runs, recorded on CPU stand-ins or written by hand."""

import json

import pytest

from pipedejavu.facts import InputError
from pipedejavu.program import compile, parse_action, verify  # noqa: A004
from pipedejavu.simulate import simulate
from pipedejavu.train import HybridRun, review
from pipedejavu.train.review import machine_of, plan_of, profile_of
from tests.train.test_recording import train


def written(places: list[str], *, clips: bool = True, steps: int = 4, update_s: float = 3.0) -> HybridRun:
    """A run whose forwards take 1, backwards 2, copies 0.25 and host updates 3 seconds, on lanes that never wait."""
    spans, count, now = [], len(places), 0.0
    for _ in range(steps):
        for n in range(count):
            spans.append(("compute", f"F{n}", now, now + 1))
            now += 1
        for n in reversed(range(count)):
            spans.append(("compute", f"B{n}", now, now + 2))
            now += 2
            if places[n] == "host":
                spans.append(("copy-out", f"OFFLOAD:d{n}", now, now + 0.25))
        for n in range(count):
            if places[n] == "host":
                spans.append(("host", f"UPDATE{n}~host", now + 1, now + 1 + update_s))
                spans.append(("copy-in", f"FETCH:w{n}", now + 1 + update_s, now + 1.25 + update_s))
        now += 2 + update_s
    size = {"num_parameters": 10, "weight_bytes": 20, "gradient_bytes": 20, "state_bytes": 100}
    units = [{"name": f"unit{n}", "place": place, **size} for n, place in enumerate(places)]
    return HybridRun.model_validate(
        {"units": units, "spans": spans, "is_clipped": clips, "gpu_bytes": 10**6, "host_bytes": 10**6}, strict=False
    )


def test_the_program_of_a_run_is_sound() -> None:
    verify(review(written(["gpu", "host", "host"])).program)


def test_a_step_waits_for_the_host_alone_where_it_is_slow() -> None:
    found = review(written(["gpu", "host", "host", "host"], update_s=30.0))
    # behind the last backward and the copy of its gradient: three updates, and the way of the last weights
    between = found.program.profile.units[0].times["gpu"].update_s
    updates = 3 * 30.0 + 0.25
    assert found.predicted_step_s == pytest.approx(4 * 2.0 + updates + 1.0)
    assert between < updates


def test_a_step_is_compute_alone_where_the_forward_hides_the_host() -> None:
    found = review(written(["gpu"] * 6 + ["host"], update_s=0.5))
    (between,) = {u.times["gpu"].update_s for u in found.program.profile.units[:6]}
    assert found.predicted_step_s == pytest.approx(7 * 3.0 + 6 * between)
    assert 6 * between == pytest.approx(2.5)
    assert found.measured_step_s == pytest.approx(7 * 3.0 + 2.5)


def test_without_clipping_updates_begin_in_the_backward_pass() -> None:
    places = ["host"] * 4
    waits = review(written(places, update_s=2.0)).predicted_step_s
    begins = review(written(places, clips=False, update_s=2.0)).predicted_step_s
    assert begins == pytest.approx(4 * 3.0 + 0.25 + 2.0 + 0.25)  # all but the last update hide
    assert waits == pytest.approx(4 * 2.0 + 0.25 + 4 * 2.0 + 0.25 + 1.0)


def test_another_placement_can_be_predicted_from_a_run() -> None:
    run = written(["gpu", "gpu", "host", "host"], update_s=3.0)
    plan = plan_of(run)
    plan = plan.but(keep=plan.keep.but(device_pieces=0))
    prediction = simulate(compile(plan, profile_of(run), machine_of(run)))
    starts = [s.start_s for s in prediction.timeline().spans() if s.action.startswith("F0.")]
    assert starts[-1] - starts[-2] == pytest.approx(4 * 2.0 + 0.25 + 4 * 3.0 + 0.25 + 1.0)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_identities_and_lanes_of_a_real_run_join(clip_norm: float | None) -> None:
    optimizer, run = train(gpu_units=2, clip_norm=clip_norm, speculate=False)
    optimizer.close()
    found = review(run)
    lanes = dict(zip(found.predicted.action, found.predicted.lane, strict=True))
    measured = {a: lane for a, lane in zip(found.measured.action, found.measured.lane, strict=True) if ":o" not in a}
    assert measured.items() <= lanes.items()
    others = {parse_action(action) for action in lanes.keys() - measured.keys()}
    last = len(run.units) - 1
    assert all(a.lane == "compute" and (a.kind == "UPDATE" or (a.kind, a.piece) == ("B", last)) for a in others)
    assert found.predicted.makespan_s > 0


def test_what_is_not_modelled_is_said() -> None:
    run = written(["gpu", "visit", "host", "lean"])
    spans = (
        *run.spans,
        *((lane, action.replace("2", "3"), s, e) for lane, action, s, e in run.spans if lane == "host"),
    )
    notes = review(run.but(spans=spans)).notes
    assert any("visits the GPU" in note and "units: 1" in note for note in notes)
    assert any("asks the GPU" in note and "units: 1" in note for note in notes)


def test_a_review_prints_kinds_by_lane_and_the_step() -> None:
    run = written(["gpu", "visit", "host"])
    visits = [("copy-in", "FETCH:o1", w.end_s, w.end_s + 0.5) for w in run.work if w.action.startswith("B1.")]
    found = review(run.but(spans=(*run.spans, *visits)))
    lines = [line.split() for line in str(found).splitlines()]
    assert [line[:2] for line in lines[1:9]] == [
        ["compute", "B"], ["compute", "F"], ["compute", "UPDATE"], ["copy-out", "OFFLOAD"], ["host", "UPDATE"],
        ["copy-in", "FETCH"], ["copy-in", "FETCH:o"], ["step", lines[8][1]],
    ]  # fmt: skip
    # a step's 20 bytes of weights and 100 of state came in 0.75 s, so the weights alone should in 0.125
    assert lines[6] == ["copy-in", "FETCH", "500", "ms", "1", "s", "0.500"]
    assert lines[7] == ["copy-in", "FETCH:o", "–", "2", "s", "–"]
    assert found.unmodelled() == {("copy-in", "FETCH:o"): pytest.approx(2.0)}


def test_a_page_holds_both_timelines() -> None:
    found = review(written(["gpu", "host"]))
    page = found.html("a run")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [worker["device"] for worker in data["workers"]] == ["predicted", "measured"]
    for worker, timeline in zip(data["workers"], (found.predicted, found.measured), strict=True):
        drawn = [bar[0] for lane in worker["lanes"] for bar in lane["bars"]]
        assert sorted(drawn) == sorted(s.action for s in timeline.spans() if s.end_s > s.start_s)


def test_a_window_is_refused() -> None:
    with pytest.raises(InputError, match=r"^the run has a window of 2 blocks, whose weights come and go; only runs"):
        review(written(["gpu", "host"]).but(window=2))


def test_microbatches_are_refused() -> None:
    with pytest.raises(InputError, match=r"^a step has 3 backward passes, .* record with microbatches=1$"):
        review(written(["gpu", "host"]).but(microbatches=3))


def test_places_out_of_order_are_refused() -> None:
    with pytest.raises(InputError, match=r"^the places of the units are host, gpu; only 'gpu' before 'host'"):
        review(written(["host", "gpu"]))
