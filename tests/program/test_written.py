"""An order that the plan writes out, slot by slot."""

import pytest

from pipedejavu.analysis import verify
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan, preset
from pipedejavu.program import SCHEDULES
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import simulate, unit_costs


def written(*rows: str, microbatches: int = 4, name: str = "gpipe") -> Plan:
    plan = preset(name).at(workers=len(rows), microbatches=microbatches)
    return plan.replace(order=plan.order.replace(kind="written", rows=rows))


def rows_of(order: str, workers: int, microbatches: int) -> list[str]:
    return [
        " ".join(f"{slot.kind}{slot.k}" for slot in SCHEDULES[order](rank, workers, 1, microbatches))
        for rank in range(workers)
    ]


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_a_known_schedule_written_out_is_the_same_program(order: str) -> None:
    known = preset(order).at(workers=3, microbatches=5)
    plan = written(*rows_of(order, 3, 5), microbatches=5, name=order)
    one, two = (compile_plan(*unit_costs(each, {})) for each in (known, plan))
    assert [worker.actions for worker in one.workers] == [worker.actions for worker in two.workers]
    assert simulate(two, verify(two)).makespan_s == simulate(one, verify(one)).makespan_s


def test_it_travels_in_a_plan_file() -> None:
    plan = written("F0 F1 B0 B1", "F0 B0 F1 B1", microbatches=2)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.axes()["order"] == "written"


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (
            written("F0 B0", "F0 B0", microbatches=2),
            "workers F and later B of each of the 2 microbatches once",
        ),
        (written("F0 B0", "F0 B0 B0", microbatches=1), "must give each of the 2 workers"),
        (written("B0 F0", "F0 B0", microbatches=1), "must give each of the 2 workers"),
        (written("F0 Bx", "F0 B0", microbatches=1), "must give each of the 2 workers"),
        (
            preset("gpipe").at(workers=2).replace(order=preset("gpipe").at().order.replace(kind="written")),
            "order 'written' has rows, and no other order has; give order.rows with order 'written', or leave both out",
        ),
        (
            preset("gpipe").at(workers=2).replace(order=preset("gpipe").at().order.replace(rows=("F0 B0", "F0 B0"))),
            "order 'written' has rows, and no other order has",
        ),
        (
            preset("zb-v").at(workers=2).replace(order=written("F0 B0", "F0 B0", microbatches=1).order),
            "an order that is written out needs a linear place and feed 'microbatch'",
        ),
    ],
)
def test_what_is_not_written_out_is_refused(plan: Plan, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        compile_plan(*unit_costs(plan, {}))
    assert fault in str(refused.value)


def test_rows_that_wait_for_each_other_are_refused() -> None:
    program = compile_plan(*unit_costs(written("F0 B0 F1 B1", "F0 F1 B0 B1", microbatches=2), {}))
    with pytest.raises(InputError, match="wait for each other in a circle"):
        verify(program)
