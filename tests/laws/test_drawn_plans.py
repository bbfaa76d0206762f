"""Whatever `plan` prints for devices that are here, `train` runs: plans drawn from the search's whole space.

A draw takes a model, four devices, a problem, a subspace, a cut with the ZeRO stage of each pipeline stage, and one of
the forms that the search simulates for it: other orders, overlapped reductions, older weights, shares of the batch.
Each plan runs for two updates with a thread per worker and is audited; synchronous ones also equal a plain loop.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.engine import AdamW, judge
from pipedejavu.facts import Device, Host, Link, Machine, Profile
from pipedejavu.plan import Plan, Precision, faults_of
from pipedejavu.profile import UnitSample
from pipedejavu.profile.tp_size import with_divisions
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import SearchOptions
from pipedejavu.search.candidate_plan import CandidatePlan, PlanningProblem, Stage
from pipedejavu.search.mcmc import _Chain
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.plan_writer import other_orders, overlapped, stashed, why_not_run, write
from pipedejavu.search.planning_problem import problems_of
from pipedejavu.search.stage_cost import StageCosts
from pipedejavu.search.subspace import subspaces
from tests.engine.case import (
    Case,
    calm_gpt,
    convnet,
    convnet_samples,
    gpt,
    gpt_samples,
    mlp,
    mlp_samples,
    sum_of_losses,
)
from tests.engine.case import profile_of as case_profile
from tests.engine.divided_case import heads, long_heads, long_samples, wide_mlp, wide_mlp_samples

MODELS = {
    "mlp": (mlp, mlp_samples),
    "gpt": (gpt, gpt_samples),
    "calm-gpt": (calm_gpt, gpt_samples),
    "convnet": (convnet, convnet_samples),
    "heads": (heads, gpt_samples),
    "wide-mlp": (wide_mlp, wide_mlp_samples),
    "tokens": (long_heads, long_samples),
}
BATCH, UNITS, MOST_DRAWS = 8, 8, 40
NUM_PLANS, NUM_SAMPLED = 200, 6


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def machine_of(chance: random.Random) -> Machine:
    """Returns four devices that CPU threads stand in for, half the time unequal.

    With little memory, plans recompute and divide; they run in more.
    """
    type_, memory = chance.choice(("cpu", "gpu")), chance.choice((2500, 4000, 2**40))
    slow = chance.choice((0, 0, 1, 2))
    kinds = ["cpu"] * (4 - slow) + ["slow"] * slow
    devices = [
        Device(name=f"c{n}", kind=kind, type=type_, host="h", memory_bytes=memory) for n, kind in enumerate(kinds)
    ]
    if type_ == "gpu":
        devices.append(Device(name="host", kind="cpu", type="cpu", host="h", memory_bytes=2**40))
    return Machine(name="m", hosts=(Host(name="h"),), devices=tuple(devices), links=(Link(bytes_per_s=1e3),))


def profile_of(sample: UnitSample, ties: int) -> Profile:
    profile = case_profile(sample.units, ties)
    doubled = (u.replace(times=u.times | {"slow": u.times["cpu"].times(2.0)}) for u in profile.units)
    return with_divisions(profile.replace(units=tuple(doubled)), sample)


def candidate_of(problem: PlanningProblem, options: SearchOptions, chance: random.Random) -> CandidatePlan | None:
    """Returns a candidate of a random subspace, or shares of the batch for unequal devices."""
    kinds = {problem.machine.device(name).kind for name in problem.devices}
    if len(kinds) > 1 and len(problem.degrees) == 1 and not problem.tp_groups and chance.random() < 0.2:
        samples = chance.choice((1, 2))
        stage = Stage(0, len(problem.profile.units), problem.devices[: chance.choice((2, 3, 4))])
        return CandidatePlan(problem, (stage,), samples, options.batch // samples, is_shared=True)
    every = [s for s in subspaces(problem, options) if any(s.groupings(len(problem.profile.units)))]
    if not every:
        return None
    # Each kind of mode has the same chance, however many subspaces have it.
    key = chance.choice(sorted({(str(s.mode), s.is_stale, len(s.order) == max(s.sizes)) for s in every}))
    subspace = chance.choice([s for s in every if (str(s.mode), s.is_stale, len(s.order) == max(s.sizes)) == key])
    chain = _Chain(Pool(options), every, chance)
    candidate, _, _ = chain._evaluated(subspace, chain._equal(subspace))
    for _ in range(chance.randrange(4) if len(candidate.stages) > 1 else 0):
        candidate = replace(candidate, stages=chain._moved(candidate))
    if subspace.mode.zero == 1 and len(candidate.stages) > 1 and chance.random() < 0.3:  # as `Pool.polish` offers it
        stages = tuple(replace(stage, zero=3 * stage.zero) for stage in candidate.stages)
        candidate = replace(candidate, stages=stages, mode=replace(candidate.mode, zero=3))
    zero = max(stage.zero for stage in candidate.stages)
    return replace(candidate, mode=replace(candidate.mode, zero=zero))


def plan_of(profile: Profile, machine: Machine, options: SearchOptions, chance: random.Random) -> Plan | None:
    """Returns one of the plans that the search would simulate for a random candidate, if the engine runs it."""
    problem = chance.choice([*problems_of(profile, machine, options, all_devices=True)])
    candidate = candidate_of(problem, options, chance)
    if candidate is None:
        return None
    plan = write(candidate, options, StageCosts(candidate.problem, candidate.samples))
    forms = [plan, *other_orders(plan, profile), *stashed(plan, options)]
    forms += [form for p in forms if (form := overlapped(p, profile)) is not None]
    plan = chance.choice(forms)
    return None if faults_of(plan, profile) or why_not_run(plan) else plan


def draw(seed: int) -> Case:
    """Returns a case of a plan that is legal and that `plan` prints as one that runs."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(MOST_DRAWS):
        model = chance.choice([*MODELS])
        build, make_samples = MODELS[model]
        clip, compute = chance.choice((("none", "fp32"), ("global", "fp32"), ("none", "bf16")))
        precision = Precision(compute="bf16", masters="split") if compute == "bf16" else Precision()
        options = SearchOptions(batch=BATCH, staleness=chance.choice((0, 2)), clip=clip, precision=precision)
        torch.set_default_dtype(torch.float32 if compute == "bf16" else torch.float64)
        units, machine = build(UNITS), machine_of(chance)
        optimizer = AdamW(lr=0.01, eps=0.01)
        case = Case(Plan(name="none"), units, make_samples, optimizer, 0.1 if clip == "global" else None)
        samples = make_samples([2], torch.Generator().manual_seed(0))
        sample = UnitSample(units, samples.inputs(0), samples.targets(0), sum_of_losses)
        profile = profile_of(sample, len(case.job.ties))
        if (plan := plan_of(profile, machine, options, chance)) is None:
            continue
        plan = plan if plan.is_flush_free else plan.replace(steps=2)
        case = replace(case, plan=plan, sizes=(plan.feed.samples,))
        roomy = machine.replace(devices=tuple(d.replace(memory_bytes=2**50) for d in machine.devices))
        case.__dict__["program"] = compile_plan(plan, profile, roomy, fold=False)
        return case
    raise AssertionError(f"seed {seed}: none of {MOST_DRAWS} draws is legal")


