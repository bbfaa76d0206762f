"""Rules for plans whose CPU replicas compute their share of an update with weights of an earlier one."""

from pipedejavu.plan.plan import Plan
from pipedejavu.plan.plan_rule import Rule


def _is_late(plan: Plan) -> bool:
    return plan.version.kind == "late"


LATE_RULES = (
    Rule(
        lambda plan, _: _is_late(plan) and plan.place.cpu_replicas == 0,
        "version 'late' gives older weights to CPU replicas, and the plan has none",
        "set place.cpu_replicas to 1 or more, as preset:late-share does, or version.kind to 'sync'",
    ),
    Rule(
        lambda plan, _: (
            _is_late(plan)
            and (plan.reduce.wire, plan.reduce.gate, plan.reduce.combiner) != ("all-reduce", "barrier", "sum")
        ),
        "version 'late' adds the shares of all replicas to one sum, in a fixed order; wire '{wire}', gate '{gate}' and"
        " combiner '{combiner}' do not",
        "set reduce.wire to 'all-reduce', reduce.gate to 'barrier' and reduce.combiner to 'sum'",
    ),
    Rule(
        lambda plan, _: _is_late(plan) and (plan.keep.kind != "replicated" or plan.place.stage_replicas is not None),
        "under version 'late' every replica makes all updates itself, which keep '{keep}' or place.stage_replicas would"
        " divide",
        "set keep.kind to 'replicated' and leave place.stage_replicas out, or use version 'sync'",
    ),
    Rule(
        lambda plan, _: _is_late(plan) and (plan.precision.compute == "fp16" or plan.reduce.has_buffer_broadcast),
        "under version 'late' a share begins before the previous update is made, so replicas have no common loss scale"
        " for fp16 and no common moment to broadcast running statistics",
        "set precision.compute to 'bf16' or 'fp32' and switch reduce.has_buffer_broadcast off, or use version 'sync'",
    ),
)
