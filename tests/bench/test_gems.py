"""GEMS with state on the host: what it could not hold otherwise is refused, and trains right with it."""

import argparse

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.zoo import build
from tests.script import load_script

script = load_script("gems")
LR, STEPS = 1e-4, 2


@pytest.fixture(autouse=True)
def one_thread():
    """Workers that are threads themselves wait for each other where each has several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_gems_trains_with_its_state_on_the_host_where_it_is_refused_without(capsys, monkeypatch) -> None:
    def build_double(*args, **sizes):
        task = build(*args, **sizes)
        task.model.double()  # AdamW makes much of the rounding of a gradient that is next to nothing
        return task

    monkeypatch.setattr(script, "build", build_double)
    script.compare(*script.prepare("gpt-tiny", context=16), argparse.Namespace(workers=2, room=1.1, steps=STEPS))
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    rows = {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}
    assert list(rows) == [
        "all on the device",
        "the same, were there room",
        "optimizer state on the host",
        "weights through a window too",
    ]
    refused = rows.pop("all on the device")
    assert refused[1].startswith("refused: device 'gpu0' would need")
    assert refused[1].endswith("use more workers, smaller microbatches, recompute, or keep state on the host")
    for _, _, difference in rows.values():
        assert float(difference) < 1e-6 * LR * STEPS  # AdamW moves a weight by about its rate
