"""Timelines for people: a self-contained HTML page, and a trace for Perfetto.

Owns how a timeline and the choices behind it are shown. Knows the records of `facts` and the text of an
action; does not know how a plan is made, simulated or run, and writes no files.
"""

from pipedejavu.report.compare import Comparison, compare
from pipedejavu.report.grid import render_grid
from pipedejavu.report.html import render_html
from pipedejavu.report.trace import render_trace

__all__ = ["Comparison", "compare", "render_grid", "render_html", "render_trace"]
