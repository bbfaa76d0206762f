"""The script that scores published times: what it reads, how it divides, and that it finds constants again."""

import random
import sys
from pathlib import Path

import pytest

from pipedejavu.facts import InputError, read_machine
from pipedejavu.simulate.gpt_estimate import GptConstants, estimate_gpt
from tests.script import load_script

script = load_script("published")
MACHINE = read_machine("2x(8xa100-80gb), 800Gb/s")
HEADER = ",".join(script.COLUMNS)


def write(folder: Path, *lines: str) -> str:
    path = folder / "rows.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return str(path)


def made_rows(folder: Path, constants: GptConstants) -> list:
    """Rows whose times follow from constants, as a file would have them."""
    chance, lines = random.Random(1), []
    grids = [(1, 8, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1), (1, 1, 4), (2, 8, 1), (4, 1, 1), (1, 2, 1)]
    for t, d, p in grids * 4:
        micro, width = chance.choice([1, 2, 4, 8]), chance.choice([1024, 2048])
        lines.append(f"{t * d * p},{4 * d * micro},{micro},{width},16,24,1024,{t},{d},{p},1")
    rows = script.read_rows(write(folder, *lines), MACHINE, recomputes=False)
    return [
        row._replace(time_s=estimate_gpt(row.shape, row.grid, row.batch, row.wiring, constants).total_s) for row in rows
    ]


def test_constants_are_found_again(tmp_path: Path) -> None:
    real = GptConstants(memory=0.6, logit_bytes=90, layer_host_s=2e-3, microbatch_host_s=2e-3, wait_s=3e-5)
    rows = made_rows(tmp_path, real)
    found = script.calibrate(rows)
    assert script.score(rows, found).mean < 1e-3
    assert found.memory == pytest.approx(real.memory, rel=0.02)


def test_halves_are_even_and_whole(tmp_path: Path) -> None:
    rows = made_rows(tmp_path, GptConstants())
    for seed in range(3):
        fitted, held = script.halves(rows, seed)
        assert len(fitted) == len(held) == 16
        assert sorted(map(id, [*fitted, *held])) == sorted(map(id, rows))
        for tensor in (1, 2, 4, 8):
            counts = [sum(row.grid.tensor == tensor for row in half) for half in (fitted, held)]
            assert abs(counts[0] - counts[1]) <= 2


def test_a_score_knows_its_errors(tmp_path: Path) -> None:
    rows = [
        row._replace(time_s=row.time_s / factor)
        for row, factor in zip(made_rows(tmp_path, GptConstants()), [1.1, 0.8] * 16, strict=True)
    ]
    found = script.score(rows, GptConstants())
    assert found.mean == pytest.approx(0.15)
    assert found.worst == pytest.approx(0.2)
    assert found.bias == pytest.approx(-0.05)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("8,8,1,1024", r"line 2: expected 11 positive numbers, found '8,8,1,1024'"),
        ("8,8,1,1024,16,24,1024,2,1,4,soon", r"line 2: expected 11 positive numbers"),
        ("8,8,1,1024,16,24,1024,2,1,4,nan", r"line 2: expected 11 positive numbers"),
        ("4,8,1,1024,16,24,1024,2,1,4,9", r"line 2: 8 workers on 4 GPUs"),
        ("8,9,2,1024,16,24,1024,2,1,4,9", r"batch 9 as microbatches of 2 on 1 replicas; these do not go together"),
        ("8,8,1,1024,16,24,1024,2,1,4,9", r"has 1 rows; give at least 2"),
        ("32,8,1,1024,16,24,1024,8,1,4,9", r"8 × 1 × 4 workers need 32 GPUs"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(line: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=text):
        script.read_rows(write(tmp_path, line), MACHINE, recomputes=False)


def test_a_file_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["published.py", "nowhere.csv"])
    with pytest.raises(InputError, match=r"cannot read nowhere\.csv"):
        script.main()
