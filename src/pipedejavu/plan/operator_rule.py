"""Rules for plans that divide operators: the model must have operators of the kind that a layout divides."""

from pipedejavu.facts import Profile
from pipedejavu.plan.plan import Plan
from pipedejavu.plan.plan_rule import Rule

_STATIONARY, _PAIRS = {"stationary-x", "stationary-y", "stationary-w"}, {"col", "row", "head"}


def _count(profile: Profile, kind: str) -> float:
    """Returns how many operators of a kind the model has; infinity if a unit does not tell."""
    counts = [getattr(unit, f"num_{kind}") for unit in profile.units]
    return float("inf") if None in counts else sum(counts)


def _divides(plan: Plan, layouts: set[str]) -> bool:
    return bool(layouts & {*plan.cut.layouts})


OPERATOR_RULES = (
    Rule(
        lambda plan, profile: _divides(plan, _STATIONARY) and not _count(profile, "convolutions"),
        "layout '{layout}' divides the filters and channels of convolutions, and model '{model}' has no convolution",
        "use preset:megatron, or a model with convolutions",
    ),
    Rule(
        lambda plan, profile: (
            _divides(plan, _PAIRS) and _count(profile, "products") + _count(profile, "convolutions") < 2
        ),
        "layout '{layout}' divides pairs of layers, of which one sums over the other's outputs, and model '{model}' has"
        " {products:.0f} matrix products and {convolutions:.0f} convolutions",
        "use preset:ddp, or a model with more layers",
    ),
    Rule(
        lambda plan, profile: plan.divides_sequence and not _count(profile, "attentions"),
        "layout '{layout}' divides the sequence of attentions, and model '{model}' has none",
        "use another plan, such as preset:ddp, or a model with attention",
    ),
)


def operator_facts(plan: Plan, profile: Profile) -> dict[str, object]:
    """Returns the names and numbers that the rules use."""
    return {
        "layout": ", ".join(dict.fromkeys(plan.cut.layouts)),
        "model": profile.name,
        "products": _count(profile, "products"),
        "convolutions": _count(profile, "convolutions"),
    }
