"""The compute lane of a recorder: the noted points in order, and the actions between them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipedejavu.hybrid import recorder as recorder_file
from pipedejavu.hybrid.recorder import Recorder
from pipedejavu.runtime import lane_event


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A recorder whose clock goes on by one second whenever it is read."""
    clock = iter(range(1000))
    for file in (recorder_file, lane_event):
        monkeypatch.setattr(file, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    return Recorder(torch.device("cpu"))


def said(recorder: Recorder, told: str) -> str:
    for word in told.split():
        what, unit = word.rstrip("0123456789"), int(word.lstrip("abcdefghijklmnopqrstuvwxyz"))
        recorder.note(what, unit)
    spans = recorder.finish()
    assert all(lane == "compute" and end == start + 1 for lane, _, start, end in spans)
    return " ".join(action for _, action, _, _ in spans)


def test_a_step_is_waits_forwards_backwards_updates_and_the_loop(recorder: Recorder) -> None:
    told = "came0 began0 came1 began1 turned1 ended1 ended0 updating0 updated0 came0 began0 came1"
    assert said(recorder, told) == "wait0 F0 wait1 F1 B1 B0 loop UPDATE0 loop wait0 F0"


def test_streamed_state_is_updated_within_the_wait_for_it(recorder: Recorder) -> None:
    assert said(recorder, "came0 updating0 updated0 began0 came1") == "wait0 UPDATE0 wait0 F0"


def test_a_backward_that_waits_for_weights_or_recomputes_is_told_from_a_forward(recorder: Recorder) -> None:
    told = "came0 began0 came1 began1 turned1 came1 began1 ended1 came0 began0 ended0 came0 began0 came1"
    assert said(recorder, told) == "wait0 F0 wait1 F1 B1 wait1 B1 B0 wait0 B0 loop wait0 F0"


def test_a_second_use_in_a_forward_pass_belongs_to_the_unit_that_it_interrupts(recorder: Recorder) -> None:
    assert said(recorder, "came0 began0 came1 began1 came0 began0 turned1 ended1 ended0") == "wait0 F0 wait1 F1 B1 B0"


def test_a_module_tells_when_its_backward_begins_until_the_recording_is_over(recorder: Recorder) -> None:
    module = nn.Linear(2, 2)
    recorder.watch(module, 3)
    recorder.note("began", 3)
    module(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        module(torch.ones(1, 2))
    recorder.note("ended", 3)
    assert [action for _, action, _, _ in recorder.finish()] == ["F3", "B3"]
    assert not module._forward_hooks
    assert recorder.finish() == recorder.spans
