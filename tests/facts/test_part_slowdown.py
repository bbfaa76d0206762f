"""Parts of a CPU: what a profile's units take on them, where that was measured and where it was not."""

import pytest

from pipedejavu.facts import Cost, Device, Host, Link, Machine, Measurement, Profile, Survey, Unit, UnitTime
from pipedejavu.facts.part_slowdown import slowdown, with_part_times

RATES = {
    ("block", "float32 1×2×3, 1 threads"): 10.0,
    ("block", "float32 1×2×3, 16 threads"): 40.0,
    ("matrix", "float32 8×8×8, 1 threads"): 1.0,
    ("update", "AdamW, 1 threads"): 3.0,
    ("update", "AdamW, 2 threads"): 4.0,
    ("update", "AdamW, 4 threads"): 9.0,
    ("update", "AdamW, 8 threads"): 7.0,
    ("update", "AdamW, 16 threads"): 6.0,
}


def survey(rates: dict[tuple[str, str], float]) -> Survey:
    rows = [Measurement(subject="cpu", what=w, setting=s, unit="1/s", value=v) for (w, s), v in rates.items()]
    return Survey(date="today", time_s=1.0, measurements=tuple(rows))


def computer(found: Survey | None = None) -> Machine:
    cpu = Device(name="cpu", kind="xeon", type="cpu", host="h", memory_bytes=1600, most_workers=16)
    gpu = Device(name="gpu0", kind="g/2", type="gpu", host="h", memory_bytes=100)
    link = Link(bytes_per_s=1.0)
    return Machine(name="m", hosts=(Host(name="h", cores=16),), devices=(cpu, gpu), links=(link,), survey=found)


def model(**times: float) -> Profile:
    """A unit whose forward of a sample takes some seconds on some kinds, and everything else as long."""
    kinds = {
        kind.replace("_", "/"): UnitTime(forward=Cost(per_sample_s=s), update_s=s, copy_s={"FETCH:w": s})
        for kind, s in times.items()
    }
    batch = {kind: Cost(fixed_s=0.5) for kind in kinds}
    return Profile(name="p", units=(Unit(name="u", times=kinds),), batch=batch, drift=dict.fromkeys(kinds, 0.25))


@pytest.mark.parametrize(
    ("count", "compute", "update", "threads"),
    [
        (16, 4.0, 2.0, (1, 16)),
        (4, 2.0, 1.0, (4, 16)),  # four of sixteen threads: half-way from 10 to 40 in powers; no part is faster
        (2, 2**0.5, 1.0, (8, 16)),
        (8, 8**0.5, 1.5, (2, 16)),
    ],
)
def test_a_part_is_as_much_slower_as_its_threads_are(count, compute, update, threads) -> None:
    found = slowdown(survey(RATES), "cpu", count)
    assert (found.compute, found.update) == (pytest.approx(compute), pytest.approx(update))
    assert found.threads == threads


def test_a_part_of_n_takes_n_times_as_long_at_most() -> None:
    steep = survey({**RATES, ("block", "float32 1×2×3, 16 threads"): 10.0 * 16**2})
    assert slowdown(steep, "cpu", 4).compute == 4.0


@pytest.mark.parametrize(
    "known",
    [
        None,
        survey({}),
        survey({key: rate for key, rate in RATES.items() if key[0] != "update"}),
        survey({key: rate for key, rate in RATES.items() if key != ("block", "float32 1×2×3, 1 threads")}),
    ],
)
def test_without_rates_of_threads_a_part_of_n_takes_n_times_as_long(known: Survey | None) -> None:
    assert slowdown(known, "cpu", 4) == (4.0, 4.0, None)
    assert slowdown(survey(RATES), "another", 4) == (4.0, 4.0, None)


def test_times_of_a_part_that_were_measured_hold() -> None:
    profile = model(xeon=1.0, xeon_2=1.25)
    found, sentences = with_part_times(profile, computer(survey(RATES)).divided(3, by_kind=True))
    assert found == profile
    assert sentences == ("it has times on xeon/2, and these hold",)


def test_times_of_a_part_that_were_not_follow_from_the_whole() -> None:
    found, sentences = with_part_times(model(xeon=1.0), computer().divided(5, by_kind=True))
    assert found.units[0].times["xeon/4"] == UnitTime(
        forward=Cost(per_sample_s=4.0), update_s=4.0, copy_s={"FETCH:w": 1.0}
    )
    assert found.units[0].times["xeon"] == model(xeon=1.0).units[0].times["xeon"]
    assert found.batch == {"xeon": Cost(fixed_s=0.5), "xeon/4": Cost(fixed_s=2.0)}
    assert found.drift == {"xeon": 0.25, "xeon/4": 0.25}
    assert sentences == (
        "it has no times on xeon/4; those on xeon are taken 4 times, the most that one part of 4 takes;"
        " `profile --parts 4` measures them",
    )


def test_rates_of_a_survey_say_how_long_a_part_takes() -> None:
    found, sentences = with_part_times(model(xeon=1.0), computer(survey(RATES)).divided(9, by_kind=True))
    time = found.units[0].times["xeon/8"]
    assert (time.forward.at(1), time.update_s) == (pytest.approx(8**0.5), pytest.approx(1.5))
    assert sentences == (
        "it has no times on xeon/8; those on xeon are taken 2.83 times, and of updates 1.50 times, as the machine's"
        " rates with 2 and 16 threads differ; `profile --parts 8` measures them",
    )


def test_a_remedy_that_no_core_is_there_for_is_not_given() -> None:
    machine = computer().replace(hosts=(Host(name="h", cores=2),)).divided(5, by_kind=True)
    (sentence,) = with_part_times(model(xeon=1.0), machine)[1]
    assert sentence.endswith("the most that one part of 4 takes")


def test_what_has_no_parts_stays_as_it_is() -> None:
    profile = model(xeon=1.0, g=1.0)
    assert with_part_times(profile, computer()) == (profile, ())  # a GPU's kind may look like a part
    other = model(h200=1.0)
    assert with_part_times(other, computer().divided(5, by_kind=True)) == (other, ())
