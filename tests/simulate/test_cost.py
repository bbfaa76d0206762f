"""What actions cost: the halves of a backward."""

from pipedejavu.facts import Cost
from pipedejavu.plan import preset
from pipedejavu.program import compile as compile_plan
from pipedejavu.program import verify
from pipedejavu.simulate import simulate, unit_costs


def makespan_s(input_backward: Cost | None) -> float:
    plan, profile, machine = unit_costs(preset("zb-h1").at(workers=1, microbatches=3), {})
    units = [
        unit.but(times={kind: time.but(input_backward=input_backward) for kind, time in unit.times.items()})
        for unit in profile.units
    ]
    program = compile_plan(plan, profile.but(units=tuple(units)), machine)
    return simulate(program, verify(program)).makespan_s


def test_the_input_half_is_the_rest_of_the_backward_unless_it_is_known() -> None:
    assert makespan_s(None) == makespan_s(Cost(per_sample_s=1.0)) == 3 * (1 + 1 + 1)
    assert makespan_s(Cost(per_sample_s=1.5)) == 3 * (1 + 1.5 + 1)
