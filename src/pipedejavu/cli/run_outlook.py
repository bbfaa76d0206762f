"""What is said before a run starts: what is trained, what lies where, how long it takes, and what it costs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipedejavu.cli.job_outlook import JobOutlook, describe_job
from pipedejavu.facts import WorkerSummary, format_bytes, format_seconds
from pipedejavu.program import Program
from pipedejavu.report import count_parameters, flop_share

if TYPE_CHECKING:
    from pipedejavu.run import TrainOptions

_BYTES = {"float32": 4, "float64": 8}


def describe_outlook(options: "TrainOptions", outlook: JobOutlook) -> Iterator[str]:
    """Yields sentences about a run, by the simulator's forecast and by that of the whole job."""
    prediction, job = outlook.prediction, outlook.record
    program = prediction.program
    yield _what_is_trained(options, program)
    yield _how_fast(options)
    for worker in prediction.workers:
        yield _memory_of(worker, program)
    samples, step_s = sum(program.sizes), job.step_s
    rate = samples / step_s if step_s else 0.0
    parts = [f"{format_seconds(step_s)} per update, {job.steps} updates: {format_seconds(step_s * job.steps)}"]
    if tokens := _tokens_per_sample(options):
        parts.append(f"{rate * tokens:,.0f} tokens/s")
    else:
        parts.append(f"{rate:,.4g} samples/s")
    if (share := flop_share(program, rate)) is not None:
        parts.append(f"MFU {share:.1%}")
    if options.price is not None:
        parts.append(f"cost {options.price * job.chance.time_s / 3600:,.2f} at {options.price:g} per hour")
    yield f"forecast: {', '.join(parts)}"
    yield describe_job(job.chance, "without evaluations" if options.has_evaluation else "")


def _tokens_per_sample(options: "TrainOptions") -> int | None:
    """Returns the length of a model's samples; None if it reads no tokens, or only its own code says how many."""
    if options.context is not None or ".py:" in options.model or options.model.startswith("hf:"):
        return options.context
    from pipedejavu.zoo import form_of

    return getattr(form_of(options.model), "context", None)


def _what_is_trained(options: "TrainOptions", program: Program) -> str:
    size = _BYTES[options.parameter_dtype]
    count = count_parameters(program.profile)
    trained = sum(unit.gradient_bytes for unit in program.profile.units) // size
    trained = min(trained, count)
    how = "full fine-tuning of all" if options.weights else "training of all"
    what = f"{how} {count:,} parameters"
    if options.lora is not None:
        what = f"LoRA of rank {options.lora}: {trained:,} of {count:,} parameters are trained"
    elif options.train is not None:
        what = f"training of {options.train}: {trained:,} of {count:,} parameters"
    optimizer = "AdamW" if options.optimizer == "adamw" else "SGD"
    precision = program.plan.precision
    computed = "" if str(precision) in ("fp32", "fp64") else f", computed in {precision}"
    return f"{what}, with exact {optimizer} on weights and state in {options.parameter_dtype}{computed}"


def _how_fast(options: "TrainOptions") -> str:
    warmup = f", after {options.warmup} updates of warm-up" if options.warmup else ""
    course = "constant" if options.schedule == "constant" else f"falling to 0 ({options.schedule})"
    return f"learning rate {options.lr:g}, {course}{warmup}; --lr changes it"


def _memory_of(worker: WorkerSummary, program: Program) -> str:
    device = program.machine.device(worker.device)
    places = []
    for curve in worker.memory:
        held = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in curve.peak_classes.items() if size and name != "buffers"
        )
        capacity = f" of {format_bytes(curve.capacity_bytes)}" if curve.capacity_bytes else ""
        name = device.name if curve.memory == "device" else f"the host of {device.name}"
        if curve.peak_bytes:
            places.append(f"{name} {format_bytes(curve.peak_bytes)}{capacity} ({held})")
    return f"memory of worker {worker.worker} at its peak: {'; '.join(places) or 'not known'}"
