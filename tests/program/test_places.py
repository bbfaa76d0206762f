"""Programs whose pieces rest in different places: visitors, lean pieces and windows, written out and weighed."""

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import FaultsError, InputError
from pipedejavu.plan import Keep, Reduce, preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import simulate

CLIPPED, UNCLIPPED = Reduce(clip="global"), Reduce()


@pytest.fixture
def line(build):
    def line(*places, reduce=CLIPPED, steps=1, **keep):
        program = build(
            "zero-offload", microbatches=1, steps=steps, reduce=reduce, keep=Keep(kind="split", places=places, **keep)
        )
        verify(program)
        return program.workers[0].actions

    return line


def text(actions, *kinds):
    return " ".join(str(a) for a in actions if a.kind in kinds or not kinds)


def test_streamed_state_comes_in_the_backward_pass_and_leaves_after_its_update(line):
    assert text(line("visit", "device", "device", "device")) == (
        "F0.0@0 F1.0@0 F2.0@0 F3.0@0 B3.0@0 FETCH:o0@0 B2.0@0 B1.0@0 B0.0@0 REDUCE:n0@0*all"
        " UPDATE3@1 UPDATE2@1 UPDATE1@1 UPDATE0@1 OFFLOAD:o0@1"
    )


def test_a_visitor_without_room_comes_when_another_has_left_and_is_updated_before_its_forward(line):
    found = text(line(*["visit"] * 4, steps=2, visitors=2))
    assert "B3.0@0 FETCH:o0@0 B2.0@0 FETCH:o1@0 B1.0@0 B0.0@0 REDUCE:n0@0*all" in found
    assert "UPDATE0@1 OFFLOAD:o0@1 FETCH:o2@0 UPDATE1@1 OFFLOAD:o1@1 FETCH:o3@0 F0.1@1 F1.1@1 UPDATE2@1" in found
    assert found.endswith("UPDATE2@2 OFFLOAD:o2@2 UPDATE3@2 OFFLOAD:o3@2")  # at the end nothing is left to wait for


def test_a_lean_update_asks_for_the_weights_of_the_next_one_too(line):
    found = text(line("host", "lean", "lean", "lean"), "OFFLOAD", "UPDATE", "FETCH", "DROP")
    assert found == (
        "OFFLOAD:d3@0 OFFLOAD:d2@0 OFFLOAD:d1@0 OFFLOAD:d0@0 OFFLOAD:w1@0 UPDATE0@1~host DROP:w0@0 FETCH:w0@1"
        " OFFLOAD:w2@0 UPDATE1@1~host FETCH:w1@1 OFFLOAD:w3@0 UPDATE2@1~host FETCH:w2@1 UPDATE3@1~host FETCH:w3@1"
    )


def test_a_lean_update_begins_in_the_backward_pass_without_clipping(line):
    found = text(line("device", "device", "device", "lean", reduce=UNCLIPPED))
    assert "B3.0@0 OFFLOAD:d3@0 OFFLOAD:w3@0 UPDATE3@1~host FETCH:w3@1 B2.0@0" in found


def test_weights_come_through_a_window_between_pieces_that_stay(line):
    assert text(line("device", "window", "window", "device", steps=2)) == (
        "FETCH:w1@0 F0.0@0 F1.0@0 DROP:w1@0 FETCH:w2@0 F2.0@0 F3.0@0 B3.0@0 B2.0@0 DROP:w2@0 FETCH:w1@0 OFFLOAD:d2@0"
        " B1.0@0 DROP:w1@0 OFFLOAD:d1@0 B0.0@0 REDUCE:n0@0*all UPDATE3@1 UPDATE0@1 UPDATE1@1~host FETCH:w1@1"
        " UPDATE2@1~host F0.1@1 F1.1@1 DROP:w1@1 FETCH:w2@1 F2.1@1 F3.1@1 B3.1@1 B2.1@1 DROP:w2@1 FETCH:w1@1"
        " OFFLOAD:d2@1 B1.1@1 DROP:w1@1 OFFLOAD:d1@1 B0.1@1 REDUCE:n0@1*all UPDATE3@2 UPDATE0@2 UPDATE1@2~host"
        " UPDATE2@2~host"
    )


