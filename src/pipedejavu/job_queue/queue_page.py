"""The page of a queue that ran: a Gantt chart by device, and a table of its jobs."""

from collections.abc import Sequence
from pathlib import Path

from pipedejavu.cluster import ClusterCourse, ScheduleOptions, Server
from pipedejavu.cluster.job_run import JobRun, JobSpan
from pipedejavu.cluster.schedule_page import gantt_data
from pipedejavu.cluster.server_pool import ServerPart
from pipedejavu.facts import format_seconds
from pipedejavu.job_queue.queue_state import JobEntry, QueueState
from pipedejavu.report import Headline, render_chart, render_figures, render_section
from pipedejavu.report.table import Cell, render_table


def render_queue(state: QueueState, servers: Sequence[Server], options: ScheduleOptions, folder: Path) -> str:
    """Returns one self-contained HTML page."""
    runs = tuple(JobRun(number, entry.job) for number, entry in enumerate(state.entries))
    most = max((device + 1 for entry in state.entries for span in entry.spans for device in span.devices), default=1)
    shown = servers[0]._replace(gpus=max(sum(server.gpus for server in servers), most))
    spans = tuple(span for number, entry in enumerate(state.entries) for span in _spans(number, entry))
    course = ClusterCourse(options, (shown,), runs, spans, (), (), len(spans))
    below = render_section("jobs", "Jobs", _table(state))
    title = f"{len(runs)} jobs of {folder.name}, {options.policy}"
    data = gantt_data(course)
    if shown.kind == "cpu":  # cores take the place of GPUs
        for lane in (lane for row in data["workers"] for lane in row["lanes"]):
            lane["name"] = lane["name"].replace("gpu", "core")
    return render_chart(data, title, render_figures(_leads(state)), (), below=below)


def _spans(number: int, entry: JobEntry) -> list[JobSpan]:
    spans, before = [], 0
    for span in entry.spans:
        parts = (ServerPart(0, span.devices, 1000, 0, 0),)
        spans.append(JobSpan(number, parts, span.start_s, span.end_s, span.steps - before, 0.0, 0.0))
        before = span.steps
    return spans


def _leads(state: QueueState) -> Sequence[Headline]:
    ended = [entry for entry in state.entries if entry.state == "ended"]
    ran_s = sum(entry.ran_s(state.now_s) for entry in state.entries)
    waited_s = sum(entry.waited_s(state.now_s) for entry in state.entries)
    return [
        Headline("Ended", f"{len(ended)} of {len(state.entries)}", "jobs"),
        Headline("Makespan", format_seconds(state.now_s), "from the start of the queue to its last change"),
        Headline("Ran", format_seconds(ran_s), f"all jobs together; they waited {format_seconds(waited_s)}"),
        Headline("Preemptions", f"{sum(entry.num_preemptions for entry in state.entries)}", "with a checkpoint each"),
    ]


def _table(state: QueueState) -> str:
    rows = [
        [
            Cell(entry.job.name, head=True),
            Cell(entry.state),
            Cell(format_seconds(entry.waited_s(state.now_s))),
            Cell(format_seconds(entry.ran_s(state.now_s))),
            Cell(entry.forecast.interval if entry.forecast else "–"),
            Cell(f"{entry.num_preemptions}"),
            Cell(entry.reason or "–"),
        ]
        for entry in state.entries
    ]
    return render_table(("Job", "State", "Waited", "Ran", "Forecast", "Preemptions", "Reason"), rows, "jobs")
