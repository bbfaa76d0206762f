"""Rules: combinations of axes that cannot work, each with a reason and a remedy."""

from pipedejavu.facts import FaultsError, Profile
from pipedejavu.plan.axis import in_line
from pipedejavu.plan.correction_rule import CORRECTION_RULES
from pipedejavu.plan.expert_rule import EXPERT_RULES, expert_facts
from pipedejavu.plan.late_rule import LATE_RULES
from pipedejavu.plan.layout_rule import LAYOUT_RULES
from pipedejavu.plan.mask_rule import MASK_RULES
from pipedejavu.plan.operator_rule import OPERATOR_RULES, operator_facts
from pipedejavu.plan.plan import Plan
from pipedejavu.plan.plan_rule import Rule, num_replicas, ties_cross_stages
from pipedejavu.plan.plan_trait import adds_to_weights, can_take_turns, has_legal_checkpoints, is_written_out
from pipedejavu.plan.zero_rule import ZERO_RULES

_PLACES = {
    "gems": "bidirectional",
    "chimera": "bidirectional",
    "interleaved": "loop",
    "zb-v": "v",
    "dualpipe-v": "v",
}

_MASTERS = {"bf16": ("split", "fp32"), "fp16": ("fp32",)}


def _is_asynchronous(plan: Plan) -> bool:
    return plan.version.kind in ("local", "torn") or plan.is_flush_free