def test_places_of_pieces_alone_are_those_of_the_presets(build):
    owns = {"cotrain": Keep(kind="split", device_pieces=2), "stronghold": Keep(kind="host", window=2)}
    for name, places in (("cotrain", ("device", "device", "host", "host")), ("stronghold", ("window",) * 4)):
        keep = Keep(kind="split", places=places, window=owns[name].window)
        assert build(name, steps=2, keep=keep).to_text() == build(name, steps=2, keep=owns[name]).to_text()


def test_places_must_be_as_many_as_pieces(build):
    with pytest.raises(InputError, match=r"^keep.places has 2 entries, and stage 0 has 4 pieces; give one for each$"):
        build("cotrain", keep=Keep(kind="split", places=("visit", "host")))


def test_a_fault_names_the_state_that_does_not_come_back(build):
    program = build("cotrain", keep=Keep(kind="split", places=("visit", "host", "host", "host")))
    kept = tuple(a for a in program.workers[0].actions if str(a) != "OFFLOAD:o0@1")
    with pytest.raises(FaultsError, match=r"does not hold o0@1 on the host at the end"):
        verify(program.with_actions([kept]))


def predict(model, computer, *places, bytes_per_s=1000.0, **keep):
    plan = preset("zero-offload").at(microbatches=1, samples=1, steps=2).replace(
        keep=Keep(kind="split", places=places, **keep)
    )  # fmt: skip
    program = compile_plan(plan, model(len(places)), computer(1, bytes_per_s=bytes_per_s))
    return simulate(program, verify(program))


def when(prediction):
    return {span.action: span for span in prediction.timeline().spans()}


def test_as_much_visiting_state_is_on_the_device_as_there_is_room(model, computer):
    for room in (1, 2, 4):
        (worker,) = predict(model, computer, *["visit"] * 6, visitors=room).workers
        device, host = worker.memory
        assert max(device.classes["optimizer"]) == 600.0 * room
        assert {*host.classes["optimizer"]} == {6 * 600.0}


def test_the_host_has_room_for_the_weights_of_two_lean_pieces_at_most(model, computer):
    (worker,) = predict(model, computer, *["lean"] * 6).workers
    _, host = worker.memory
    # one that is updated, the next one's, and the new weights of the one before on their way
    assert max(host.classes["weights"]) <= 3 * 100.0


def test_a_forward_waits_for_its_visitor_and_no_other(model, computer):
    found = when(predict(model, computer, *["visit"] * 4, bytes_per_s=100.0))
    assert found["FETCH:o0@0"].start_s == found["B3.0@0"].end_s  # into what the backward has freed
    assert found["FETCH:o1@0"].start_s == found["OFFLOAD:o0@1"].end_s
    assert found["F0.1@1"].start_s == found["UPDATE0@1"].end_s
    for n in (1, 2, 3):
        assert found[f"UPDATE{n}@1"].start_s == found[f"FETCH:o{n}@0"].end_s > found[f"F{n - 1}.1@1"].end_s
        assert found[f"F{n}.1@1"].start_s == found[f"UPDATE{n}@1"].end_s


def test_visitors_and_weights_share_the_way_to_the_device(model, computer):
    found = when(predict(model, computer, "visit", "visit", "host", "host"))
    weights, state = found["FETCH:w3@1"], found["FETCH:o1@0"]
    assert state.start_s < weights.start_s < weights.end_s < state.end_s
    assert weights.end_s - weights.start_s == pytest.approx(0.01 + 2 * 0.1)  # 100 bytes over half of the wire
    assert state.end_s - state.start_s == pytest.approx(0.01 + 0.6 + 0.1)


def test_a_copy_that_was_measured_takes_its_own_time(model, computer):
    profile = model(4)
    times = {kind: time.replace(copy_s={"FETCH:w": 0.5}) for kind, time in profile.units[0].times.items()}
    profile = profile.replace(units=tuple(unit.replace(times=times) for unit in profile.units))
    found = when(predict(lambda _: profile, computer, *["host"] * 4))
    spans = [span for action, span in found.items() if action.startswith(("FETCH:w", "OFFLOAD:d"))]
    assert {action: round(span.end_s - span.start_s, 9) for action, span in found.items() if span in spans} == {
        span.action: 0.5 if span.action.startswith("FETCH") else 0.11 for span in spans
    }
