"""The files at the end of a run: its report, and for models of transformers the folders that other tools open."""

from typing import TYPE_CHECKING

from pipedejavu.facts import InputError, format_seconds
from pipedejavu.facts.printable import tell
from pipedejavu.report import Headline, Story, StoryEvaluation, headlines, render_html

if TYPE_CHECKING:
    from pipedejavu.engine import Verdict
    from pipedejavu.launch import TrainedRun
    from pipedejavu.run import History, TrainOptions


def write_result_folders(done: "TrainedRun", options: "TrainOptions") -> dict[str, object]:
    """Writes the folder that `from_pretrained` opens, for hf: models; returns its entry of the summary."""
    if not options.model.startswith("hf:"):
        return {}
    from pipedejavu.source.generation import generate_sample
    from pipedejavu.source.hf_folder import FOLDER, write_pretrained
    from pipedejavu.source.trained_part import FOLDER as ADAPTER_FOLDER
    from pipedejavu.source.trained_part import merge_adapters, write_adapter
    from pipedejavu.store import read_weights

    name, folder = options.model.removeprefix("hf:"), done.folder
    target, weights = folder.path / FOLDER, folder.place(folder.model)
    entries: dict[str, object] = {"pretrained": str(target)}
    try:
        sources = (options.tokenizer, options.weights, name)
        write_pretrained(name, weights, target, sources, change=merge_adapters if options.lora else None)
        if options.lora:
            adapter = folder.path / ADAPTER_FOLDER
            write_adapter(dict(read_weights(weights)), options.lora, options.weights or name, adapter)
            entries["adapter"] = str(adapter)
    except (OSError, InputError) as error:  # the weights themselves are safe
        tell(f"cannot write {target}: {error}; 'pipedejavu export' writes such a folder from a checkpoint")
        return {}
    try:
        if generated := generate_sample(options, target):
            entries["sample"] = {"prompt": generated.prompt, "text": generated.text}
    except Exception as error:  # the result is on the disk, and transformers may raise anything
        tell(f"no sample of what the model says: {error}")
    return entries


def write_report(done: "TrainedRun", options: "TrainOptions", verdict: "Verdict | None") -> None:
    """Writes report.html: measured and forecast timeline, curves, evaluations and events."""
    from pipedejavu.run import History, describe_figures

    plan = done.program.plan
    decisions = [(d.axis, d.choice, d.reason) for d in plan.decisions]
    notes = [f"The timelines are of one round: the last of {options.steps} steps, and its forecast."]
    if verdict is not None:
        notes.append(f"A{str(verdict)[1:]}. {verdict.origin}")
    title = f"{plan.name} · {options.model}, measured"
    rate = sum(done.program.sizes) * plan.steps / done.prediction.makespan_s if done.prediction.makespan_s else None
    run: History = History.read(done.folder)
    losses = [(step.step, step.loss) for step in run.steps if step.loss is not None]
    evaluations = [
        StoryEvaluation(
            e.step, e.epoch, e.elapsed_s, e.loss, describe_figures(e.figures()).partition(", ")[2],
            e.perplexity if e.accuracy is None else e.accuracy,
        )
        for e in run.evaluations
        if e.loss is not None
    ]  # fmt: skip
    rates = [(step, samples / time_s) for step, samples, time_s in run.rates()]
    page = render_html(
        done.measured, title, plan.axes(), decisions, notes,
        forecast=done.prediction.timeline(), story=Story(losses, rates, rate, run.events, evaluations),
        leads=_leads(done, options, run, rate),
    )  # fmt: skip
    done.folder.write_last(done.folder.report, page)


def _leads(done: "TrainedRun", options: "TrainOptions", run: "History", forecast: float | None) -> list[Headline]:
    """Returns the throughput, MFU, time and cost of a finished run."""
    rates = [(samples, time_s) for _, samples, time_s in run.rates()]
    total_s = sum(time_s for _, time_s in rates)
    if not total_s or not run.steps:
        return []
    elapsed_s, num_steps = run.steps[-1].elapsed_s, run.steps[-1].step
    job = f"; with start and end {run.job}" if run.job else ""
    return headlines(
        done.program,
        sum(samples for samples, _ in rates) / total_s,
        Headline("Time", format_seconds(elapsed_s), f"{num_steps:,} updates, all of {options.steps:,}{job}"),
        tokens_per_sample=run.tokens_per_sample,
        forecast=forecast,
        cost=None if options.price is None else (options.price, elapsed_s / 3600),
    )
