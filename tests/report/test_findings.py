"""Findings as a page and as JSON."""

import json
import re

from pipedejavu.report import Compared, Curve, ExperimentFindings, FindingsTable, LineChart, render_findings

FOUND = ExperimentFindings(
    "one", "First & only", "Does it <work>?", [("model", "MLP")],
    [Compared("loss", "0.1", "0.2", "half")],
    [LineChart("Loss", "update", "loss", [Curve("run", [(0, 1.0), (1, float("nan"))])])],
    [FindingsTable("Rows", ("what", "value"), [("a", "1")])], ["It works."], ["Small."], 2.0,
)  # fmt: skip


def test_a_page_shows_everything_and_loads_nothing() -> None:
    text = render_findings("A page", [FOUND, FOUND._replace(name="two")])
    for part in ("First &amp; only", "Does it &lt;work&gt;?", ">0.1<", ">0.2<", "It works.", "Small.", "MLP"):
        assert part in text
    assert 'href="#two"' in text
    assert not re.search(r'(src|href)="https?:', text)
    assert "<script" not in text
    assert "script-src" not in text


def test_numbers_that_are_not_finite_become_null_in_json() -> None:
    form = json.loads(json.dumps(FOUND.to_form(), allow_nan=False))
    assert form["charts"][0]["curves"][0]["points"] == [[0, 1.0], [1, None]]
    assert form["compared"] == [{"name": "loss", "today": "0.1", "published": "0.2", "meaning": "half"}]
