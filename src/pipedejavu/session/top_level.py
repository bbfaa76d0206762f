"""The functions of the package's top level: probe a machine, profile a model, plan its training, simulate a plan."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipedejavu.engine import AdamW, Optimizer
from pipedejavu.facts import InputError, Machine, Profile
from pipedejavu.plan import Plan
from pipedejavu.planner.planning import choose_plan as search_plan
from pipedejavu.planner.planning import known_machine, survey_machine
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.search import RankedPlan, SearchOptions
from pipedejavu.session.torch_optimizer import read_optimizer
from pipedejavu.session.trainer_plan import TrainerOptions, TrainerPlan, read_sample
from pipedejavu.simulate import Prediction
from pipedejavu.simulate import simulate as simulate_program

_ALONE = TrainerOptions(
    plan="auto",
    workers=1,
    seed=0,
    machine=None,
    replan=False,
    hang_after_s=None,
    check_replicas=0,
    check_model=False,
)


def probe(*, renew: bool = False) -> Machine:
    """Measures this machine: devices, memory and links, each with its spread.

    A machine is measured once, in about a minute, and its survey is kept; `renew` measures it again. It is the survey
    that `plan="auto"` uses. `pipedejavu probe` makes a longer one.
    """
    return survey_machine(lambda *_: None, renews=renew)


def profile(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | Optimizer | None = None,
    *,
    machine: Machine | None = None,
) -> Profile:
    """Cuts a model into units, and measures each on all devices of this machine.

    Arguments have the meaning that they have for a `Trainer`; `batch` is one that it would be given. The model stays as
    it was.
    """
    first, reduction = read_sample(model, loss, batch)
    groups = read_optimizer(model, optimizer, None)
    if isinstance(optimizer, torch.optim.Optimizer):
        assert groups is not None
        optimizer_of = groups.for_units
    else:
        record: Optimizer = optimizer or AdamW(lr=1e-3)
        optimizer_of = lambda _: record  # type: ignore[assignment,return-value]  # noqa: E731
    options = TrainerOptions(**{**vars(_ALONE), "machine": machine})
    return TrainerPlan(model, loss, optimizer_of, options).measure(first, reduction)


def plan(profile: Profile, machine: Machine | None = None, *, batch_size: int = 32, **options: Any) -> RankedPlan:
    """Searches for the fastest plan that fits, for updates of `batch_size` samples.

    `machine` is this one by default; it may be any, such as one of a cluster composed from known devices. Further
    `options` are those of `pipedejavu.search.SearchOptions`. The result holds the plan, its forecast and its reasons.
    Raises InputError, with the smallest remedy, if no plan fits.
    """
    known = [name for name in SearchOptions.model_fields if name not in ("batch", "is_runnable")]
    if unknown := sorted(options.keys() - known):
        raise InputError(f"plan() has no option '{unknown[0]}'; its options are {', '.join(known)}")
    return search_plan(profile, machine or known_machine(), SearchOptions(batch=batch_size, **options))


def simulate(
    plan: Plan | RankedPlan | Program, profile: Profile | None = None, machine: Machine | None = None
) -> Prediction:
    """Predicts a run: the time of every action, memory over time and the idle time of each worker.

    `plan` is what `plan()` returns or a compiled program, which need nothing else; or a Plan, with the profile and the
    machine to run it on.
    """
    if isinstance(plan, Program):
        return simulate_program(plan)
    if isinstance(plan, RankedPlan):
        profile, machine, plan = profile or plan.profile, machine or plan.machine, plan.plan
    if profile is None or machine is None:
        missing = " and ".join(name for name, part in (("profile", profile), ("machine", machine)) if part is None)
        raise InputError(f"simulating a Plan needs its {missing}; call simulate(plan, profile, machine)")
    return simulate_program(compile_plan(plan, profile, machine))
