"""Corrections of stale plans: the forms to try, which comes first, and what a stale plan gives up."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Literal

from pipedejavu.facts import Profile, Record, format_bytes
from pipedejavu.plan import Decision, Plan, Version, faults_of
from pipedejavu.search.search_result import RankedPlan
from pipedejavu.search.study_accuracy import LostAccuracy, accuracy_study, staleness_of

Correction = Literal["auto", "none", "weight-prediction", "discrepancy", "delay-compensation", "rates"]
RATE_UPDATES = 60
"""Updates over which rates by delay rise, as in the study."""
_CHANGES: dict[str, dict[str, object]] = {
    "none": {},
    "weight-prediction": {"correction": "weight-prediction"},
    "discrepancy": {"correction": "discrepancy"},
    "delay-compensation": {"correction": "delay-compensation"},
    "rates": {"rate_updates": RATE_UPDATES},
}


def corrected(plan: Plan, profile: Profile, asked: Correction) -> list[Plan]:
    """Returns the legal forms of an uncorrected stale pipeline with the correction that is asked for.

    For `auto`, those whose accuracy was measured. A pipeline with two buffered versions is also tried with a stash,
    whose last stages are less stale.
    """
    plans = []
    for name in [name for name in _CHANGES if asked in ("auto", name)]:
        for kind in dict.fromkeys((plan.version.kind, "stash")):
            version = Version.model_validate({"kind": kind, **_CHANGES[name]})
            if version == plan.version:
                continue
            title = plan.name if kind == plan.version.kind else plan.name.replace("2BW", "PipeDream")
            reason = (
                "it was asked for" if asked != "auto" else "forms are compared by the accuracy they lost in the study"
            )
            form = plan.replace(
                name=f"{title}, {name}" if name != "none" else title,
                version=version,
                keep=plan.keep if kind == plan.version.kind else plan.keep.replace(versions=None),
                decisions=(*plan.decisions, Decision(axis="version", choice=str(version), reason=reason)),
            )
            is_judged = asked != "auto" or accuracy_study().lost(form) < inf
            if is_judged and not faults_of(form, profile):
                plans.append(form)
    return plans


def is_corrected(plan: Plan) -> bool:
    """Whether a plan does anything about the staleness of its gradients."""
    return plan.version.correction != "none" or plan.version.rate_updates > 0


def least_loss_first(ordered: Sequence[RankedPlan], value: Callable[[RankedPlan], float]) -> list[RankedPlan]:
    """Returns the plans; if the first is stale, that of its forms first which lost the least accuracy in the study.

    The form must still be faster than every exact plan.
    """
    first = ordered[0] if ordered else None
    if first is None or not first.plan.is_flush_free:
        return [*ordered]
    exact = min((value(each) for each in ordered if not each.plan.is_flush_free), default=inf)
    alike = [each for each in ordered if _base(each.plan) == _base(first.plan) and value(each) < exact]
    best = min(alike or [first], key=lambda each: (accuracy_study().lost(each.plan), value(each)))
    return [best, *(each for each in ordered if each is not best)]


def shown(ordered: Sequence[RankedPlan], count: int) -> list[RankedPlan]:
    """Returns the first plans; the last of several is the fastest exact one if all others are stale."""
    first = [*ordered[:count]]
    if count > 1 and all(each.plan.is_flush_free for each in first):
        exact = next((each for each in ordered if not each.plan.is_flush_free), None)
        first[-1:] = [exact] if exact and len(first) == count else first[-1:]
    return first


def _base(plan: Plan) -> Plan:
    """Returns what the forms of one stale pipeline have in common."""
    return plan.replace(name="", version=Version(), keep=plan.keep.replace(versions=None), decisions=(), steps=1)


class GivenUp(Record):
    """What a stale plan gives up against an exact one."""

    plan: str
    exact: str
    """The name of the fastest exact plan."""
    times_as_fast: float
    staleness: int
    """Updates by which gradients are late at most."""
    extra_bytes: float
    """What the fullest device needs more than under the exact plan."""
    measured: tuple[LostAccuracy, ...]
    """Accuracy that such plans lost in the study; empty if it was not measured."""
    measured_on: str = ""
    """The date of the study."""

    def __str__(self) -> str:
        updates = f"{self.staleness} update{'s' * (self.staleness != 1)}"
        memory = f"{format_bytes(abs(self.extra_bytes))} {'more' if self.extra_bytes >= 0 else 'less'}"
        accuracy = "what that costs in accuracy was not measured"
        if self.measured:
            late = self.measured[0].staleness
            where = "" if late == self.staleness else f" with gradients up to {late} update{'s' * (late != 1)} old"
            accuracy = f"in the study of {self.measured_on}{where}, {' and '.join(map(str, self.measured))} of accuracy"
        return (
            f"'{self.plan}' is {self.times_as_fast:.2f} times as fast as the fastest exact plan, '{self.exact}'; its"
            f" gradients are up to {updates} old, its fullest device needs {memory}, and {accuracy}."
        )


def what_is_given_up(best: RankedPlan, exact: RankedPlan) -> GivenUp:
    """Returns what a stale plan gives up against the fastest exact plan."""
    needs = [max(need.need_bytes for need in plan.memory) for plan in (best, exact)]
    measured = accuracy_study().of(best.plan)
    return GivenUp(
        plan=best.plan.name,
        exact=exact.plan.name,
        times_as_fast=exact.time_per_sample_s / best.time_per_sample_s,
        staleness=staleness_of(best.plan),
        extra_bytes=needs[0] - needs[1],
        measured=measured,
        measured_on=accuracy_study().date if measured else "",
    )
