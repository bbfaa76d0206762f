"""A profile's last unit with its head in chunks: exact at measured numbers, between them on lines, and reversible."""

import pytest

from pipedejavu.facts import Cost, HeadForm, Profile, Unit, UnitTime
from pipedejavu.facts.head_form import form_at

FORMS = tuple(
    HeadForm(
        chunks=n,
        forward={"gpu": 1 + 0.01 * (n - 1)},
        backward={"gpu": 1.2 if n > 1 else 1.0},
        activation_bytes=100.0 if n == 1 else 10.0,
        forward_work_bytes=64.0 / n,
        backward_work_bytes=160.0 / n,
        boundary_bytes=50.0 if n == 1 else 0.0,
    )
    for n in (1, 4, 16)
)


def profile() -> Profile:
    time = UnitTime(forward=Cost(per_sample_s=2.0), backward=Cost(per_sample_s=4.0))
    last = Unit(
        name="head", times={"gpu": time}, activation_bytes=100.0, forward_work_bytes=64.0, backward_work_bytes=160.0,
        boundary_bytes=50.0,
    )  # fmt: skip
    return Profile(name="p", units=(Unit(name="body", times={"gpu": time}), last), head_forms=FORMS)


def test_measured_forms_are_exact_and_reversible() -> None:
    divided = profile().with_head_chunks(4)
    last = divided.units[-1]
    assert (last.activation_bytes, last.backward_work_bytes, last.boundary_bytes) == (10.0, 40.0, 0.0)
    assert last.times["gpu"].forward.at(1) == pytest.approx(2.06)
    assert last.times["gpu"].backward.at(1) == pytest.approx(4.8)
    assert divided.units[0] == profile().units[0]
    assert divided.with_head_chunks(4) is divided
    again = divided.with_head_chunks(1)
    assert again.units[-1].backward_work_bytes == 160.0
    assert again.units[-1].times["gpu"].backward.at(1) == pytest.approx(4.0)


@pytest.mark.parametrize(("chunks", "forward", "work"), [(2, 1.01, 80.0), (8, 1.07, 20.0), (32, 1.31, 10.0)])
def test_other_numbers_lie_on_lines_and_promise_no_less_memory_than_was_measured(
    chunks: int, forward: float, work: float
) -> None:
    form = form_at(FORMS, chunks)
    assert form.forward["gpu"] == pytest.approx(forward)
    assert form.backward_work_bytes == pytest.approx(work)


def test_scaled_times_stay_scaled_and_unknown_kinds_take_the_largest_ratio() -> None:
    one = profile()
    slow = one.units[-1].replace(times={"gpu.2": one.units[-1].times["gpu"].times(3.0)})
    divided = one.replace(units=(one.units[0], slow)).with_head_chunks(16)
    assert divided.units[-1].times["gpu.2"].forward.at(1) == pytest.approx(3 * 2 * 1.15)


def test_a_profile_without_forms_stays_as_it_is() -> None:
    plain = profile().replace(head_forms=())
    assert plain.with_head_chunks(8) is plain
