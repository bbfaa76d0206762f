"""`train --plan preset:gems-mast --microbatches 4` trained on 2 per update: what is asked is used, or refused."""

import pytest

from pipedejavu.cli.input_files import read_plan
from pipedejavu.facts import InputError
from pipedejavu.plan import Plan, preset, presets
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import unit_costs

ASKED, SAMPLES = 8, 3


def plan_to_run(text: str, **sizes: int) -> Plan:
    return read_plan(text, sizes, is_run=True)


@pytest.mark.parametrize("name", presets())
def test_an_update_has_the_microbatches_and_samples_that_were_asked_for(name: str) -> None:
    fixed = preset(name).per_update
    if fixed is not None:
        with pytest.raises(
            InputError, match=f"plan '{name}' makes each update of {fixed} microbatch(es)?, not {ASKED};"
        ):
            plan_to_run(f"preset:{name}", microbatches=ASKED, samples=SAMPLES)
    asked = ASKED if fixed is None else fixed
    program = compile_plan(
        *unit_costs(plan_to_run(f"preset:{name}", microbatches=asked, samples=SAMPLES), {}), fold=False
    )
    plan = program.plan
    experts = plan.place.shards if plan.divides_experts else 1  # such shards train samples of their own
    copies = 1 if plan.feed.kind == "share" else plan.place.replicas * experts
    assert sum(program.sizes) == asked * SAMPLES * copies
    assert set(program.sizes) == {SAMPLES}


def test_a_preset_that_differs_only_in_its_number_is_the_remedy() -> None:
    with pytest.raises(InputError, match=r"--samples, or use preset:gems-master, whose updates have any number$"):
        plan_to_run("preset:gems-mast", microbatches=4)
    with pytest.raises(InputError, match=r"give larger ones with --samples$"):
        plan_to_run("preset:pipedream", microbatches=4)


def test_a_simulation_still_takes_microbatches_of_several_updates() -> None:
    plan = read_plan("preset:pipedream", {"microbatches": 4})
    assert (plan.feed.microbatches, plan.steps) == (1, 4)


def test_an_own_plan_without_a_flush_is_refused_too(tmp_path) -> None:
    path = str(tmp_path / "own.json")
    preset("pipedream").plan.replace(name="own").save(path)
    with pytest.raises(InputError, match="plan 'own' makes each update of 1 microbatch, not 2;"):
        plan_to_run(path, microbatches=2)
