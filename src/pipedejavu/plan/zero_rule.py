"""Rules for state that is divided over replicas (ZeRO)."""

from pipedejavu.facts import Profile
from pipedejavu.plan.plan import Plan
from pipedejavu.plan.plan_rule import PIPELINES, Rule, num_replicas, ties_cross_stages


def _is_zero(plan: Plan) -> bool:
    return plan.keep.kind.startswith("zero")


def _has_one_replica(plan: Plan) -> bool:
    place = plan.place
    return max(num_replicas(plan), *(place.stage_replicas or (1,))) == 1 and place.kind != "bidirectional"


def _divides_ties_unlike(plan: Plan, profile: Profile) -> bool:
    is_unlike = len({*(plan.keep.zeros or ())}) > 1 or plan.place.kind == "bidirectional"
    return is_unlike and ties_cross_stages(plan, profile)


ZERO_RULES = (
    Rule(
        lambda plan, _: plan.keep.kind == "zero-3" and plan.order.kind in PIPELINES and not plan.keep.persists,
        "keep 'zero-3' in a pipeline gathers all weights again for every microbatch",
        "set keep.persists so that they stay for the batch, or use 'zero-1'",
    ),
    Rule(
        lambda plan, _: plan.keep.zeros is not None and plan.keep.kind != f"zero-{max(plan.keep.zeros)}",
        "keep '{keep}' is not the highest ZeRO stage in keep.zeros",
        "set keep.kind to the highest of them, or leave keep.zeros out",
    ),
    Rule(
        lambda plan, _: plan.keep.zeros is not None and len(plan.keep.zeros) != plan.num_stages,
        "keep.zeros has {zeros} entries, one for each stage, and the plan has {stages}",
        "give as many as there are stages, or leave keep.zeros out",
    ),
    Rule(
        lambda plan, _: _is_zero(plan) and plan.version.kind != "sync",
        "keep '{keep}' updates its shards in place, and version '{version}' reads weights that are older",
        "use version 'sync' with an order that flushes, such as '1f1b', or keep 'replicated'",
    ),
    Rule(
        lambda plan, _: _is_zero(plan) and plan.reduce.wire != "reduce-scatter",
        "keep '{keep}' divides state over replicas, which wire '{wire}' does not",
        "set reduce.wire to 'reduce-scatter'",
    ),
    Rule(
        lambda plan, _: _is_zero(plan) and (plan.reduce.combiner != "sum" or plan.feed.is_own),
        "keep '{keep}' makes one update of the gradients of all replicas; combiner '{combiner}' with feed '{feed}' does"
        " not",
        "set reduce.combiner to 'sum' and feed.kind to 'microbatch', or use keep 'replicated'",
    ),
    Rule(
        lambda plan, _: _is_zero(plan) and _has_one_replica(plan),
        "keep '{keep}' divides state over replicas, and the plan has one",
        "use more replicas, or keep 'replicated'",
    ),
    Rule(
        lambda plan, _: _is_zero(plan) and plan.place.shards > 1,
        "keep '{keep}' divides the state of whole operators, and each of {shards} shards of a layout cut holds a part",
        "use keep 'replicated', or set place.shards to 1",
    ),
    Rule(
        lambda plan, _: _is_zero(plan) and plan.precision.moments == "int8",
        "keep '{keep}' divides moments at other places than between the blocks of values that int8 scales together",
        "set precision.moments to 'bf16' or 'fp32', or use keep 'replicated'",
    ),
    Rule(
        lambda plan, profile: _is_zero(plan) and _divides_ties_unlike(plan, profile),
        "stages that share tied weights must divide them alike, and place '{place}' with keep.zeros '{each}' does not",
        "give all stages of a linear place the same ZeRO stage, or untie the weights",
    ),
)
