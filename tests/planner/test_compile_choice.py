"""Whether units are compiled: what the steps repay, what cannot be, and what the user asks for."""

from typing import Any

import pytest
import torch
from torch import nn

from pipedejavu.engine import Job, Sgd
from pipedejavu.facts import InputError, Machine, Profile
from pipedejavu.launch import planned_run
from pipedejavu.plan import preset
from pipedejavu.planner import compile_choice
from pipedejavu.planner.compile_choice import (
    ASSUMED_COMPILE_S,
    CompiledPlan,
    CompileMode,
    asked_plan,
    read_mode,
    refuse_compile,
    with_mode,
    with_times,
)
from pipedejavu.planner.measure import measure
from pipedejavu.run import RunStart, TrainOptions
from pipedejavu.session.rank_group import RankGroup
from pipedejavu.session.trainer_plan import settle_compile
from tests.search.case import machine, profile

PLAN = preset("1f1b").at(workers=2, microbatches=2)
UNITS = profile([0.001] * 4, {"g": 1.0})


def faster(known: Profile, factor: float) -> Profile:
    """Returns the profile of units that take `factor` times as long."""
    units = (u.replace(times={kind: t.times(factor) for kind, t in u.times.items()}) for u in known.units)
    return known.replace(units=tuple(units))


class Measured:
    """Measurements of eager and of compiled units, and which of them were made."""

    def __init__(self, factor: float) -> None:
        self.eager, self.calls = UNITS, list[bool]()
        self.compiled = faster(self.eager, factor)

    def __call__(self, is_compiled: bool) -> Profile:
        self.calls.append(is_compiled)
        return self.compiled if is_compiled else self.eager


@pytest.fixture
def here() -> Machine:
    return machine(["g", "g"])


@pytest.fixture(autouse=True)
def _has_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_choice, "_missing", lambda _: "")


def step_s(known: Profile, here: Machine) -> float:
    return compile_choice._step_s(PLAN, known, here)


def steps_for(here: Machine, share: float) -> int:
    """Returns the steps of which `share` takes as long as compiling."""
    return round(compile_choice._cost_s(PLAN, UNITS, here) / (share * step_s(UNITS, here)))


def settle_launch(
    monkeypatch: pytest.MonkeyPatch, here: Machine, steps: int, measured: Measured, ranks: RankGroup | None = None
) -> CompiledPlan:
    """Returns the plan of a run of so many steps whose mode is auto."""
    monkeypatch.setattr(planned_run, "measure_plan", lambda _, plan, *__, **___: measured(plan.is_compiled))
    options = TrainOptions(model="mlp", compile="auto", steps=steps)
    settings = {"start": RunStart(), "renews": False}
    return planned_run._settle_compile(PLAN, options, here, (), ranks or RankGroup(), [], **settings)


