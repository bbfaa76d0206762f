"""The page of a schedule: its figures, a Gantt chart by server, and a table of jobs; drawn by the parts of `report`."""

from collections.abc import Sequence
from typing import Any

from pipedejavu.cluster.cluster_clock import ClusterCourse
from pipedejavu.cluster.job_run import JobSpan
from pipedejavu.cluster.schedule_summary import JobOutcome, ScheduleSummary, outcomes, summarise
from pipedejavu.facts import format_bytes, format_seconds
from pipedejavu.report import Headline, render_chart, render_figures, render_section
from pipedejavu.report.table import Cell, render_table

MOST_BARS, MOST_SERVERS, MOST_JOBS = 20_000, 200, 500
_NUM_COLOURS = 8


def render_schedule(course: ClusterCourse, title: str, notes: Sequence[str] = ()) -> str:
    """Returns one self-contained HTML page."""
    summary, jobs = summarise(course), outcomes(course)
    data = gantt_data(course)
    used = {part.server for span in course.spans for part in span.parts}
    if len(used) > MOST_SERVERS:
        notes = (*notes, f"the chart shows the {MOST_SERVERS} of {len(used):,} used servers that were busy longest")
    if len(jobs) > MOST_JOBS:
        notes = (*notes, f"the table shows the {MOST_JOBS} of {len(jobs):,} jobs that took longest")
    below = render_section("jobs", "Jobs", _job_table(jobs))
    return render_chart(data, title, render_figures(_leads(summary)), notes, below=below)


def _leads(summary: ScheduleSummary) -> list[Headline]:
    s = summary
    middle, waited = format_seconds(s.median_completion_s), format_seconds(s.mean_wait_s)
    missed = f"{s.num_missed_deadlines} deadlines missed" if s.num_missed_deadlines else "no deadline missed"
    return [
        Headline("Mean completion", format_seconds(s.mean_completion_s), f"median {middle}"),
        Headline("99th percentile", format_seconds(s.p99_completion_s), f"waiting {waited} on average"),
        Headline("Makespan", format_seconds(s.makespan_s), f"{s.num_jobs:,} jobs on {s.num_servers:,} servers"),
        Headline("GPUs held", f"{s.gpu_utilisation:.1%}", f"{s.overhead_share:.1%} of it to save, load and start"),
        Headline("Cores held", f"{s.core_utilisation:.1%}", "of the servers that were on"),
        Headline("Fairness", f"{s.fairness:.3f}", f"Jain's index; slowed down {s.most_slowdown:.3g} times at most"),
        Headline("Preemptions", f"{s.num_preemptions:,}", missed),
        Headline("Cost", f"{s.cost:,.2f}" if s.cost else "–", "of the hours that servers were on"),
    ]  # fmt: skip


def _job_table(jobs: Sequence[JobOutcome]) -> str:
    longest = sorted(jobs, key=lambda job: -job.completion_s)[:MOST_JOBS]
    heads = ("Job", "Arrival", "Start", "End", "Completion", "Waited", "Slowdown", "Preemptions")
    rows = [
        [
            Cell(job.name, head=True),
            *(Cell(format_seconds(t)) for t in (job.arrival_s, job.start_s, job.end_s, job.completion_s, job.waited_s)),
            Cell(f"{job.slowdown:.3g}"),
            Cell(f"{job.num_preemptions}"),
        ]
        for job in longest
    ]
    return render_table(heads, rows, "jobs")


def gantt_data(course: ClusterCourse) -> dict[str, Any]:
    """Returns the chart's data: a row per server, a lane per GPU, a bar per time that a job held it."""
    spans = sorted(course.spans, key=lambda span: span.start_s)
    drawn = spans[:MOST_BARS]
    by_server: dict[int, list[JobSpan]] = {}
    for span in drawn:
        for part in span.parts:
            by_server.setdefault(part.server, []).append(span)
    busy = {n: sum(s.end_s - s.start_s for s in members) for n, members in by_server.items()}
    shown = sorted(sorted(busy, key=lambda n: -busy[n])[:MOST_SERVERS])
    models = [run.job.title for run in course.runs]
    groups = _groups([models[span.job] for span in drawn])
    colours = [groups.get(model, "other") for model in models]
    end_s = max((span.end_s for span in spans), default=1.0) or 1.0
    names = {run.job.name: run.job.name for run in course.runs}
    words = {run.job.name: f"runs {model}" for run, model in zip(course.runs, models, strict=True)}
    return {
        "span_s": end_s,
        "drawn_s": end_s if len(drawn) == len(spans) else drawn[-1].start_s,
        "num_drawn": len(drawn),
        "num_actions": len(spans),
        "action_title": "job",
        "kinds": sorted({(group, model if group != "other" else "other models") for model, group in groups.items()}),
        "words": words,
        "names": names,
        "workers": [_row(course, n, by_server[n], colours) for n in shown],
        "classes": [],
        "memory": None,
    }


def _groups(models: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each model; the most frequent have their own."""
    frequent = sorted(set(models), key=lambda model: (-models.count(model), model))
    return {model: f"group-{n}" if n < _NUM_COLOURS else "other" for n, model in enumerate(frequent)}


def _row(course: ClusterCourse, server: int, spans: Sequence[JobSpan], groups: Sequence[str]) -> dict[str, Any]:
    about = course.servers[server]
    lanes: dict[str, list[list[JobSpan]]] = {f"gpu {slot}": [[]] for slot in range(about.gpus)}
    for span in spans:
        for part in (part for part in span.parts if part.server == server):
            for lane in [f"gpu {slot}" for slot in part.slots] or ["cpu"]:
                _add(lanes.setdefault(lane, [[]]), span)
    size = f"{about.gpus} × {about.kind}, " if about.gpus else ""
    rent = ", rented" if about.is_rented else ""
    return {
        "name": about.name,
        "device": f"{size}{about.cores_milli / 1000:g} cores, {format_bytes(about.memory_bytes)}{rent}",
        "copies": 1,
        "num_shades": 1,
        "lanes": [
            {
                "name": name if n == 0 else "",
                "role": "compute" if n == 0 else "local",
                "bars": [_bar(course, span, groups) for span in row],
            }
            for name, rows in lanes.items()
            for n, row in enumerate(rows)
        ],
    }


def _add(rows: list[list[JobSpan]], span: JobSpan) -> None:
    """Adds a span to the first row that is free when it starts; parts of a GPU are shared."""
    for row in rows:
        if not row or row[-1].end_s <= span.start_s:
            row.append(span)
            return
    rows.append([span])


def _bar(course: ClusterCourse, span: JobSpan, groups: Sequence[str]) -> list[Any]:
    name = course.runs[span.job].job.name
    return [name, groups[span.job], float(f"{span.start_s:.9g}"), float(f"{span.end_s:.9g}"), name, 0]
