"""Whether the units of a plan run compiled: if the steps asked for repay the compilation.

The profile is that of what runs. With `auto`, the most that compiling could gain is first compared with what it costs;
compiled units are measured only if that could pay.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from pipedejavu.facts import InputError, Machine, Profile, UnitTime, format_seconds
from pipedejavu.plan import Decision, Plan
from pipedejavu.program import compile as compile_plan
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.simulate import simulate

CompileMode = Literal["auto", "on", "off"]

ASSUMED_COMPILE_S: dict[str, float] = {"cpu": 30.0, "gpu": 3.0}
"""Assumed time that compiling one form of unit, forward and backward, delays training. The workers of a CPU share its
cores with the C++ compiler. On a GPU the measurement has filled the compiler's cache on disk."""
MOST_GAIN = 0.5
"""The largest share of a step that compiling is assumed to save, before it is measured."""
ASSUMED_STEPS = {"cpu": 200, "gpu": 1000}
"""Steps of a loop that does not say how many it makes. On a CPU even measuring compiled units takes minutes."""


_SAVES = ("activation_bytes", "activation_parts", "shared_bytes")
"""Fields of a unit: what it saves for its backward, which a compiler fuses."""
_FORECAST_STEPS = 4
"""Most updates of a program that are simulated to compare eager with compiled units."""


class CompiledPlan(NamedTuple):
    """A plan that says whether its units are compiled, with the profile of what runs."""

    plan: Plan
    profile: Profile


_MASKED = "feed 'mask' runs units with other sizes in each update, and compiled units have one"


def asked_plan(plan: Plan, mode: CompileMode) -> Plan | None:
    """Returns the plan with its units compiled or not, as the user or the plan asks; None if measurements decide."""
    if mode == "on" or (mode == "auto" and plan.is_compiled):
        check_order(plan)
        return plan.replace(is_compiled=True)
    return plan.replace(is_compiled=False) if mode == "off" else None


def refuse_compile(plan: Plan, eager: Profile, machine: Machine, steps: int | None) -> Plan:
    """Returns the plan with the decision not to compile if that is known before compiled units are measured.

    Otherwise returns the plan as it is. `steps` is None for a loop of unknown length.
    """
    return _with(plan, _refusal(plan, eager, machine, _num_steps(plan, machine, steps)))


def decide_compile(plan: Plan, eager: Profile, compiled: Profile, machine: Machine, steps: int | None) -> CompiledPlan:
    """Decides, by measurements of both, whether the units of a plan are compiled."""
    compiled = with_times(eager, compiled, plan.feed.samples)
    steps = _num_steps(plan, machine, steps)
    gain_s = _step_s(plan, eager, machine) - _step_s(plan.replace(is_compiled=True), compiled, machine)
    cost_s = _cost_s(plan, eager, machine)
    gain = f"it saves {format_seconds(max(gain_s, 0.0))} of a step as measured"
    if gain_s * steps <= cost_s:
        reason = f"{gain}, and {steps} steps do not repay about {format_seconds(cost_s)} of compiling"
        return CompiledPlan(_with(plan, reason), eager)
    reason = f"{gain}, which repays about {format_seconds(cost_s)} of compiling within {steps} steps"
    decision = Decision(axis="compile", choice="on", reason=reason)
    return CompiledPlan(plan.replace(is_compiled=True, decisions=(*plan.decisions, decision)), compiled)


def settle_compile(
    plan: Plan, eager: Profile | None, machine: Machine, mode: CompileMode, measure: Callable[[bool], Profile]
) -> CompiledPlan:
    """Decides whether the units of a plan are compiled, for a loop of unknown length; measures what is not known."""
    if (asked := asked_plan(plan, mode)) is not None:
        return CompiledPlan(asked, eager if eager and not asked.is_compiled else measure(asked.is_compiled))
    eager = eager or measure(False)
    refused = refuse_compile(plan, eager, machine, None)
    if refused.decisions != plan.decisions:
        return CompiledPlan(refused, eager)
    return decide_compile(plan, eager, measure(True), machine, None)


