"""Measurements of a plan are kept for the next run, as long as they describe it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipedejavu.facts import Device, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.launch import measure_plan as file
from pipedejavu.launch import plan_run
from pipedejavu.plan import preset
from pipedejavu.run.options import TrainOptions
from pipedejavu.session.rank_group import RankGroup

NOTHING = SimpleNamespace(job=SimpleNamespace(compiler=None))
"""An opened model without compiled units."""
OPTIONS = TrainOptions(model="own.py:make", steps=2)
PLAN = preset("ddp").at(workers=2, microbatches=1, samples=4)
SOURCE = """
import torch
from torch import nn

WIDTH = 8

def make():
    torch.manual_seed(0)
    data = [(torch.randn(8), torch.tensor(n % 3)) for n in range(64)]
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)), nn.CrossEntropyLoss(), data
"""


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the microbatch sizes that are measured from now on, in a folder with a model and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    sizes: list[int] = []
    measure = file.measure

    def noted(name, job, plan, *args, **options):
        sizes.append(plan.feed.samples)
        return measure(name, job, plan, *args, **options)

    monkeypatch.setattr(file, "measure", noted)
    return sizes


def test_a_run_uses_what_an_earlier_one_measured(measured: list[int]) -> None:
    first = plan_run(OPTIONS, PLAN).program.profile
    again = plan_run(OPTIONS.replace(steps=9, lr=0.5, seed=3), PLAN).program.profile
    assert measured == [4]
    assert again == first
    plan_run(OPTIONS, PLAN, renews=True)
    assert measured == [4, 4]


def test_another_batch_dtype_or_model_is_measured_anew(measured: list[int], tmp_path: Path) -> None:
    plan_run(OPTIONS, PLAN)
    plan_run(OPTIONS, PLAN.replace(feed=PLAN.feed.replace(samples=2)))
    plan_run(OPTIONS.replace(dtype="float64"), PLAN)
    (tmp_path / "own.py").write_text(SOURCE.replace("WIDTH = 8", "WIDTH = 16"))
    wider = plan_run(OPTIONS, PLAN).program.profile
    assert measured == [4, 2, 4, 4]
    assert wider.units[0].num_parameters == 8 * 16 + 16


def test_a_kept_profile_of_other_units_is_not_used(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model's file imports may change without the file."""
    other = plan_run(OPTIONS, PLAN).program.profile
    other = other.replace(units=(other.units[0].replace(name="before"), *other.units[1:]))
    monkeypatch.setattr(file, "find", lambda *_: other)
    assert plan_run(OPTIONS, PLAN).program.profile.units[0].name != "before"
    assert measured == [4, 4]


def test_a_plan_runs_with_the_profile_of_its_search(measured: list[int]) -> None:
    profile = plan_run(OPTIONS, PLAN).program.profile
    assert measured == [4]
    again = plan_run(OPTIONS, PLAN, eager=profile, renews=True).program.profile
    assert again == profile
    assert measured == [4]
    large = PLAN.replace(feed=PLAN.feed.replace(samples=16))  # larger than any size that a search measures
    plan_run(OPTIONS, large, eager=profile)
    assert measured == [4, 16]


def test_what_the_budget_left_out_is_a_decision_of_the_plan(measured: list[int]) -> None:
    decisions = plan_run(OPTIONS.replace(measure_budget_s=0.0), PLAN).program.plan.decisions
    told = [decision for decision in decisions if decision.axis == "profile"]
    assert measured == [4]
    assert [decision.choice for decision in told] == ["estimates for cpu"]
    assert told[0].reason.startswith("1 of 2 distinct units (")


def test_a_host_that_only_updates_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's microbatches are larger than those of its search, which has the host's times."""
    plan = preset("zero-offload").at(workers=1, microbatches=1, samples=16)
    units = (Unit(name="only", times={kind: UnitTime(update_s=0.5) for kind in ("fast", "cpu")}),)
    eager = Profile(name="own", units=units, estimated={"cpu": "not measured: …", "fast": "…"})
    devices = tuple(
        Device(name=f"{kind}0", kind=kind, type=type_, host="h", memory_bytes=2**30)
        for kind, type_ in (("fast", "gpu"), ("cpu", "cpu"))
    )
    machine = Machine(name="m", hosts=(Host(name="h"),), devices=devices, links=(Link(bytes_per_s=1e9),))
    kinds: list[str] = []

    def measured(options, plan, setup, *_, **__) -> Profile:
        kinds.append(setup.kind)
        unit = units[0].replace(times={setup.kind: UnitTime(update_s=0.1)})
        return Profile(name="own", units=(unit,))

    monkeypatch.setattr(file, "_find_or_measure", measured)
    profile = file.measure_plan(OPTIONS, plan, machine, ("fast0",), RankGroup(), [NOTHING], eager=eager)
    assert kinds == ["fast"]
    assert {kind: time.update_s for kind, time in profile.units[0].times.items()} == {"fast": 0.1, "cpu": 0.5}
    assert profile.estimated == {"cpu": "not measured: …"}
    file.measure_plan(OPTIONS, plan, machine, ("fast0",), RankGroup(), [NOTHING])
    assert kinds == ["fast", "cpu", "fast"]
