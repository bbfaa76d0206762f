"""What training takes, on profiles whose sums are known."""

import pytest

from pipedejavu.facts import Cost, Device, Profile, Tie, Unit, UnitTime
from pipedejavu.report import fold_units, step_spread, step_times, work_out_needs
from pipedejavu.report.memory_need import SPARE


def unit(name: str, **changes) -> Unit:
    time = UnitTime(forward=Cost(fixed_s=1.0, per_sample_s=2.0, spread=0.1), backward=Cost(fixed_s=3.0), update_s=0.5)
    made = Unit(name=name, times={"cpu": time}, num_parameters=10, parameter_bytes=40, activation_bytes=6.0)
    return made.replace(boundary_bytes=4.0, **changes)


def device(kind: str, memory_bytes: int) -> Device:
    return Device(name=kind, kind=kind, type=kind, host="h", memory_bytes=memory_bytes)


def test_needs_of_both_precisions() -> None:
    profile = Profile(name="m", units=(unit("a"), unit("b", activation_bytes=20.0), unit("c")))
    full, half = work_out_needs(profile)
    assert (full.precision.name, full.model_bytes, full.saved_bytes) == ("fp32", 16 * 30, 32.0)
    assert full.recomputed_bytes == 4 + 4 + 20  # the inputs of b and c, and all of b
    assert (half.precision.name, half.model_bytes, half.saved_bytes) == ("bf16", 16 * 30, 16.0)


def test_a_step_is_walked_unit_by_unit() -> None:
    """The peak is in b's backward: gradients of b and c are there, those of a are not, and what c saved is gone."""
    profile = Profile(name="m", units=(unit("a"), unit("b", activation_bytes=20.0), unit("c")))
    (full, _), state = work_out_needs(profile), 12 * 30
    assert full.live_bytes(3, recomputes=False) == state + 3 * (6 + 20) + 3 * 4 + 2 * 40
    # With recompute b's input is kept and the rest of what it saves comes back.
    assert full.live_bytes(3, recomputes=True) == state + 3 * 4 + 3 * (20 - 4) + 3 * 4 + 2 * 40


def test_what_units_work_with_counts_while_they_do() -> None:
    plain, busy = (
        Profile(name="m", units=(unit("a"), unit("b", activation_bytes=20.0, backward_work_bytes=size), unit("c")))
        for size in (0.0, 7.0)
    )
    before, after = (work_out_needs(profile)[0].live_bytes(3, recomputes=False) for profile in (plain, busy))
    assert after - before == 3 * 7


def test_a_gpu_needs_what_is_reserved() -> None:
    need = work_out_needs(Profile(name="m", units=(unit("a"), unit("b"))))[0]
    found = need.footprint(3, recomputes=False)
    assert need.live_bytes(3, recomputes=False) < found.allocated_bytes < found.reserved_bytes == 2 * 2**20
    assert need.fits(device("gpu", found.reserved_bytes), 3, recomputes=False)
    assert not need.fits(device("gpu", found.reserved_bytes - 1), 3, recomputes=False)
    assert need.fits(device("cpu", found.reserved_bytes - 1), 3, recomputes=False)
    roomy = device("gpu", round(found.reserved_bytes / (1 - SPARE)) + 1)
    assert need.most_samples(roomy, recomputes=False) >= 3
    assert need.most_samples(device("gpu", found.reserved_bytes), recomputes=False) < 3, "nothing would be to spare"


def test_what_is_tied_counts_once() -> None:
    profile = Profile(name="m", units=(unit("a"), unit("b")), ties=(Tie(units=("a", "b"), size_bytes=24),))
    assert work_out_needs(profile)[0].model_bytes == 16 * (20 - 6)


def test_a_profile_of_16_bits_has_activations_of_16_bits() -> None:
    profile = Profile(name="m", units=(unit("a", parameter_bytes=20),))
    full, half = work_out_needs(profile)
    assert (full.model_bytes, full.saved_bytes) == (160, 12.0)
    assert (half.model_bytes, half.saved_bytes) == (160, 6.0)


def test_recompute_never_needs_more() -> None:
    (full, _) = work_out_needs(Profile(name="m", units=(unit("a", activation_bytes=1.0), unit("b"))))
    assert full.recomputed_bytes == full.saved_bytes == 7.0


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    need = work_out_needs(Profile(name="m", units=(unit("a"), unit("b"), unit("c"))))[0]
    most = need.most_samples(device("cpu", 1000), recomputes=False)
    assert need.live_bytes(most, recomputes=False) <= 1000 < need.live_bytes(most + 1, recomputes=False)
    assert need.most_samples(device("cpu", 100), recomputes=False) == 0


def test_a_step_is_the_sum_of_its_units() -> None:
    profile = Profile(name="m", units=(unit("a"), unit("b")))
    step = step_times(profile, 4)["cpu"]
    assert step == (18.0, 6.0, 1.0)
    assert step.total_s == 25
    assert step_spread(profile, 4) == pytest.approx(0.1 * 18 / 24)


def test_alike_units_are_folded_under_their_common_name() -> None:
    names = ["embedding", *(f"block{n}" for n in range(12)), "head"]
    units = [unit(name, flop=float("block" in name) + 2 * (name == "head")) for name in names]
    assert [(fold.label, len(fold.units)) for fold in fold_units(units)] == [
        ("embedding", 1),
        ("12 × block", 12),
        ("head", 1),
    ]


def test_units_that_alternate_are_folded_apart() -> None:
    units = [unit(f"h.{n}.{part}", flop=float(part == "mlp")) for n in range(3) for part in ("attention", "mlp")]
    assert [fold.label for fold in fold_units(units)] == ["3 × h*.attention", "3 × h*.mlp"]
