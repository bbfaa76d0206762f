"""The verb `runs`: the runs in a folder as a table, or some of them side by side."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import format_bytes, format_seconds
from pipedejavu.facts.printable import tell

if TYPE_CHECKING:
    from pipedejavu.run import History


def run(paths: Sequence[str], as_json: bool) -> None:
    """Prints a table of all runs in one folder, or the runs whose folders are given, side by side."""
    require_torch("training")
    from pipedejavu.run import History, RunFolder, find_runs

    if len(paths) == 1 and not RunFolder(paths[0]).holds_run:
        _print_list(find_runs(paths[0], tell), paths[0], as_json)
    else:
        _print_beside([History.read(path) for path in paths], as_json)


def _print_list(runs: "Sequence[History]", path: str, as_json: bool) -> None:
    if as_json:
        print_json({"runs": [_form(run) for run in runs]})
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "model", "plan", "state", "steps", "last loss", "samples/s", "whole job", "changed"):
        shown.add_column(column, justify="right" if column in ("steps", "last loss", "samples/s") else "left")
    for run in runs:
        cells = [_number(run.steps[-1].loss if run.steps else None, ".4f"), _number(run.samples_per_s, ",.1f")]
        cells.append(_job(run))
        names: list[str | Text] = [run.folder.path.name, run.options.model, run.plan.name, _colored(run.state)]
        shown.add_row(*names, f"{_last_step(run)}/{run.options.steps}{_skipped(run)}", *cells, _moment(run.changed_s))
    console = terminal(soft_wrap=True)
    width = console.measure(shown, options=console.options.update(width=500)).maximum
    terminal(width=max(width, 20)).print(shown)
    console.print(f"\n{len(runs)} runs in {path}; 'pipedejavu runs ONE ANOTHER' sets them side by side.")
    for run in runs:
        if run.reason:
            console.print(f"{run.folder.path.name} failed: {run.reason}")


def _print_beside(runs: "Sequence[History]", as_json: bool) -> None:
    common = _common_step(runs)
    if as_json:
        losses = [None if common is None else _loss_at(run, common) for run in runs]
        form = {"runs": [_form(run) for run in runs], "common_step": common, "losses_at_common_step": losses}
        print_json(form | {"differences": _differences(runs)})
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("")
    for run in runs:
        shown.add_column(run.folder.path.name, overflow="fold")
    for name, figure in _FIGURES.items():
        shown.add_row(name, *(figure(run) for run in runs))
    if common is not None and len(runs) > 1:
        shown.add_row(f"loss at step {common}", *(_number(_loss_at(run, common), ".4f") for run in runs))
    for name, values in _differences(runs).items():
        shown.add_row(name, *("–" if value is None else str(value) for value in values))
    terminal().print(shown)


def _predicted_s(run: "History") -> float | None:
    predicted = run.predicted
    return predicted.makespan_s / run.plan.steps if predicted else None


def _ratio(run: "History") -> float | None:
    predicted_s, step_s = _predicted_s(run), run.step_s
    return step_s / predicted_s if predicted_s and step_s else None


def _job(run: "History") -> str:
    return str(run.job or "–")


def _memory(run: "History") -> str:
    if run.peak_bytes is None:
        return "–"
    gpu = f" + {format_bytes(run.peak_gpu_bytes)} GPU" if run.peak_gpu_bytes else ""
    return f"{format_bytes(run.peak_bytes)}{gpu}"


_FIGURES: "dict[str, Callable[[History], str | Text]]" = {
    "state": lambda run: _colored(run.state) + styled(f" ({run.reason})" if run.reason else "", ""),
    "model": lambda run: run.options.model,
    "plan": lambda run: run.plan.name,
    "steps": lambda run: f"{_last_step(run)} of {run.options.steps}{_skipped(run)}",
    "first loss": lambda run: _number(run.steps[0].loss if run.steps else None, ".4f"),
    "last loss": lambda run: _number(run.steps[-1].loss if run.steps else None, ".4f"),
    "samples/s": lambda run: _number(run.samples_per_s, ",.1f"),
    "step, forecast": lambda run: _seconds(_predicted_s(run)),
    "step, measured": lambda run: _seconds(run.step_s),
    "measured ÷ forecast": lambda run: _number(_ratio(run), ".2f"),
    "whole job": _job,
    "peak memory of a worker": _memory,
    "trained for": lambda run: _seconds(run.steps[-1].elapsed_s if run.steps else None),
    "changed": lambda run: _moment(run.changed_s),
}


def _form(run: "History") -> dict[str, Any]:
    job = run.job
    return {
        "run_dir": str(run.folder.path),
        "state": run.state,
        "reason": run.reason,
        "model": run.options.model,
        "plan": run.plan.name,
        "axes": run.plan.axes(),
        "steps_done": _last_step(run),
        "steps": run.options.steps,
        "steps_skipped": run.num_skipped,
        "first_loss": run.steps[0].loss if run.steps else None,
        "last_loss": run.steps[-1].loss if run.steps else None,
        "samples_per_s": run.samples_per_s,
        "predicted_step_s": _predicted_s(run),
        "measured_step_s": run.step_s,
        "job": job and {**job.chance.model_dump(), "measured_s": job.measured_s},
        "peak_bytes": run.peak_bytes,
        "peak_gpu_bytes": run.peak_gpu_bytes,
        "elapsed_s": run.steps[-1].elapsed_s if run.steps else 0.0,
        "changed": _moment(run.changed_s),
    }


def _differences(runs: "Sequence[History]") -> dict[str, list[Any]]:
    """Returns the options and axes that differ between runs."""
    fields = [name for name in type(runs[0].options).model_fields if name not in ("model", "steps")]
    table = {name: [getattr(run.options, name) for run in runs] for name in fields}
    table |= {axis: [run.plan.axes()[axis] for run in runs] for axis in runs[0].plan.axes()}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def _common_step(runs: "Sequence[History]") -> int | None:
    """Returns the last step that all runs have made."""
    common = set.intersection(*({step.step for step in run.steps} for run in runs))
    return max(common, default=None)


def _loss_at(run: "History", step: int) -> float | None:
    return next(row.loss for row in run.steps if row.step == step)


def _last_step(run: "History") -> int:
    return run.steps[-1].step if run.steps else 0


def _skipped(run: "History") -> str:
    return f" ({run.num_skipped} skipped)" if run.num_skipped else ""


def _colored(state: str) -> Text:
    return styled(state, {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red"}[state])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _seconds(time_s: float | None) -> str:
    return "–" if time_s is None else format_seconds(time_s)


def _moment(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
