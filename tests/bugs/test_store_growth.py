"""Reports of ranks are taken out of the store when they are read, so that a long run does not fill it."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import PrefixStore

from pipedejavu.engine import Log
from pipedejavu.launch.loopback_store import connect_store, serve_store
from pipedejavu.run import RunFolder
from pipedejavu.run.logbook import Logbooks
from pipedejavu.run.metrics import MetricsCollector, MetricsReporter
from pipedejavu.run.progress import Progress


class Ones:
    """Microbatches of one sample."""

    def count(self, _: int) -> int:
        return 1


@pytest.mark.parametrize("prefix", ["run", "word/watch0"])
def test_two_hundred_steps_leave_no_keys(tmp_path: Path, prefix: str) -> None:
    """`torchrun`'s store is a TCPStore, too, and ranks keep their keys under a name of their own in it."""
    server, num_steps = serve_store(), 200
    store = PrefixStore(prefix, connect_store(server.port))
    logs = (Log(), Log())
    watches = [MetricsReporter(store, rank, Ones(), torch.device("cpu"), None) for rank in range(2)]
    for watch, log in zip(watches, logs, strict=True):
        watch.follow(log)
    before = server.num_keys()
    with Progress(num_steps, "samples", 1.0) as progress:
        collector = MetricsCollector(
            RunFolder(tmp_path), progress, Logbooks({}, print), num_ranks=2, update_size=2, num_samples=2
        )
        for step in range(num_steps):
            for rank, watch in enumerate(watches):
                logs[rank].losses[2 * step + rank] = 1.0
                watch.send()
            collector.take_all(store)
    assert collector.step == num_steps + 1
    assert server.num_keys() == before
