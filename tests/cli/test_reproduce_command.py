"""The verb `reproduce`: its list, its pages, its JSON and its faults."""

import json
import os

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from typer.testing import CliRunner

from pipedejavu.cli.main import app
from pipedejavu.facts import InputError
from pipedejavu.reproduce import EXPERIMENTS


def call(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["reproduce", *arguments], catch_exceptions=False)
    return done.stdout


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["reproduce", *arguments])
    assert isinstance(done.exception, InputError)
    return str(done.exception)


def test_without_a_name_the_experiments_are_listed():
    text = call()
    assert all(each.name in text for each in EXPERIMENTS)
    assert [row["name"] for row in json.loads(call("--json"))["experiments"]] == [each.name for each in EXPERIMENTS]


def test_a_run_writes_its_page_and_prints_figures_beside_published_ones(tmp_path):
    text = call("gpt-forward", "--quick", "--out", str(tmp_path))
    assert "2140.0 ms" in text
    assert "published" in text
    page = (tmp_path / "gpt-forward.html").read_text()
    assert "A quick run" in page
    assert "2140.0 ms" in page


@pytest.mark.slow
def test_every_experiment_runs_in_its_short_form_and_one_page_shows_them_all(tmp_path):
    form = json.loads(call("--all", "--quick", "--json", "--out", str(tmp_path), "--data", str(tmp_path / "data")))
    assert [each["name"] for each in form["findings"]] == [each.name for each in EXPERIMENTS]
    assert all(each["conditions"] and each["question"] for each in form["findings"])
    page = (tmp_path / "index.html").read_text()
    for each in EXPERIMENTS:
        assert each.title in page
        assert each.title in (tmp_path / f"{each.name}.html").read_text()


def test_json_is_one_object_with_all_findings(tmp_path):
    form = json.loads(call("gpt-forward", "predictors", "--quick", "--json", "--out", str(tmp_path)))
    assert [each["name"] for each in form["findings"]] == ["gpt-forward", "predictors"]
    assert form["pages"][-1] == str(tmp_path / "index.html")


def test_faults_are_one_sentence(tmp_path, monkeypatch):
    assert refused("gpt-forwards") == "there is no experiment 'gpt-forwards'; did you mean 'gpt-forward'?"
    assert refused("gpt-forward", "--quick", "--full") == "--quick and --full ask for two sizes; give one of them"
    assert "is named too" in refused("gpt-forward", "--all")
    file = tmp_path / "file"
    file.write_text("")
    assert refused("gpt-forward", "--quick", "--out", str(file / "pages")).endswith(
        "Not a directory; give another --out"
    )
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "permission denied" in refused("gpt-forward", "--quick", "--out", str(tmp_path))
