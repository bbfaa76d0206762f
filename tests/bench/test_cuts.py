"""The bench of cuts: the analytical cut gives a worker that is slower fewer units, and the equal one does not."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.facts import Link
from tests.script import load_script
from tests.search.case import profile

script = load_script("cuts")


def test_a_worker_that_is_three_times_slower_gets_a_third_of_the_work():
    model = script.with_slow(profile([1e-3] * 8), 3.0)
    found = script.programs(model, Link(bytes_per_s=1e12), samples=1)
    assert found["equal"].plan.cut.bounds == (4,)
    assert found["analytical"].plan.cut.bounds == (6,)
    assert list(found["analytical"].devices) == ["fast", "slow"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts a peak from now on")
def test_each_worker_is_a_process_whose_memory_grows_by_its_state_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(script.__file__).parent))
    cuts = __import__("cuts")
    job, _ = cuts.prepare("gpt-tiny")
    sizes = [sum(4 * p.numel() for p in module.parameters()) for _, module in job.units]
    model = cuts.with_slow(profile([1e-3] * len(sizes), weights=sizes), 2.0)
    program = cuts.programs(model, Link(bytes_per_s=1e12))["equal"]
    for worker, found in enumerate(cuts.run("gpt-tiny", program, times=2.0, steps=3)):
        units = [u for piece in program.pieces_on[worker] for u in program.pieces[piece].units]
        assert len(found["ends_s"]) == 3
        # Weights, their gradients and two moments.
        assert found["grown_bytes"] > 4 * sum(sizes[u] for u in units)
