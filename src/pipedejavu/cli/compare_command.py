"""The verb `compare`: prediction against measurement, of a run or of a recording of HybridAdamW."""

from pathlib import Path

from rich.table import Table

from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.terminal import print_json, terminal
from pipedejavu.facts import Timeline, format_seconds
from pipedejavu.report import compare as compare_timelines


def compare(run_dir: str, as_json: bool) -> None:
    """Prints predicted and measured times per worker and kind of action."""
    require_torch("training")
    from pipedejavu.run import RunFolder

    if Path(run_dir).is_file():
        _compare_recording(Path(run_dir), as_json)
        return
    folder = RunFolder(run_dir)
    predicted, measured = folder.timeline("predicted"), folder.timeline("measured")
    rows = compare_timelines(predicted, measured)
    if as_json:
        table = [{**row._asdict(), "ratio": row.ratio} for row in rows if row.predicted_s]
        print_json({"rows": table, "predicted_s": predicted.makespan_s, "measured_s": measured.makespan_s})
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("worker", "kind", "actions", "predicted", "measured", "ratio", "waited"):
        shown.add_column(column, justify="left" if column in ("worker", "kind") else "right")
    for row in rows:
        times = [format_seconds(row.predicted_s), format_seconds(row.measured_s)]
        waited = format_seconds(row.waited_s) if row.waited_s else ""
        shown.add_row(str(row.worker), row.kind, str(row.num_actions), *times, f"{row.ratio:.2f}", waited)
    shown.add_row(
        "all",
        "makespan",
        "",
        *(format_seconds(t.makespan_s) for t in (predicted, measured)),
        _ratio(predicted, measured),
    )
    terminal().print(shown)


def _compare_recording(path: Path, as_json: bool) -> None:
    """Prints predicted and measured times of recorded HybridAdamW steps, per lane and kind, and what bounds a step."""
    from pipedejavu.hybrid_report import HybridRun, occupancy_of, review

    run = HybridRun.load(path)
    comparison, use = review(run), occupancy_of(run)
    if as_json:
        table = [{"lane": lane, **row._asdict()} for lane, rows in comparison.rows().items() for row in rows]
        steps = {"predicted_s": comparison.predicted_step_s, "measured_s": comparison.measured_step_s}
        print_json({"rows": table, **steps, "busy": use.busy, "bounds": use.bounds, "hidden": use.hidden})
        return
    terminal(soft_wrap=True).print(str(comparison), str(use), sep="\n")


def _ratio(predicted: Timeline, measured: Timeline) -> str:
    return f"{measured.makespan_s / predicted.makespan_s:.2f}" if predicted.makespan_s else "–"
