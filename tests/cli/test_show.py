"""How the command line leaves a terminal."""

import os
import pty
import sys

import pytest

from pipedejavu.cli import show


def test_a_terminal_gets_its_cursor_back_and_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TERM", "xterm")
    own, end = pty.openpty()
    with os.fdopen(end, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        show.show_cursor()
        screen.flush()
        assert os.read(own, 100) == b"\x1b[?25h"
    os.close(own)
    with (tmp_path / "err").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        show.show_cursor()
    assert (tmp_path / "err").read_text() == ""
