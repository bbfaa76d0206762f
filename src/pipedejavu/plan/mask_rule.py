"""Rules for masks: replicas that leave filters out to fit their budgets."""

from pipedejavu.plan.plan import Plan
from pipedejavu.plan.plan_rule import Rule


def _is_masked(plan: Plan) -> bool:
    return plan.feed.kind == "mask"


def _rows(plan: Plan) -> list[tuple[float, ...]]:
    return [plan.feed.budgets or (), *plan.feed.later_budgets]


MASK_RULES = (
    Rule(
        lambda plan, _: _is_masked(plan) and any(len(row) != plan.place.replicas for row in _rows(plan)),
        "feed 'mask' needs a budget for each of the {replicas} replicas",
        "set feed.budgets, and each row of feed.later_budgets, to that many numbers between 0 and 1",
    ),
    Rule(
        lambda plan, _: _is_masked(plan) and any(budget == 0 for row in _rows(plan) for budget in row),
        "feed 'mask' gives a replica a budget of 0, with which it computes nothing",
        "set its budget above 0, or leave the replica out",
    ),
    Rule(
        lambda plan, _: not _is_masked(plan) and bool(plan.feed.drops or plan.feed.later_budgets),
        "feed '{feed}' leaves no filters out, so feed.drops and feed.later_budgets have no meaning",
        "set feed.kind to 'mask', or leave them out",
    ),
    Rule(
        lambda plan, _: _is_masked(plan) and len({len(vector) for vector in plan.feed.drops}) > 1,
        "the vectors of feed.drops differ in length, and each has a share for every group of filters",
        "give all of them one length",
    ),
    Rule(
        lambda plan, _: (
            _is_masked(plan)
            and (
                plan.cut.kind != "whole"
                or plan.version.kind != "local"
                or plan.reduce.combiner != "average"
                or plan.keep.kind != "replicated"
            )
        ),
        "feed 'mask' has each replica train its own weights of the whole model and average them",
        "use cut 'whole', version 'local', combiner 'average' and keep 'replicated'",
    ),
    Rule(
        lambda plan, _: _is_masked(plan) and plan.precision.moments != "fp32",
        "{moments} moments are rounded in blocks, and feed 'mask' updates single filters",
        "leave precision.moments out",
    ),
)