RULES = (
    Rule(
        lambda plan, _: plan.version.kind in ("stash", "vertical", "double-buffer") and plan.keep.versions == 1,
        "version '{version}' reads weights that an update in place has already overwritten",
        "set keep.versions to 2 or more, or leave it out",
    ),
    Rule(
        lambda plan, _: plan.is_flush_free and plan.reduce.clip == "global",
        "order '1f1b-async' never has the gradients of all stages at once, so there is no norm to clip by",
        "set reduce.clip to 'delayed' (the norm of the update before) or 'none', or use order '1f1b'",
    ),
    Rule(
        lambda plan, _: plan.reduce.combiner == "score-trim" and plan.reduce.wire != "server",
        "combiner 'score-trim' must see each gradient, but wire '{wire}' hands over their sum",
        "set reduce.wire to 'server'",
    ),
    Rule(
        lambda plan, _: plan.reduce.combiner == "score-trim" and plan.reduce.trim >= num_replicas(plan),
        "combiner 'score-trim' drops {trim} contributions of {replicas}, so none is left to average",
        "set reduce.trim to less than {replicas}, or use more replicas",
    ),
    Rule(
        lambda plan, _: (
            plan.reduce.combiner == "score-trim"
            and (plan.cut.kind == "layout" or plan.order.is_eager or plan.place.servers > 1)
        ),
        "combiner 'score-trim' scores the gradients of a stage with the whole model, which must be on one server",
        "use cut 'whole' or 'chain' and one server, and leave order.is_eager out",
    ),
    Rule(
        lambda plan, _: (
            plan.reduce.combiner == "score-trim"
            and (plan.reduce.gate != "barrier" or plan.keep.kind != "server" or plan.version.kind != "sync")
        ),
        "combiner 'score-trim' compares the contributions of one update, which the server then makes for all",
        "set reduce.gate to 'barrier', keep.kind to 'server' and version.kind to 'sync'",
    ),
    Rule(
        lambda plan, _: plan.reduce.combiner == "score-trim" and plan.reduce.clip != "none",
        "combiner 'score-trim' drops gradients only after the norm over all workers is known",
        "set reduce.clip to 'none'",
    ),
    *ZERO_RULES,
    *EXPERT_RULES,
    *LAYOUT_RULES,
    *OPERATOR_RULES,
    *CORRECTION_RULES,
    *LATE_RULES,
    *MASK_RULES,
    Rule(
        lambda plan, _: plan.place.kind == "bidirectional" and plan.place.workers % 2 == 1,
        "a bidirectional place pairs workers, and {workers} is odd",
        "use an even number of workers",
    ),
    Rule(
        lambda plan, _: plan.place.kind == "bidirectional" and plan.feed.microbatches < 2,
        "a bidirectional place sends microbatches both ways, and an update has {m}",
        "use 2 microbatches or more",
    ),
    Rule(
        lambda plan, _: plan.splits_backward and plan.is_compiled,
        "order '{order}' splits the backward, which compiled stages cannot do",
        "switch is_compiled off, or use order '1f1b'",
    ),
    Rule(
        lambda plan, _: plan.order.has_recompute and plan.version.kind == "torn",
        "recompute must read the weights that the forward read, and version 'torn' records none",
        "switch order.recompute off, or use version 'local'",
    ),
    Rule(
        lambda plan, _: plan.order.recompute > 0 and plan.order.recompute_units is not None,
        "order.recompute is a share of each stage's units, and order.recompute_units names some of them",
        "leave one of the two out",
    ),
    Rule(
        lambda plan, profile: any(not 0 <= u < len(profile.units) for u in plan.order.recompute_units or ()),
        "order.recompute_units names units that the profile does not have",
        "count units from 0, in the profile's order",
    ),
    Rule(
        lambda plan, profile: not has_legal_checkpoints(plan, len(profile.units)),
        "order.checkpoints divides what stages recompute, at rising numbers of units after the first of {units}",
        "set order.recompute or order.recompute_units too, and count units from 0, in the profile's order",
    ),
    Rule(
        lambda plan, profile: plan.order.head_chunks > 1 and not profile.head_forms,
        "the plan runs the model's head in {chunks} chunks, and the profile knows none: the last unit ends in no linear"
        " layer whose result goes only into a cross-entropy, or it was not measured",
        "leave order.head_chunks out, or measure the model again (--renew)",
    ),
    Rule(
        lambda plan, _: plan.reduce.has_buffer_broadcast and _is_asynchronous(plan),
        "replicas that do not wait for each other have no common moment to broadcast running statistics",
        "switch reduce.has_buffer_broadcast off, or use version 'sync'",
    ),
    Rule(
        lambda plan, _: plan.feed.kind == "share" and plan.reduce.combiner == "average",
        "an average over replicas is wrong when they train unequal shares",
        "set reduce.combiner to 'sum': sums of sample gradients, divided once by the whole batch",
    ),
    Rule(
        lambda plan, _: plan.order.kind in _PLACES and plan.place.kind != _PLACES[plan.order.kind],
        "order '{order}' is made for another place than '{place}'",
        "set place.kind to the one that the preset of that name has",
    ),
    Rule(
        lambda plan, _: plan.place.kind == "bidirectional" and plan.order.kind not in ("gems", "chimera"),
        "a bidirectional place has two replicas on each worker, which order '{order}' does not run",
        "use order 'gems' or 'chimera', or place 'linear'",
    ),
    Rule(
        lambda plan, _: plan.place.kind in ("loop", "v") and plan.order.kind in ("zb-h1", "1f1b-async", "ready-first"),
        "order '{order}' runs one chunk on each worker",
        "use place 'linear'",
    ),
    Rule(
        lambda plan, _: plan.order.kind == "1f1b" and plan.place.kind != "linear",
        "order '1f1b' runs one chunk on each worker",
        "use place 'linear', or order 'interleaved'",
    ),
    Rule(
        lambda plan, _: plan.cut.kind != "chain" and plan.place.workers > 1,
        "cut '{cut}' has one stage, and the place has {workers} workers in a line",
        "set cut.kind to 'chain', or place.workers to 1 with more replicas or shards",
    ),
    Rule(
        lambda plan, _: plan.cut.kind == "layout" and not plan.cut.layouts,
        "a layout cut divides each operator, but cut.layouts is empty",
        "name the layouts, such as ['col', 'row']",
    ),
    Rule(
        lambda plan, _: plan.place.stage_shards is not None and plan.place.shards > 1,
        "{shards} shards of a layout cut and the tensor-parallel groups of place.stage_shards both divide operators",
        "use one of the two",
    ),
    Rule(
        lambda plan, _: (
            plan.place.stage_shards is not None
            and len(plan.place.stage_shards) != len(plan.place.stage_replicas or range(plan.place.workers))
        ),
        "place.stage_shards has {shard_counts} entries, and a pipeline of the place has {slots} stages or workers",
        "give one for each, or leave place.stage_shards out",
    ),
    Rule(
        lambda plan, _: plan.order.kind == "layer-major" and plan.place.workers > 1,
        "order 'layer-major' takes all microbatches through one layer at a time, on one worker",
        "set place.workers to 1",
    ),
    Rule(
        lambda plan, _: plan.order.kind == "interleaved" and plan.feed.microbatches % plan.place.workers > 0,
        "order 'interleaved' takes microbatches in groups of the {workers} workers, which do not divide {m}",
        "use a multiple of {workers} microbatches",
    ),
    Rule(
        lambda plan, _: plan.order.kind == "zb-v" and plan.feed.microbatches < 2 * plan.place.workers - 1,
        "order 'zb-v' fills its V with 2·{workers} − 1 microbatches, and there are {m}",
        "use more microbatches",
    ),
    Rule(
        lambda plan, _: plan.order.kind == "dualpipe-v" and plan.feed.microbatches < 2 * plan.place.workers,
        "order 'dualpipe-v' fills its V with 2·{workers} microbatches, and there are {m}",
        "use more microbatches",
    ),
    Rule(
        lambda plan, _: plan.version.kind == "double-buffer" and plan.feed.microbatches < plan.place.workers - 1,
        "version 'double-buffer' needs an update of {workers} − 1 microbatches or more, so that two versions"
        " are enough, and it has {m}",
        "use more microbatches, or version 'stash'",
    ),
    Rule(
        lambda plan, _: plan.version.kind in ("stash", "vertical", "double-buffer") and not plan.is_flush_free,
        "version '{version}' is for pipelines that are never flushed, and order '{order}' flushes",
        "use order '1f1b-async', or version 'sync'",
    ),
    Rule(
        lambda plan, _: plan.is_flush_free and plan.version.kind == "sync",
        "order '1f1b-async' starts microbatches before earlier ones have updated the weights",
        "use version 'stash', 'vertical' or 'double-buffer', or order '1f1b'",
    ),
    Rule(
        lambda plan, _: plan.version.kind == "vertical" and plan.feed.microbatches > 1,
        "version 'vertical' follows single microbatches, and an update has {m}",
        "use one microbatch per update, or version 'double-buffer'",
    ),
    Rule(
        lambda plan, _: plan.version.kind != "sync" and plan.keep.kind in ("host", "split"),
        "keep '{keep}' holds one version of the weights, and version '{version}' reads several",
        "use version 'sync', or keep 'replicated'",
    ),
    Rule(
        lambda plan, _: plan.keep.places is not None and plan.keep.kind != "split",
        "keep.places divides state piece by piece, and keep '{keep}' treats all pieces alike",
        "set keep.kind to 'split', or leave keep.places out",
    ),
    Rule(
        lambda plan, _: plan.keep.window == "auto" and plan.keep.kind != "host",
        "keep.window 'auto' is chosen for weights in host memory, and keep '{keep}' has none there",
        "set keep.kind to 'host', or keep.window to 1",
    ),
    Rule(
        lambda plan, _: (
            plan.keep.device_pieces == "auto" and (plan.keep.kind != "split" or plan.keep.places is not None)
        ),
        "keep.device_pieces 'auto' divides the state of a stage between device and host, and keep '{keep}' does not, or"
        " has keep.places",
        "set keep.kind to 'split' and leave keep.places out, or set keep.device_pieces to 0",
    ),
    Rule(
        lambda plan, _: plan.reduce.wire == "server" and plan.place.servers < 1,
        "wire 'server' needs a server, and the place has none",
        "set place.servers to 1 or more",
    ),
    Rule(
        lambda plan, _: (
            plan.reduce.wire == "server"
            and plan.reduce.gate == "barrier"
            and plan.reduce.combiner in ("sum", "average")
        ),
        "a server that waits for all gradients and sums them does what an all-reduce does, without its speed",
        "set reduce.wire to 'all-reduce', or reduce.gate to 'lock'",
    ),
    Rule(
        lambda plan, _: plan.reduce.wire == "summation-service" and plan.reduce.combiner != "sum",
        "the servers of wire 'summation-service' sum gradients, and combiner '{combiner}' needs more than sums",
        "set reduce.combiner to 'sum', or reduce.wire to 'all-reduce'",
    ),
    Rule(
        lambda plan, _: plan.reduce.wire == "none" and num_replicas(plan) > 1,
        "{replicas} replicas would never exchange their gradients",
        "set reduce.wire, to 'all-reduce' for instance",
    ),
    Rule(
        lambda plan, _: plan.reduce.wire == "shared-memory" and plan.keep.kind != "shared",
        "wire 'shared-memory' has one copy of the weights for all workers, and keep is '{keep}'",
        "set keep.kind to 'shared'",
    ),
    Rule(
        lambda plan, _: plan.place.stage_replicas is not None and plan.order.kind not in ("1f1b", "1f1b-async"),
        "order '{order}' has no form with replicated stages",
        "use order '1f1b' or '1f1b-async', or place.replicas",
    ),
    Rule(
        lambda plan, _: not can_take_turns(plan),
        "the replicas of a stage take an update's {m} microbatches in turn, and not all get one, or as many",
        "use as many microbatches or more; if the pipeline never drains, a multiple of each of place.stage_replicas",
    ),
    Rule(
        lambda plan, profile: plan.place.stage_replicas is not None and ties_cross_stages(plan, profile),
        "stages with different numbers of replicas have no common replica to tie weights in",
        "use place.replicas, or untie the weights",
    ),
    Rule(
        lambda plan, _: plan.place.stage_replicas is not None and plan.place.replicas * plan.place.shards > 1,
        "replicated stages and replicated pipelines are not combined",
        "use place.stage_replicas or place.replicas",
    ),
    Rule(
        lambda plan, _: (
            plan.place.cpu_replicas > 0 and (plan.place.kind != "linear" or plan.is_flush_free or plan.place.shards > 1)
        ),
        "a CPU replica shares updates with a linear, flushed pipeline",
        "use place 'linear' with order '1f1b' or 'gpipe', or no CPU replica",
    ),
    Rule(
        lambda plan, _: (plan.order.kind == "written") != (plan.order.rows is not None),
        "order 'written' has rows, and no other order has",
        "give order.rows with order 'written', or leave both out",
    ),
    Rule(
        lambda plan, _: plan.order.rows is not None and (plan.place.kind != "linear" or plan.feed.kind != "microbatch"),
        "an order that is written out needs a linear place and feed 'microbatch'",
        "use place 'linear' and feed 'microbatch', or another order",
    ),
    Rule(
        lambda plan, _: plan.order.rows is not None and not is_written_out(plan),
        "order.rows must give each of the {workers} workers F and later B of each of the {m} microbatches once",
        "write a row for each worker, such as 'F0 F1 B0 B1' for two microbatches",
    ),
    Rule(
        lambda plan, _: plan.precision.masters not in _MASTERS.get(plan.precision.compute, ("none",)),
        "weights of compute '{compute}' cannot have masters '{masters}': 16 bits are too few for most updates, bf16 can"
        " be the half of a master, and wider weights are their own masters",
        "set precision.masters to '{masters_for}'",
    ),
    Rule(
        lambda plan, _: plan.precision.accumulate == "bf16" and not plan.precision.is_split,
        "gradients are bf16 only if weights are, and masters '{masters}' have float32 weights",
        "leave precision.accumulate out, or use compute 'bf16' with masters 'split'",
    ),
    Rule(
        lambda plan, _: plan.precision.moments != "fp32" and plan.precision.compute == "fp64",
        "moments of {moments} would round away what compute 'fp64' keeps",
        "leave precision.moments out, or use compute 'fp32'",
    ),
    Rule(
        lambda plan, _: plan.precision.moments != "fp32" and plan.keep.kind.startswith("zero"),
        "keep '{keep}' divides state at any element, and {moments} moments are rounded by a parameter's own elements",
        "leave precision.moments out, or set keep to 'replicated'",
    ),
    Rule(
        lambda plan, _: plan.precision.is_split and adds_to_weights(plan),
        "keep '{keep}' with gate '{gate}' and combiner '{combiner}' adds to the weights of other workers, which do"
        " not hold the other half of split masters",
        "set precision.masters to 'fp32'",
    ),
    Rule(
        lambda plan, _: plan.precision.compute == "fp16" and plan.reduce.clip != "global",
        "gradients of fp16 may overflow, and all workers skip such an update by the norm that they share",
        "set reduce.clip to 'global', or use compute 'bf16'",
    ),
)


