"""Decides whether a program of one GPU and its host runs on the machinery of HybridAdamW, from plan and job alone.

Whatever does not, the engine runs one action at a time, with the same result.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, fx, nn

from pipedejavu.engine import AdamW, Job
from pipedejavu.engine.grouped_optimizer import GroupedOptimizer
from pipedejavu.program import ActionKind, Program
from pipedejavu.program.effect import rest_of
from pipedejavu.runtime.compute_precision import ComputeFormat, is_bf16, parameters_of

_PASSES = (ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.BACKWARD)
_FORMATS = ("fp32", "tf32", "bf16")
"""What units may compute in; bf16 has split masters."""
_DTYPES = (torch.float32, torch.bfloat16)


def why_by_actions(program: Program, job: Job) -> str:
    """Returns why the engine must run a program one action at a time; empty if HybridAdamW's machinery runs it."""
    return next(
        chain(
            _of_plan(program),
            _of_forms(program),
            _of_optimizer(job),
            _of_weights(program, job),
            _of_units(program, job),
        ),
        "",
    )


def _of_plan(program: Program) -> Iterator[str]:
    plan = program.plan
    if len(program.workers) > 1 or program.copies > 1 or program.num_replicas > 1:
        yield f"it has {len(program.workers) * program.copies} workers"
        return
    if program.machine.device(program.devices[0]).type != "gpu":
        yield "its worker is a CPU"
    if plan.version.kind != "sync":
        yield f"its version is '{plan.version}'"
    if plan.feed.kind != "microbatch":
        yield f"its feed is '{plan.feed.kind}'"
    if plan.reduce.combiner != "sum" or plan.reduce.clip == "delayed":
        yield f"its reduce is '{plan.reduce}'"
    if plan.keep.kind not in ("replicated", "split", "host") or plan.cut.kind == "layout":
        yield f"it keeps '{plan.keep}' with cut '{plan.cut}'"
    if plan.splits_backward or plan.order.recomputes_early or not _is_microbatch_major(program):
        yield f"its order '{plan.order}' runs several microbatches at a time"
    if plan.precision.compute not in _FORMATS or plan.precision.is_split != (plan.precision.compute == "bf16"):
        yield f"its precision is '{plan.precision}'"
    if plan.order.checkpoints:
        yield "it recomputes several units as one"
    if plan.keep.activations == "host" and any(program.recomputed):
        yield "it both recomputes units and keeps activations on the host"


def _of_forms(program: Program) -> Iterator[str]:
    """Yields what does not combine with compiled units, or with a head in chunks."""
    plan = program.plan
    if plan.is_compiled and plan.keep.activations == "host":
        yield "its units are compiled, and keep activations on the host"
    if plan.order.head_chunks > 1:
        last = program.pieces[-1].units[-1]
        if plan.keep.activations == "host" or last in program.recomputed[-1]:
            yield "its head runs in chunks, and is recomputed or keeps activations on the host"
        if rest_of(program, len(program.pieces) - 1) == "window":
            yield "its head runs in chunks, and its weights come through a window"


def _is_microbatch_major(program: Program) -> bool:
    """Whether each microbatch runs forward and backward before the next."""
    actions = [a for a in program.workers[0].actions if a.kind in _PASSES]
    numbers = [a.microbatch for a in actions]
    turns = [a.microbatch for a in actions if a.kind == ActionKind.BACKWARD and not program.inputs[a.piece]]
    return numbers == sorted(numbers) and turns == sorted({*numbers})


def _of_optimizer(job: Job) -> Iterator[str]:
    optimizer = job.optimizer
    if isinstance(optimizer, GroupedOptimizer):
        groups = optimizer.newest
        if any(group.maximizes for group in groups) or optimizer.left_out:
            yield "its optimizer maximizes, or leaves parameters out"
        rules = [group.rule for group in groups]
    else:
        rules = [optimizer] if isinstance(optimizer, AdamW) else []
    if not rules or not all(isinstance(rule, AdamW) and rule.is_decoupled for rule in rules):
        yield "its optimizer is not AdamW with decoupled weight decay"
    if job.byzantine is not None:
        yield "it injects faults"


def _of_weights(program: Program, job: Job) -> Iterator[str]:
    trained = {id(p): p for _, module in job.units for p in module.parameters() if p.requires_grad}
    if not trained:
        yield "no parameter is trained"
    form = form_of(program, job)
    if is_bf16(module for _, module in job.units) and not form.is_split:
        yield "bfloat16 weights have no masters"
    for parameter in trained.values():
        if parameter.dtype not in _DTYPES or not parameter.is_contiguous():
            yield f"a parameter is {str(parameter.dtype).removeprefix('torch.')}, or not contiguous"


def _of_units(program: Program, job: Job) -> Iterator[str]:
    if len({id(module) for _, module in job.units}) < len(job.units):
        yield "a module is several units"
    recomputed = {unit for some in program.recomputed for unit in some}
    for unit, (name, module) in enumerate(job.units):
        if unit in recomputed and _advances_buffers(module, is_compiled=program.plan.is_compiled):
            yield f"unit '{name}' is recomputed and may change its buffers"
    tied = {name for tie in job.ties for name in tie}
    for piece, names in enumerate(_names(program, job)):
        if rest_of(program, piece) == "window" and not tied.isdisjoint(names):
            yield "units that share weights come through a window"


def _names(program: Program, job: Job) -> Iterator[set[str]]:
    """Yields the names of the parameters of each piece."""
    for piece in program.pieces:
        units = [job.units[unit] for unit in piece.units]
        yield {name for unit, m in units for name, _ in m.named_parameters(unit, remove_duplicate=False)}


def _advances_buffers(module: nn.Module, *, is_compiled: bool) -> bool:
    """Whether a forward may change buffers that a second run must not change again.

    Batch statistics of a unit that is not compiled are known, and stay as they are.
    """
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            return any(_changes_buffers(node) for node in part.graph.nodes)
        is_known = isinstance(part, nn.modules.batchnorm._BatchNorm) and not is_compiled
        if not is_known and part._buffers.keys() - part._non_persistent_buffers_set:
            return True
    return False


def _changes_buffers(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    is_mutable = schema is not None and schema.is_mutable and any(n.op == "get_attr" for n in node.all_input_nodes)
    return "batch_norm" in str(node.target) or is_mutable


def form_of(program: Program, job: Job) -> ComputeFormat:
    """Returns how the units of a job compute."""
    return ComputeFormat.of(program.plan.precision, [module for _, module in job.units])


def is_lowered(program: Program, job: Job) -> bool:
    """Whether some weights of a job are computed with in another format than they have."""
    form = form_of(program, job)
    return any(form.is_lowered(part, p) for _, module in job.units for part, p in parameters_of(module))


def holds_all(job: Job, device: torch.device) -> bool:
    """Whether all parameters and buffers of a job rest on a device."""
    tensors: list[Tensor] = [t for _, m in job.units for t in (*m.parameters(), *m.buffers())]
    return all(tensor.device == device for tensor in tensors)
