"""Prints presets and predictions: tables for people, one JSON object for programs."""

import json
from collections.abc import Sequence

from rich.table import Table

from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import format_bytes, format_seconds
from pipedejavu.plan import Plan, Preset
from pipedejavu.program import Program
from pipedejavu.simulate import Chance, Prediction


def print_presets(table: dict[str, Preset], as_json: bool) -> None:
    """Prints all presets with their axes."""
    if as_json:
        rows = {n: {"title": p.title, "axes": p.at().axes(), "aliases": list(p.aliases)} for n, p in table.items()}
        print_json({"presets": rows})
        return
    console = terminal()
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("preset", *next(iter(table.values())).at().axes()):
        shown.add_column(column, no_wrap=True)
    for name, entry in table.items():
        shown.add_row(styled(name, "cyan"), *entry.at().axes().values())
    width = console.measure(shown, options=console.options.update(width=500)).maximum
    if not console.is_terminal or width <= console.width:
        terminal(width=width).print(shown)
    else:  # too narrow for a table
        for name, entry in table.items():
            console.print(styled(name, "cyan"), f" {entry.title}")
            console.print("  " + " · ".join(entry.at().axes().values()), style="dim")
    console.print(f"\n{len(table)} presets; 'pipedejavu presets NAME' shows one with its program.")


def print_preset(title: str, plan: Plan, program: Program, grid: str, as_json: bool) -> None:
    """Prints one preset: its axes, and its program at unit costs as a grid."""
    if as_json:
        form = {"name": plan.name, "title": title, "axes": plan.axes(), "plan": json.loads(plan.to_json())}
        print_json(form | {"program": program.to_text().splitlines(), "grid": grid})
        return
    console = terminal()
    console.print(styled(plan.name, "bold"), f" {title}\n")
    for axis, text in plan.axes().items():
        console.print(f"  {axis:<8} {text}")
    workers = f"{plan.num_workers} workers"
    if program.copies > 1:
        workers += f", of which {len(program.workers)} are drawn: {program.copies} copies behave alike"
    console.print(f"\nat unit costs (F=1, B=2, no communication), {workers}:\n")
    console.print(grid, soft_wrap=True)


def show_cursor() -> None:
    """Shows the terminal's cursor again; a worker that was killed while drawing the live view leaves it hidden."""
    terminal(stderr=True).show_cursor(True)


def num_slices() -> int:
    """Returns how many columns of a time grid fit into the terminal."""
    return max(20, (terminal().width - 6) // 4)


def print_prediction(prediction: Prediction, notes: Sequence[str], files: Sequence[str], as_json: bool) -> None:
    """Prints a prediction: its time, and a row per worker."""
    program = prediction.program
    if as_json:
        print_json(_prediction_form(prediction, notes, files))
        return
    console = terminal()
    axes = "  ".join(f"{axis}={text}" for axis, text in program.plan.axes().items())
    console.print(styled(program.plan.name, "bold"), f" {axes}")
    in_units = program.machine.name == "unit costs"
    makespan = f"{prediction.makespan_s:g} units" if in_units else format_seconds(prediction.makespan_s)
    rate = "" if in_units else f"   {prediction.samples_per_s:.4g} samples/s"
    rate += "" if in_units else f"   {prediction.memory_efficiency * 2**30:.4g} samples/s per GiB of the fullest device"
    console.print(styled(f"makespan {makespan}", "bold"), f"  bubble {prediction.bubble_fraction:.1%}{rate}")
    console.print(describe_chance(prediction.chance))
    console.print(_worker_table(prediction))
    for decision in program.plan.decisions:
        console.print(f"\n{decision.axis}: {decision.choice} ({decision.reason})", end="")
    console.print("".join(f"\n{note}" for note in notes))
    for file in files:
        console.print(f"wrote {file}")


def _worker_table(prediction: Prediction) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    reserves = any(worker.reserved_bytes for worker in prediction.workers)
    memory = ("peak memory", "allocated", "reserved", "on host") if reserves else ("peak memory", "on host")
    for column in ("worker", "device", "busy", *memory, "live microbatches", "weight versions"):
        shown.add_column(column, justify="left" if column in ("worker", "device") else "right")
    for worker in prediction.workers:
        name = f"{worker.worker}" + (f" ×{worker.copies}" if worker.copies > 1 else "")
        host = next((c.peak_bytes for c in worker.memory if c.memory == "host"), None)
        busy = f"{worker.busy_s / prediction.makespan_s:.0%}" if prediction.makespan_s else "–"
        taken = [worker.allocated_bytes, worker.reserved_bytes] if reserves else []
        sizes = ["–" if size is None else format_bytes(size) for size in (worker.peak_bytes, *taken, host)]
        counts = [str(worker.peak_live_microbatches), str(worker.weight_versions)]
        others = prediction.program.plan.degrees[worker.worker] - 1
        device = f"{worker.device} +{others}" if others else worker.device
        shown.add_row(name, device, busy, *sizes, *counts)
    return shown


def describe_chance(chance: Chance) -> str:
    """Returns a sentence on the range of a program's time; empty if no variation is known."""
    if not chance.varies:
        return ""
    mean, low, high = map(format_seconds, chance)
    return f"As times vary and forecasts err, {mean} on average; nine in ten take {low} to {high}.\n"


def _prediction_form(prediction: Prediction, notes: Sequence[str], files: Sequence[str]) -> dict[str, object]:
    program = prediction.program
    workers = []
    for w in prediction.workers:
        form: dict[str, object] = w.model_dump(exclude={"memory"})
        form["peak_classes"] = w.memory[0].peak_classes
        form["host_peak_bytes"] = next((c.peak_bytes for c in w.memory if c.memory == "host"), 0.0)
        workers.append(form)
    return {
        "plan": json.loads(program.plan.to_json()),
        "axes": program.plan.axes(),
        "makespan_s": prediction.makespan_s,
        "chance": prediction.chance._asdict(),
        "bubble_fraction": prediction.bubble_fraction,
        "samples_per_s": prediction.samples_per_s,
        "memory_efficiency": prediction.memory_efficiency,
        "num_workers": program.plan.num_workers,
        "num_actions": program.num_actions,
        "workers": workers,
        "notes": list(notes),
        "files": list(files),
    }
