"""Rules for plans that correct what stale weights cost, and the questions that others ask about such plans."""

from pipedejavu.plan.plan import Plan
from pipedejavu.plan.plan_rule import Rule, ties_cross_stages

_DEFAULT_DECAY = {"weight-prediction": 0.0, "discrepancy": 0.135}


def keeps_velocity(plan: Plan) -> bool:
    """Whether workers keep the smoothed difference of their last versions."""
    return plan.version.correction in _DEFAULT_DECAY


def velocity_decay(plan: Plan, late: int) -> float:
    """Returns the share of the velocity that is left after one update, on a stage that is `late` updates late.

    `version.decay` is the share that is left after `late` updates.
    """
    decay = plan.version.decay
    if decay is None:
        decay = _DEFAULT_DECAY.get(plan.version.correction, 0.0)
    return float(decay ** (1 / late)) if late else 0.0


def rate_factor(plan: Plan, late: int, update: int) -> float:
    """Returns the factor of a learning rate on a stage that is `late` updates late: late^−p, p falling from 1 to 0.

    No stage is late in the flushed updates of a run; the factor rises after them.
    """
    span, stale = plan.version.rate_updates, update - plan.version.flushed_updates
    if not span or late < 2 or stale < 0:
        return 1.0
    return float(late ** -(1 - min(stale / span, 1.0)))


def _has_correction(plan: Plan) -> bool:
    return plan.version.correction != "none"


def _reads_stash(plan: Plan) -> bool:
    return plan.version.kind == "stash" and plan.is_flush_free


def _compares(plan: Plan) -> bool:
    """Whether the gradient of an update is of weights that the updater knows, all of one version."""
    if plan.is_flush_free:
        return plan.version.kind != "stash" or plan.feed.microbatches == 1
    if plan.version.kind == "late":
        return True
    return plan.version.kind == "local" and plan.reduce.wire == "server" and plan.reduce.gate == "lock"


def _starts_from_newest(plan: Plan) -> bool:
    """Whether forwards read the newest weights that their worker has, or the correction needs no such weights."""
    is_late = plan.version.kind == "late" and plan.version.correction == "weight-prediction"
    return is_late or _reads_stash(plan) or plan.version.correction not in ("weight-prediction", "discrepancy")


CORRECTION_RULES = (
    Rule(
        lambda plan, _: not _starts_from_newest(plan) and plan.version.kind != "late",
        "correction '{correction}' starts from the newest weights of a stage, which forwards read under version 'stash'"
        " of order '1f1b-async' only, and the version is '{version}'",
        "use version 'stash', as preset:pipedream does, or correction 'delay-compensation' or 'none'",
    ),
    Rule(
        lambda plan, _: not _starts_from_newest(plan) and plan.version.kind == "late",
        "correction '{correction}' gives a backward newer weights than its forward, and under version 'late' both read"
        " the same",
        "use correction 'weight-prediction', 'delay-compensation' or 'none'",
    ),
    Rule(
        lambda plan, profile: plan.compensates_shares and bool(profile.ties),
        "correction 'delay-compensation' squares the gradient of a weight, and units that share it have only parts of"
        " that",
        "untie the weights, or use correction 'weight-prediction' or 'none'",
    ),
    Rule(
        lambda plan, _: plan.compensates_shares and plan.version.delay > 1,
        "correction 'delay-compensation' needs the newest weights, which a CPU replica with a delay of {delay} makes"
        " only after later shares, so all others would wait for those",
        "set version.delay to 1, or use correction 'weight-prediction' or 'none'",
    ),
    Rule(
        lambda plan, _: plan.version.correction == "delay-compensation" and not _compares(plan),
        "correction 'delay-compensation' needs weights older than the newest, one version for the {m} microbatches of"
        " an update, and a worker that knows both; version '{version}' with wire '{wire}' and gate '{gate}' does not",
        "use preset:pipedream, preset:pipedream-2bw or preset:parameter-server with it, or correction 'none'",
    ),
    Rule(
        lambda plan, _: _has_correction(plan) and plan.reduce.gate == "bound",
        "gate 'bound' adds the waves of other replicas to the weights, which correction '{correction}' would take for a"
        " worker's own updates",
        "set version.correction to 'none', or use gate 'barrier'",
    ),
    Rule(
        lambda plan, _: (
            (_has_correction(plan) or plan.version.rate_updates > 0) and plan.place.stage_replicas is not None
        ),
        "the replicas of a stage read different versions for one update, so its delay is no single number",
        "use place.replicas in place of place.stage_replicas, or correction 'none' and rate_updates 0",
    ),
    Rule(
        lambda plan, _: keeps_velocity(plan) and plan.order.has_recompute,
        "recomputing reads the weights of the forward, and correction '{correction}' keeps none of them",
        "switch order.recompute off, or use correction 'none'",
    ),
    Rule(
        lambda plan, _: (
            plan.version.correction == "discrepancy" and (plan.is_compiled or plan.keep.activations == "host")
        ),
        "correction 'discrepancy' puts other weights into what the forward saved, and compiled units and saved tensors"
        " that move to the host keep theirs",
        "switch is_compiled off and keep activations on the device, or use correction 'weight-prediction'",
    ),
    Rule(
        lambda plan, _: _has_correction(plan) and plan.precision.is_split,
        "correction '{correction}' computes with differences of weights, and split masters have theirs in two halves",
        "set precision.masters to 'fp32'",
    ),
    Rule(
        lambda plan, _: plan.version.rate_updates > 0 and not plan.is_flush_free,
        "version.rate_updates divides the learning rate by the known delay of a stage, and order '{order}' has none",
        "leave version.rate_updates out, or use order '1f1b-async'",
    ),
    Rule(
        lambda plan, _: plan.version.flushed_updates > 0 and not plan.is_flush_free,
        "version.flushed_updates flushes a pipeline that else never drains, and order '{order}' always drains",
        "leave version.flushed_updates out, or use order '1f1b-async'",
    ),
    Rule(
        lambda plan, _: plan.version.flushed_updates > 0 and plan.reduce.gate == "bound",
        "gate 'bound' counts waves of updates in a pipeline that never drains, and version.flushed_updates drains it",
        "leave version.flushed_updates out, or use preset:pipedream",
    ),
    Rule(
        lambda plan, profile: (
            (plan.version.rate_updates > 0 or plan.version.correction == "delay-compensation")
            and plan.is_flush_free
            and ties_cross_stages(plan, profile)
        ),
        "stages that share weights have different delays, and their copies would get different updates",
        "untie the weights, or use correction 'weight-prediction' or 'discrepancy' without version.rate_updates",
    ),
)
