"""Prediction beside measurement of hybrid runs, recorded on CPU stand-ins or written by hand."""

import json

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import InputError
from pipedejavu.hybrid_report import HybridRun, review
from pipedejavu.hybrid_report.review import machine_of, plan_of, profile_of
from pipedejavu.program import compile  # noqa: A004
from pipedejavu.simulate import simulate
from tests.hybrid_report.test_recording import train


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
        there = now + 1 + update_s
        for n in (n for n in range(count) if places[n] == "host"):
            spans.append(("host", f"UPDATE{n}~host", now + 1, now + 1 + update_s))
            spans.append(("copy-in", f"FETCH:w{n}", there, there + 0.25))
            there += 0.25
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
    # after the last backward and the copy of its gradient: three updates, and the copy of the last weights
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
    plan = plan.replace(keep=plan.keep.replace(places=("host",) * 4))
    prediction = simulate(compile(plan, profile_of(run), machine_of(run)))
    starts = [s.start_s for s in prediction.timeline().spans() if s.action.startswith("F0.")]
    assert starts[-1] - starts[-2] == pytest.approx(4 * 2.0 + 0.25 + 4 * 3.0 + 0.25 + 1.0)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_identities_and_lanes_of_a_real_run_join(clip_norm: float | None) -> None:
    optimizer, run = train(gpu_units=2, clip_norm=clip_norm, speculate=False)
    optimizer.close()
    found = review(run)
    lanes = dict(zip(found.predicted.action, found.predicted.lane, strict=True))
    measured = dict(zip(found.measured.action, found.measured.lane, strict=True))
    assert measured == lanes
    assert not found.unmodelled()
    assert all("moments that are written after the weights" in note for note in found.notes)
    assert found.predicted.makespan_s > 0


def test_what_is_not_modelled_or_not_recorded_is_said() -> None:
    run = written(["gpu", "host"])
    run = run.replace(spans=(*run.spans, ("host", "UPDATE1~guess", 0.0, 1.0)))
    assert [note.split(",")[0] for note in review(run).notes] == [
        "what the GPU updates itself is not recorded",
        "not modelled: speculative updates during the backward pass (updates: 1)",
    ]
    forwards = tuple(span for span in run.spans if span[1] != "B1")
    assert "the backward of the last unit, 1, is recorded as part" in review(run.replace(spans=forwards)).notes[0]


def visiting(run: HybridRun, *, stays_s: float = 0.5) -> HybridRun:
    """A run whose streamed state is fetched after the backward of its unit and returned after that of the step."""
    more = []
    for w in run.work:
        if w.kind == "B" and run.units[w.unit].place == "visit":
            more.append(("copy-in", f"FETCH:o{w.unit}", w.end_s, w.end_s + stays_s))
    for _, action, _, end in list(more):
        later = next((w.start_s for w in run.work if w.kind == "F" and w.unit == 0 and w.start_s > end), end + 2.0)
        more.append(("copy-out", action.replace("FETCH", "OFFLOAD"), later - 1.0, later - 1.0 + stays_s))
    return run.replace(spans=(*run.spans, *more))


def test_a_review_prints_kinds_by_lane_and_the_step() -> None:
    found = review(visiting(written(["gpu", "visit", "host"])))
    lines = [line.split() for line in str(found).splitlines()]
    assert [line[:2] for line in lines[1:8]] == [
        ["compute", "B"], ["compute", "F"], ["compute", "UPDATE"], ["copy-out", "OFFLOAD"], ["host", "UPDATE"],
        ["copy-in", "FETCH"], ["step", lines[7][1]],
    ]  # fmt: skip
    # 20 bytes of weights and 100 of state in each of 4 steps; half of the wire where both are under way
    assert lines[6][4:] == ["3", "s", lines[6][6]]
    assert float(lines[6][6]) >= 1.0
    assert not found.unmodelled()


