"""The figures that a page leads with."""

from dataclasses import replace

import pytest

from pipedejavu.facts import read_machine
from pipedejavu.plan import preset
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.report import Headline, flop_share, headlines, render_html, step_time
from pipedejavu.simulate import simulate
from pipedejavu.zoo import estimate_profile
from pipedejavu.zoo.gpt_shape import tokens_of


@pytest.fixture(scope="module")
def program() -> Program:
    machine = read_machine("4xa100-80gb")
    plan = preset("1f1b").at(workers=4, microbatches=8)
    return compile_plan(plan, estimate_profile("gpt-small", machine), machine)


def test_a_page_begins_with_throughput_utilisation_time_and_cost(program: Program) -> None:
    prediction = simulate(program)
    rate = sum(program.sizes) / prediction.makespan_s
    time = Headline("Time", "2 h", "100 updates")
    leads = headlines(program, rate, time, tokens_per_sample=tokens_of("gpt-small"), cost=(2.5, 2.0), forecast=1.5)
    assert [lead.name for lead in leads] == ["Tokens per second", "MFU", "Time", "Cost"]
    assert leads[0].value == f"{rate * 1024:,.0f}"
    assert leads[0].aside.endswith(" samples per second, forecast 1.5")
    assert leads[3] == Headline("Cost", "5.00", "2.5 per hour")
    page = render_html(prediction.timeline(), "", {}, leads=leads)
    names = ["Tokens per second", "MFU", "Time", "Cost", "Makespan", "Bubble", "Highest peak memory"]
    places = [page.index(f"<dt>{name}</dt>") for name in names]
    assert places == sorted(places)


def test_utilisation_is_the_models_flop_of_the_devices_peak(program: Program) -> None:
    flop = 3 * sum(unit.flop for unit in program.profile.units)
    peak = 4 * 312e12
    assert flop_share(program, 10.0) == pytest.approx(10 * flop / peak)


def test_no_utilisation_exceeds_the_peak(program: Program) -> None:
    # A peak that was measured in float32 is none of bf16.
    rate = 10.0 / (flop_share(program, 10.0) or 1.0)
    assert flop_share(program, 0.99 * rate) == pytest.approx(0.99)
    assert flop_share(program, 1.01 * rate) is None


def test_what_is_not_known_is_not_made_up(program: Program) -> None:
    devices = tuple(d.replace(flop_per_s=0.0, kind="own") for d in program.machine.devices)
    unknown = replace(program, machine=program.machine.replace(devices=devices))
    rate, mfu, _, cost = headlines(unknown, 3.0, step_time(program, 0.5))
    assert (rate.name, rate.value) == ("Samples per second", "3")
    assert (mfu.value, cost.value) == ("–", "–")
    assert "--price" in cost.aside
    assert step_time(program, 0.5) == Headline("Time per update", "500 ms", "1,000 updates take 500 s")