def with_times(eager: Profile, compiled: Profile, samples: int) -> Profile:
    """Returns a profile with the times and saved bytes of compiled units, which were measured at one microbatch size.

    Units and kinds of devices that were not measured compiled keep theirs.
    """
    units = []
    for unit, other in zip(eager.units, compiled.units, strict=True):
        known = {kind: time for kind, time in other.times.items() if not time.is_estimated and kind in unit.times}
        times = {kind: _scaled(unit.times[kind], time, samples) for kind, time in known.items()}
        saves = {name: getattr(other, name) for name in _SAVES} if known else {}
        units.append(unit.replace(times={**unit.times, **times}, **saves))
    return eager.replace(units=tuple(units))


def _scaled(eager: UnitTime, compiled: UnitTime, samples: int) -> UnitTime:
    """Returns the times of an eager unit at all sizes, in the proportion of compiled to eager at one size."""
    lines = {}
    for part in ("forward", "backward", "recompute"):
        before, after = getattr(eager, part), getattr(compiled, part)
        factor = after.work_s(samples) / before.work_s(samples) if before.work_s(samples) else 1.0
        lines[part] = before.times(factor).replace(issue_s=after.issue_s, spread=after.spread)
    return eager.replace(**lines)


def _num_steps(plan: Plan, machine: Machine, steps: int | None) -> int:
    """Returns the steps, or an assumed number if the loop does not say."""
    return max(ASSUMED_STEPS[type_] for type_ in _types(plan, machine)) if steps is None else steps


def with_mode(plan: Plan, mode: CompileMode) -> Plan:
    """Returns a plan whose profile is known, compiled or not as a user asks, and with `auto` as it was decided."""
    if mode == "on":
        check_order(plan)
    return plan if mode == "auto" else plan.replace(is_compiled=mode == "on")


def check_order(plan: Plan) -> None:
    """Raises InputError if units of the plan cannot be compiled."""
    if plan.splits_backward:
        raise InputError(
            f"order '{plan.order.kind}' splits the backward, which compiled units cannot do; leave compile at auto or"
            " off, or use order '1f1b'"
        )
    if plan.feed.kind == "mask":
        raise InputError(f"{_MASKED}; leave compile at auto or off, or use another plan")


def read_mode(choice: object) -> CompileMode:
    """Returns the mode that a user asks for: auto, on or off, or a bool."""
    if isinstance(choice, bool):
        return "on" if choice else "off"
    if choice == "auto" or choice == "on" or choice == "off":
        return choice
    raise InputError(f"compile is 'auto', 'on' or 'off', or True or False, not {choice!r}")


def _with(plan: Plan, refusal: str) -> Plan:
    """Returns a plan with the decision not to compile, if there is a reason."""
    if not refusal:
        return plan
    return plan.replace(decisions=(*plan.decisions, Decision(axis="compile", choice="off", reason=refusal)))


def _refusal(plan: Plan, profile: Profile, machine: Machine, steps: int) -> str:
    """Returns why the units of a plan are not compiled, as far as it is known before they are measured."""
    if plan.splits_backward:
        return f"order '{plan.order.kind}' splits the backward, which compiled units cannot do"
    if plan.feed.kind == "mask":
        return _MASKED
    if missing := _missing(_types(plan, machine)):
        return missing
    step_s, cost_s = _step_s(plan, profile, machine), _cost_s(plan, profile, machine)
    if MOST_GAIN * step_s * steps > cost_s:
        return ""
    most = f"{steps} steps of {format_seconds(step_s)} cannot repay"
    return f"{most} about {format_seconds(cost_s)} of compiling"


def _missing(types: Iterable[str]) -> str:
    """Returns what the compiler of torch needs on this host and does not find; empty if it has everything."""
    if "gpu" in types and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = (os.environ.get("CXX", ""), "g++", "clang++", "cl")
    if not any(name and shutil.which(name) for name in compilers):
        return "no C++ compiler is installed"
    return ""


def _types(plan: Plan, machine: Machine) -> set[str]:
    return {machine.device(name).type for name in assign_devices(plan, machine)}


def _step_s(plan: Plan, profile: Profile, machine: Machine) -> float:
    """Returns the forecast of an update."""
    plan = plan.replace(steps=min(plan.steps, _FORECAST_STEPS))
    return simulate(compile_plan(plan, profile, machine, fold=False)).makespan_s / plan.steps


def _cost_s(plan: Plan, profile: Profile, machine: Machine) -> float:
    """Returns the assumed time of compiling the distinct units: alike ones have one measurement."""
    distinct = {unit.replace(name="").to_json() for unit in profile.units}
    return len(distinct) * max(ASSUMED_COMPILE_S[type_] for type_ in _types(plan, machine))