def test_few_steps_measure_nothing_compiled(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(0.5)
    plan, chosen = settle_launch(monkeypatch, here, steps_for(here, 0.6), measured)
    assert not plan.is_compiled
    assert chosen is measured.eager
    assert measured.calls == [False]
    decision = plan.decisions[-1]
    assert (decision.axis, decision.choice) == ("compile", "off")
    assert "cannot repay about" in decision.reason


@pytest.mark.parametrize(("factor", "is_compiled"), [(0.6, True), (0.95, False), (1.5, False)])
def test_the_measured_gain_decides(
    here: Machine, factor: float, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(factor)
    plan, chosen = settle_launch(monkeypatch, here, steps_for(here, 0.25), measured)
    assert measured.calls == [False, True]
    assert plan.is_compiled is is_compiled
    expected = with_times(measured.eager, measured.compiled, 1) if is_compiled else measured.eager
    assert chosen == expected
    assert plan.decisions[-1].choice == ("on" if is_compiled else "off")
    assert "repay" in plan.decisions[-1].reason


def test_a_plan_with_masks_stays_eager(here: Machine) -> None:
    plan = refuse_compile(preset("distreal").at(workers=2), UNITS, here, 10**9)
    assert not plan.is_compiled
    assert plan.decisions[-1].reason.startswith("feed 'mask' runs units with other sizes in each update")
    with pytest.raises(InputError, match=r"feed 'mask' runs units with other sizes.*leave compile at auto or off"):
        asked_plan(plan, "on")


def test_a_plan_that_splits_the_backward_stays_eager(here: Machine) -> None:
    split = preset("zb-h1").at(workers=2, microbatches=4)
    plan = refuse_compile(split, UNITS, here, 10**9)
    assert not plan.is_compiled
    assert plan.decisions[-1].reason == "order 'zb-h1' splits the backward, which compiled units cannot do"
    with pytest.raises(InputError, match=r"order 'zb-h1' splits the backward.*leave compile at auto or off"):
        asked_plan(split, "on")


def test_what_the_user_asks_for_is_measured_and_no_decision(here: Machine) -> None:
    modes: list[tuple[CompileMode, bool]] = [("on", True), ("off", False)]
    for mode, is_compiled in modes:
        measured = Measured(2.0)
        plan, _ = settle_compile(PLAN, None, here, mode, measured)
        assert plan.is_compiled is is_compiled
        assert measured.calls == [is_compiled]
        assert plan.decisions == PLAN.decisions


def test_a_plan_file_that_compiles_is_taken_at_its_word(here: Machine) -> None:
    asked = PLAN.replace(is_compiled=True)
    assert settle_compile(asked, None, here, "auto", Measured(2.0)).plan == asked
    assert not settle_compile(asked, None, here, "off", Measured(2.0)).plan.is_compiled
    assert with_mode(asked, "auto") == asked
    assert not with_mode(asked, "off").is_compiled


def test_a_loop_of_unknown_length_measures_only_what_is_not_known(here: Machine) -> None:
    measured = Measured(0.5)
    plan, chosen = settle_compile(PLAN, UNITS, here, "auto", measured)
    assert measured.calls == ([True] if plan.decisions[-1].choice == "on" else [])
    assert chosen == (with_times(UNITS, measured.compiled, 1) if plan.is_compiled else UNITS)
    assert settle_compile(PLAN, UNITS, here, "off", measured).profile is UNITS


def test_all_processes_take_the_first_ones_refusal(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherRank(RankGroup):
        def broadcast(self, _: bytes) -> bytes:
            return compile_choice._with(PLAN, "no C++ compiler is installed").to_json().encode()

    measured = Measured(0.5)
    plan, _ = settle_launch(monkeypatch, here, steps_for(here, 0.25), measured, OtherRank())
    assert not plan.is_compiled
    assert measured.calls == [False]


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert compile_choice._missing({"cpu"}) == "no C++ compiler is installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert compile_choice._missing({"gpu"}) == "Triton is not installed"


@pytest.mark.parametrize(
    ("choice", "mode"), [("auto", "auto"), ("on", "on"), (True, "on"), ("off", "off"), (False, "off")]
)
def test_a_choice_is_a_word_or_a_bool(choice: object, mode: str) -> None:
    assert read_mode(choice) == mode


@pytest.mark.parametrize("choice", ["yes", 1, None])
def test_another_choice_is_refused(choice: object) -> None:
    with pytest.raises(InputError, match="compile is 'auto', 'on' or 'off', or True or False, not"):
        read_mode(choice)


def test_compiling_is_assumed_dearer_on_a_cpu() -> None:
    assert ASSUMED_COMPILE_S["cpu"] > ASSUMED_COMPILE_S["gpu"] > 0


def test_an_option_that_is_no_mode_is_refused() -> None:
    with pytest.raises(InputError, match="compile: 'maybe' is not one of its values; known: auto, on, off"):
        TrainOptions.from_json('{"model": "mlp", "compile": "maybe"}')


def test_compiled_units_are_timed_compiled_with_the_loss_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[str] = []
    real = torch.compile

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda call, **_: real(call, fullgraph=True, backend=backend))
    units = [(f"u{n}", nn.Linear(3, 3)) for n in range(4)]
    job = Job(units=units, loss=lambda x, y: (x - y).square().sum(), optimizer=Sgd(lr=0.1))
    plan = preset("ddp").at(samples=4)

    def measured(is_compiled: bool) -> Profile:
        kinds = {"cpu": torch.device("cpu")}
        return measure(
            "m", job, plan, lambda n: (torch.randn(n, 3), torch.randn(n, 3)), len, kinds, is_compiled=is_compiled
        )

    eager = measured(is_compiled=False)
    assert not graphs
    compiled = measured(is_compiled=True)
    # The first unit's inputs have no gradient, and the last computes the loss.
    assert len(graphs) == 3
    assert sum("square" in code for code in graphs) == 1
    assert [unit.parameter_bytes for unit in compiled.units] == [unit.parameter_bytes for unit in eager.units]
    assert all(unit.times["cpu"].backward.at(4) > 0 for unit in compiled.units)


class Waves(nn.Module):
    """Operations of which autograd keeps each input, and a compiler the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().sin().cos()


def test_the_bytes_of_compiled_units_are_those_that_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    partition = "aot_eager_decomp_partition"  # saves what inductor saves, without its compiler
    monkeypatch.setattr(torch, "compile", lambda call, **_: real(call, fullgraph=True, backend=partition))
    units = [("u0", nn.Linear(3, 3)), ("u1", Waves()), ("u2", nn.Linear(3, 3))]
    job = Job(units=units, loss=lambda x, y: (x - y).square().sum(), optimizer=Sgd(lr=0.1))
    kinds, plan = {"cpu": torch.device("cpu")}, preset("ddp").at(samples=4)
    eager, compiled = (
        measure("m", job, plan, lambda n: (torch.randn(n, 3), torch.randn(n, 3)), len, kinds, is_compiled=is_compiled)
        for is_compiled in (False, True)
    )
    assert [unit.activation_bytes for unit in eager.units[:2]] == [12, 4 * 12]
    assert [unit.activation_bytes for unit in compiled.units[:2]] == [12, 12]
    merged = with_times(eager, compiled, 4).units[1]
    assert (merged.activation_bytes, merged.activation_parts) == (12, (12,))


def test_kinds_that_were_not_measured_compiled_keep_their_times() -> None:
    known, compiled = profile([1.0], {"fast": 1.0, "slow": 0.5}), profile([0.5], {"fast": 1.0})
    times = with_times(known, compiled, 1).units[0].times
    assert times["fast"].forward.at(1) == compiled.units[0].times["fast"].forward.at(1)
    assert times["fast"].forward.at(8) == pytest.approx(0.5 * known.units[0].times["fast"].forward.at(8))
    assert times["slow"] == known.units[0].times["slow"]


def test_units_that_the_budget_left_out_keep_their_eager_times() -> None:
    known, compiled = profile([1.0, 1.0], {"fast": 1.0}), profile([0.5, 0.1], {"fast": 1.0})
    first, second = compiled.units
    second = second.replace(times={"fast": second.times["fast"].replace(is_estimated=True)})
    merged = with_times(known, compiled.replace(units=(first, second)), 1)
    assert merged.units[0].times["fast"].forward.at(1) < known.units[0].times["fast"].forward.at(1)
    assert merged.units[1] == known.units[1]


def test_a_run_with_the_profile_of_its_search_measures_compiled_units_alone(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(0.6)
    monkeypatch.setattr(planned_run, "measure_plan", lambda _, plan, *__, **___: measured(plan.is_compiled))
    options = TrainOptions(model="mlp", compile="auto", steps=steps_for(here, 0.25))
    others = (here, (), RankGroup(), [])
    settings = {"start": RunStart(), "renews": False, "eager": measured.eager}
    plan, _ = planned_run._settle_compile(PLAN, options, *others, **settings)
    assert plan.is_compiled
    assert measured.calls == [True]
    few = planned_run._settle_compile(PLAN, options.replace(steps=1), *others, **settings)
    assert few.profile is measured.eager
    assert measured.calls == [True]