def test_state_that_visits_is_modelled() -> None:
    # its 7 s on the way in begin after the backward of the last unit, 6 s before the end of the backward pass
    run = visiting(written(["visit", "gpu", "gpu", "gpu"], update_s=10.0), stays_s=7.0)
    found = review(run)
    assert found.program.plan.keep.visitors == 1
    spans = {span.action: span for span in found.predicted.spans()}
    came, updated = spans["FETCH:o0@2"], spans["UPDATE0@3"]
    assert came.start_s == pytest.approx(max(spans["B3.2@2"].end_s, spans["OFFLOAD:o0@2"].end_s))
    assert came.end_s == pytest.approx(came.start_s + 7.0)
    assert updated.start_s == pytest.approx(max(came.end_s, spans["UPDATE1@3"].end_s))
    assert spans["OFFLOAD:o0@3"].start_s == pytest.approx(updated.end_s)


def test_weights_that_an_update_asks_for_are_modelled() -> None:
    run = written(["gpu", "host", "host"])
    updates = [(w.unit, w.start_s - 0.25 * w.unit) for w in run.work if w.kind == "UPDATE~host"]
    asked = [("copy-out", f"OFFLOAD:w{unit}", start, start + 0.25) for unit, start in updates]
    units = (run.units[0], *(unit.replace(place="lean") for unit in run.units[1:]))
    found = review(run.replace(units=units, spans=(*run.spans, *asked)))
    spans = {span.action: span for span in found.predicted.spans()}
    for n in (1, 2):
        asks = spans[f"OFFLOAD:w{n}@2"]
        assert asks.end_s - asks.start_s == pytest.approx(0.25)
        assert spans[f"OFFLOAD:d{n}@2"].end_s <= asks.start_s < asks.end_s <= spans[f"UPDATE{n}@3~host"].start_s


def test_a_window_is_modelled() -> None:
    run = written(["gpu", "host", "host", "host", "gpu"])
    again = [("copy-in", f"FETCH:w{w.unit}", w.start_s - 0.5, w.start_s - 0.25) for w in run.work if w.kind == "B"]
    found = review(run.replace(window=2, spans=(*run.spans, *(span for span in again if span[1][-1] in "123"))))
    assert str(found.program.plan.keep) == "split(1 device, 3 window, 1 device)"
    verify(found.program)
    spans = {span.action: span for span in found.predicted.spans()}
    for n in (1, 2, 3):
        assert spans[f"F{n}.2@2"].start_s >= spans[f"UPDATE{n}@2~host"].end_s + 0.25
    # the last forward waits for three updates in a row and the way of the last weights, and the head follows
    assert found.predicted_step_s == pytest.approx(5 * 2.0 + 3 * 3.0 + 0.25 + 2 * 1.0, abs=2.5)


def test_another_machine_has_links_of_its_own() -> None:
    run = written(["gpu", "host"])
    own = machine_of(run)
    slow = own.replace(links=tuple(link.replace(bytes_per_s=1.0) for link in own.links))
    spans = [span for span in review(run, slow).predicted.spans() if span.action.startswith("FETCH")]
    assert {round(span.end_s - span.start_s, 6) for span in spans} == {20.0}


def test_a_page_holds_both_timelines() -> None:
    found = review(written(["gpu", "host"]))
    page = found.html("a run")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [worker["device"] for worker in data["workers"]] == ["predicted", "measured"]
    for worker, timeline in zip(data["workers"], (found.predicted, found.measured), strict=True):
        drawn = [bar[0] for lane in worker["lanes"] for bar in lane["bars"]]
        assert sorted(drawn) == sorted(s.action for s in timeline.spans() if s.end_s > s.start_s)


def test_microbatches_are_refused() -> None:
    with pytest.raises(InputError, match=r"^a step has 3 backward passes, .* record with microbatches=1$"):
        review(written(["gpu", "host"]).replace(microbatches=3))
