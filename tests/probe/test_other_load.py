"""The load of other processes, from a made-up /proc/stat."""

import os
from pathlib import Path

import pytest

from pipedejavu.probe import other_load
from pipedejavu.probe.other_load import OtherLoad

TICKS = os.sysconf("SC_CLK_TCK")


class Clock:
    """Stands for time: of the wall, and of this process."""

    wall_s = own_s = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(other_load.time, "perf_counter", lambda: clock.wall_s)
    monkeypatch.setattr(other_load, "_own_s", lambda: clock.own_s)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    return clock


def write(folder: Path, user_s: float, idle_s: float, guest_s: float = 0.0) -> None:
    times = [user_s, 0, 1, idle_s, 2, 0, 0, 0, guest_s, 0]
    (folder / "stat").write_text("cpu  " + " ".join(str(round(time * TICKS)) for time in times) + "\ncpu0 1 2 3\n")


def test_what_others_take_is_all_time_but_idle_and_ones_own(tmp_path: Path, clock: Clock) -> None:
    write(tmp_path, 100.0, 500.0)
    load = OtherLoad(4, tmp_path)
    clock.wall_s, clock.own_s = 10.0, 12.0
    write(tmp_path, 127.0, 513.0, guest_s=9.0)
    assert load.busy_cores() == pytest.approx((27.0 - 12.0) / 10.0)


def test_a_container_with_some_of_the_cores_asks_for_the_queue(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 100.0, 500.0)
    monkeypatch.setattr("os.getloadavg", lambda: (5.5, 1.0, 1.0))
    for load in (OtherLoad(2, tmp_path), OtherLoad(2, tmp_path / "nowhere")):
        clock.wall_s += 10.0
        assert load.busy_cores() == 3.5
