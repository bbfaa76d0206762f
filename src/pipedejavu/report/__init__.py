"""Reports for people: timelines as a self-contained HTML page or a Perfetto trace, and profiles as memory needs.

It decides how a timeline, and the choice of its plan, are shown. It knows the records of `facts` and the text of an
action; it does not know how a plan is made, simulated or run, and writes no files.
"""

from pipedejavu.report.compare import Comparison, compare
from pipedejavu.report.findings import Compared, ExperimentFindings, FindingsTable, render_findings
from pipedejavu.report.grid import render_grid
from pipedejavu.report.headline import Headline, flop_share, headlines, step_time
from pipedejavu.report.html import render_chart, render_figures, render_html, render_section
from pipedejavu.report.line_chart import Curve, LineChart
from pipedejavu.report.memory_need import Need, count_parameters, fold_units, step_spread, step_times, work_out_needs
from pipedejavu.report.perfetto import render_trace
from pipedejavu.report.scatter import Choice
from pipedejavu.report.story import Story, StoryEvaluation

__all__ = [
    "Choice",
    "Compared",
    "Comparison",
    "Curve",
    "ExperimentFindings",
    "FindingsTable",
    "Headline",
    "LineChart",
    "Need",
    "Story",
    "StoryEvaluation",
    "compare",
    "count_parameters",
    "flop_share",
    "fold_units",
    "headlines",
    "render_chart",
    "render_figures",
    "render_findings",
    "render_grid",
    "render_html",
    "render_section",
    "render_trace",
    "step_spread",
    "step_time",
    "step_times",
    "work_out_needs",
]
