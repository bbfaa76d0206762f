"""The script that scores published times: what it reads, its plans and scores, and that it finds constants again."""

import random
import sys
from pathlib import Path

import pytest

from pipedejavu.facts import InputError, read_machine
from tests.script import load_script

script = load_script("published")
MACHINE = read_machine("2x(8xa100-80gb), 800Gb/s")
HEADER = ",".join(script.COLUMNS)


def write(folder: Path, *lines: str) -> str:
    path = folder / "rows.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return str(path)


def made_rows(folder: Path, constants) -> list:
    """Returns rows whose times follow from constants, as a file would have them."""
    chance, lines = random.Random(1), []
    grids = [(1, 8, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1), (1, 1, 4), (2, 8, 1), (4, 1, 1), (1, 2, 1)]
    for t, d, p in grids * 2:
        micro, width = chance.choice([1, 2, 4, 8]), chance.choice([1024, 2048])
        lines.append(f"{t * d * p},{4 * d * micro},{micro},{width},16,8,1024,{t},{d},{p},1")
    rows = script.read_rows(write(folder, *lines), MACHINE)
    return [row._replace(time_s=row.forecast_s(constants)) for row in rows]


def test_constants_are_found_again(tmp_path: Path) -> None:
    real = script.Constants(memory=0.6, logit_bytes=90, layer_host_s=2e-3, microbatch_host_s=2e-3, sum_start_s=3e-5)
    rows = made_rows(tmp_path, real)
    found = script.calibrate(rows)
    assert script.score(script.forecast(rows, found)).mean < 5e-3
    assert found.memory == pytest.approx(real.memory, rel=0.02)


def test_a_row_is_the_plan_that_was_run(tmp_path: Path) -> None:
    lines = ["16,32,2,1024,16,7,1024,2,4,2,9"] * 2
    plan = script.read_rows(write(tmp_path, *lines), MACHINE)[0].plan()
    assert plan.cut.bounds == (5,)  # the embedding and four layers, three layers and the head
    assert plan.degrees == (2,) * 8
    assert (plan.feed.microbatches, plan.feed.samples, plan.order.recompute_units) == (4, 2, tuple(range(1, 8)))
    # Stages of the first replica, then of the second: replicas of a stage are neighbours.
    assert plan.place.devices[:6] == tuple(MACHINE.devices[n].name for n in (0, 1, 8, 9, 2, 3))


def test_a_score_knows_errors_ranks_and_the_cost_of_the_first_choice(tmp_path: Path) -> None:
    lines = [f"8,8,1,1024,16,8,1024,{t},{d},{p},{ms}" for t, d, p, ms in ((8, 1, 1, 20), (4, 2, 1, 10), (2, 2, 2, 40))]
    rows = script.read_rows(write(tmp_path, *lines), MACHINE)
    found = script.score([(rows[0], 0.011), (rows[1], 0.012), (rows[2], 0.040)])
    assert found.mean == pytest.approx((0.45 + 0.2 + 0) / 3)
    assert found.bias == pytest.approx((-0.45 + 0.2 + 0) / 3)
    assert found.covered == pytest.approx(1 / 3)  # 0.012 is 18 % off, and the interval ends at 14 %
    assert (found.groups, found.rank, found.regret) == (1, pytest.approx(0.5), pytest.approx(1.0))


def test_groups_over_several_hosts_are_left_out_and_counted(tmp_path: Path, capsys) -> None:
    lines = ["16,8,1,1024,16,8,1024,16,1,1,9", *["8,8,1,1024,16,8,1024,8,1,1,9"] * 2]
    assert len(script.read_rows(write(tmp_path, *lines), MACHINE)) == 2
    assert "1 rows with tensor-parallel groups over several hosts are left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("8,8,1,1024", r"line 2: expected 11 positive numbers, found '8,8,1,1024'"),
        ("8,8,1,1024,16,24,1024,2,1,4,soon", r"line 2: expected 11 positive numbers"),
        ("8,8,1,1024,16,24,1024,2,1,4,nan", r"line 2: expected 11 positive numbers"),
        ("4,8,1,1024,16,24,1024,2,1,4,9", r"line 2: 8 workers on 4 GPUs"),
        ("8,9,2,1024,16,24,1024,2,1,4,9", r"batch 9 as microbatches of 2 on 1 replicas; these do not go together"),
        ("8,8,1,1024,16,24,1024,2,1,4,9", r"has 1 rows; give at least 2"),
        ("32,8,1,1024,16,24,1024,8,1,4,9", r"32 GPUs, and the machine has 16; name a larger one"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(line: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=text):
        script.read_rows(write(tmp_path, line), MACHINE)


def test_a_file_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["published.py", "nowhere.csv"])
    with pytest.raises(InputError, match=r"cannot read nowhere\.csv"):
        script.main()
