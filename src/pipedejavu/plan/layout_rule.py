"""Rules for plans that divide the sequence or the vocabulary."""

from pipedejavu.plan.plan import Plan
from pipedejavu.plan.plan_rule import Rule

ALONG_TOKENS = ("sequence", "vocabulary", "context")
"""Layouts of activations and of the vocabulary, beside those of operators."""
_OPERATORS = ("col", "row", "head")


def _has(plan: Plan, *layouts: str) -> bool:
    return any(layout in plan.cut.layouts for layout in layouts)


LAYOUT_RULES = (
    Rule(
        lambda plan, _: (
            _has(plan, "sequence", "vocabulary") and plan.cut.kind == "layout" and not _has(plan, *_OPERATORS)
        ),
        "cut '{cut}' divides the sequence or vocabulary beside heads, columns and rows, and has none of these",
        "add 'head', 'row', 'col' and 'row' to cut.layouts, or use layout 'context'",
    ),
    Rule(
        lambda plan, _: any(plan.cut.layouts.count(layout) > 1 for layout in ALONG_TOKENS),
        "cut '{cut}' names the layout of an axis twice",
        "name 'sequence', 'vocabulary' and 'context' once at most",
    ),
    Rule(
        lambda plan, _: _has(plan, "context") and len(plan.cut.layouts) > 1,
        "layout 'context' divides all activations along the sequence, and cut '{cut}' divides them otherwise too",
        "leave the other layouts out, or use 'sequence' in place of 'context'",
    ),
    Rule(
        lambda plan, _: (
            _has(plan, *ALONG_TOKENS)
            and plan.cut.kind == "chain"
            and plan.place.stage_shards is None
            and plan.place.shards == 1
        ),
        "cut '{cut}' divides activations over the workers of tensor-parallel groups, and the place has none",
        "set place.stage_shards, or leave cut.layouts out",
    ),
    Rule(
        lambda plan, _: plan.cut.kind == "chain" and not {*plan.cut.layouts} <= {*ALONG_TOKENS},
        "cut '{cut}' names layouts of operators, which a chain finds in its tensor-parallel groups without names",
        "leave all but 'sequence', 'vocabulary' and 'context' out of cut.layouts, or set cut.kind to 'layout'",
    ),
    Rule(
        lambda plan, _: _has(plan, *ALONG_TOKENS) and _has(plan, "stationary-x", "stationary-y", "stationary-w"),
        "cut '{cut}' divides both channels of pictures and tokens",
        "leave one of the two out of cut.layouts",
    ),
    Rule(
        lambda plan, _: _has(plan, "vocabulary") and plan.order.head_chunks > 1,
        "layout 'vocabulary' computes a cross-entropy of parts of the logits, and {chunks} chunks of the head need all",
        "leave order.head_chunks out, or use layout 'sequence' without 'vocabulary'",
    ),
)