def check(seed: int) -> str:
    """Runs the plan of a seed for two updates and audits it; returns what it was."""
    case = draw(seed)
    plan = case.program.plan
    if plan.precision.compute == "bf16":
        verdict = judge(case.program, case.job, case.batches, case.outcome)
        if plan.tensor_shards == 1:
            assert verdict.is_passed, (plan, verdict)
        else:  # parts of sums are rounded to bf16 before they are added, which the replay's tolerance does not know
            off = {name: d / verdict.tolerances[name] for name, d in verdict.differences.items()}
            assert max(off.values()) <= 2, (plan, off)
    else:
        assert case.audit() <= case.tolerance, plan
        if plan.version.kind == "sync" and plan.feed.kind != "share" and not has_batch_statistics(case):
            assert case.furthest(case.trained_plainly()) <= 1e-12, plan
    assert case.moved() > 0
    return f"{plan.name} · {plan.axes()}"


def has_batch_statistics(case: Case) -> bool:
    return any(isinstance(m, torch.nn.BatchNorm2d) for _, unit in case.units for m in unit.modules())


@pytest.mark.parametrize("seed", range(NUM_SAMPLED))
def test_a_plan_of_the_search_runs(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SAMPLED, NUM_PLANS))
def test_every_plan_of_the_search_runs(seed: int) -> None:
    check(seed)
