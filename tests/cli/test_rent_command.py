"""The command `rent`: what it prints and refuses."""

import json
from pathlib import Path

from tests.cli.test_main import refused, run
from tests.search.case import machine, profile


def files(folder: Path) -> tuple[str, ...]:
    profile([1e-3] * 4, {"fast": 1.0, "half": 0.5}).save(folder / "profile.json")
    for name, kind in (("quick", "fast"), ("cheap", "half")):
        machine([kind]).replace(name=name).save(folder / f"{name}.json")
    return (
        str(folder / "profile.json"),
        "--machine",
        str(folder / "quick.json"),
        "--machine",
        str(folder / "cheap.json"),
    )


def test_machines_are_a_table_with_a_conclusion(tmp_path: Path) -> None:
    asked = ("rent", *files(tmp_path), "--train-samples", "1200000", "--price", "fast=3", "--price", "half=1")
    lines = run(*asked).stdout.splitlines()
    assert lines[0] == "test for 1,200,000 samples, 32 per update"
    assert lines[2].split() == ["machine", "samples/s", "time", "cost", "plan"]
    assert lines[3].split()[:5] == ["cheap", "41.67", "8.00", "h", "8.00"]
    assert lines[4].split()[:5] == ["quick", "83.33", "4.00", "h", "12.00"]
    assert lines[6] == "cheap is the cheapest; quick is 2.00× as fast and costs 1.50× as much."
    late = run(*asked, "--deadline", "5").stdout
    assert "8.00 h (late)" in late
    assert "quick is the cheapest in time, and the soonest." in late
    none = run(*asked, "--deadline", "1").stdout
    assert "None of them ends within 1 h; quick comes nearest, with 4.00 h." in none


def test_the_json_form_has_times_and_costs(tmp_path: Path) -> None:
    asked = ("rent", *files(tmp_path), "--train-samples", "1200000", "--failures", "half=100", "--json")
    form = json.loads(run(*asked).stdout)
    first, second = form["rentals"]
    assert (first["machine"], second["machine"]) == ("quick", "cheap")
    assert first["lost_share"] == 0
    assert 0 < second["lost_share"] < 0.01
    assert form["conclusion"] == "quick is the soonest, with 4.00 h (--price adds costs)."


def test_faults_are_one_sentence(tmp_path: Path) -> None:
    asked = ("rent", *files(tmp_path), "--train-samples", "10")
    assert "--failures is KIND=NUMBER, 0 or more, such as a100=2.5, not 'fast'" in refused(*asked, "--failures", "fast")
    assert "--failures gives 'fast' 0 hours, so that it never trains" in refused(*asked, "--failures", "fast=0")
    assert "--price gives 'fast' twice" in refused(*asked, "--price", "fast=1", "--price", "fast=2")
    assert "machine 'cheap' has no price" in refused(*asked, "--price", "fast=1")
    assert "a machine is given twice" in refused(*asked, *asked[2:4])
    assert "--train-samples is a number of samples, 1 or more, not 0" in refused(*asked[:-1], "0")
