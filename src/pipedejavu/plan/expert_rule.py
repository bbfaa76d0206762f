"""Rules for plans that divide experts."""

from math import inf

from pipedejavu.facts import Profile
from pipedejavu.plan.plan import Plan
from pipedejavu.plan.plan_rule import Rule

EXPERT_RULES = (
    Rule(
        lambda plan, _: plan.divides_experts and len(plan.cut.layouts) > 1,
        "layout 'expert' divides experts over workers with different samples, and '{cut}' divides other operators too",
        "leave the other layouts out",
    ),
    Rule(
        lambda plan, _: (
            plan.divides_experts
            and plan.place.shards > 1
            and (plan.feed.kind != "microbatch" or plan.version.kind != "sync" or plan.reduce.wire != "all-reduce")
        ),
        "layout 'expert' exchanges rows among workers that each train microbatches of their own for the same update",
        "use feed 'microbatch', version 'sync' and wire 'all-reduce'",
    ),
    Rule(
        lambda plan, _: plan.divides_experts and (plan.keep.kind != "replicated" or not plan.order.is_eager),
        "layout 'expert' keeps each unit as a piece of its own, whose state is on the device",
        "use keep 'replicated', and set order.is_eager",
    ),
    Rule(
        lambda plan, _: plan.divides_experts and plan.is_compiled,
        "layout 'expert' exchanges rows inside units, which compiled units cannot do",
        "switch is_compiled off",
    ),
    Rule(
        lambda plan, profile: plan.divides_experts and not any(unit.expert_share for unit in profile.units),
        "layout 'expert' divides experts, and no unit of this model has any that are stacked in one parameter",
        "use another plan, such as preset:ddp, or measure the model again (--renew)",
    ),
    Rule(
        lambda plan, profile: plan.divides_experts and any(0 < n < plan.place.shards for n in _experts(profile)),
        "layout 'expert' divides {experts} experts, the fewest of a unit, over {shards} workers",
        "set place.shards to {experts} or less",
    ),
    Rule(
        lambda plan, profile: plan.divides_experts and any(n % plan.place.shards for n in _experts(profile)),
        "layout 'expert' gives each of {shards} workers as many experts, and a unit has {uneven_experts}",
        "set place.shards to a number that divides the experts of every unit",
    ),
    Rule(
        lambda plan, profile: plan.divides_experts and _fewest_rows(plan, profile) < 1,
        "the workers of layout 'expert' send {expert_rows:.0f} rows of their microbatches to {experts} experts, of"
        " which some get none",
        "use larger microbatches",
    ),
    Rule(
        lambda plan, _: plan.cut.capacity is not None and not plan.divides_experts,
        "cut.capacity limits the rows of experts, and cut '{cut}' divides none",
        "leave cut.capacity out, or use layout 'expert'",
    ),
)


def expert_facts(plan: Plan, profile: Profile) -> dict[str, object]:
    """Returns the numbers that the rules name."""
    experts = _experts(profile)
    return {
        "experts": min(experts, default=0),
        "uneven_experts": next((n for n in experts if n % plan.place.shards), 0),
        "expert_rows": min(_rows(plan, profile), default=0.0),
    }


def _experts(profile: Profile) -> list[int]:
    """Returns the experts of each unit that has some."""
    return [unit.num_experts for unit in profile.units if unit.num_experts]


def _rows(plan: Plan, profile: Profile) -> list[float]:
    """Returns the rows of one microbatch of all workers that divide the experts, for each unit that has some."""
    samples = plan.feed.samples * plan.place.shards
    return [unit.expert_rows * samples for unit in profile.units if unit.num_experts and unit.expert_rows]


def _fewest_rows(plan: Plan, profile: Profile) -> float:
    """Returns the fewest rows per expert."""
    return min(_rows(plan, profile), default=inf) / max(_experts(profile), default=1)