def check_plan(plan: Plan, profile: Profile) -> None:
    """Raises FaultsError with every rule that the plan breaks."""
    if faults := faults_of(plan, profile):
        raise FaultsError(f"plan '{plan.name}'", faults)


def faults_of(plan: Plan, profile: Profile) -> list[str]:
    """Returns a sentence with the remedy for every rule that the plan breaks."""
    facts: dict[str, object] = plan.axes() | expert_facts(plan, profile) | operator_facts(plan, profile)
    facts |= {
        "precision": str(plan.precision),
        "correction": plan.version.correction,
        "delay": plan.version.delay,
        "order": plan.order.kind,
        "place": plan.place.kind,
        "keep": plan.keep.kind,
        "wire": plan.reduce.wire,
        "workers": plan.place.workers,
        "shards": plan.place.shards,
        "replicas": num_replicas(plan),
        "trim": plan.reduce.trim,
        "chunks": plan.order.head_chunks,
        "m": plan.feed.microbatches,
        "units": len(profile.units),
        "zeros": len(plan.keep.zeros or ()),
        "each": in_line(plan.keep.zeros or (plan.zero_of(0),)),
        "stages": plan.num_stages,
        "shard_counts": len(plan.place.stage_shards or ()),
        "gate": plan.reduce.gate,
        "combiner": plan.reduce.combiner,
        "compute": plan.precision.compute,
        "masters": plan.precision.masters,
        "masters_for": _MASTERS.get(plan.precision.compute, ("none",))[0],
        "moments": plan.precision.moments,
        "slots": len(plan.place.stage_replicas or range(plan.place.workers)),
    }
    broken = [rule for rule in RULES if rule.breaks(plan, profile)]
    return [f"{rule.reason.format_map(facts)}; {rule.remedy.format_map(facts)}" for rule in broken]
