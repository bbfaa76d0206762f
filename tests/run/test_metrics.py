"""Metrics of a run in progress: the reports of ranks, and what rank 0 makes of them."""

import json

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import HashStore

from pipedejavu.engine import Log
from pipedejavu.facts import Span
from pipedejavu.run import RunFolder
from pipedejavu.run.live_view import WorkerPanel
from pipedejavu.run.logbook import Logbooks
from pipedejavu.run.metrics import MetricsCollector, MetricsReporter
from pipedejavu.run.progress import Memory, Progress

CPU = torch.device("cpu")


class Pairs:
    """Microbatches of two samples."""

    def count(self, _: int) -> int:
        return 2


@pytest.fixture
def collector(tmp_path):
    with Progress(3, "samples", 1.0) as progress:
        yield MetricsCollector(
            RunFolder(tmp_path), progress, Logbooks({}, print), num_ranks=2, update_size=2, num_samples=4
        )


def rows(collector: MetricsCollector) -> list[dict]:
    path = collector.folder.metrics
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_an_update_is_told_once_all_its_microbatches_are_known(collector) -> None:
    store, logs = HashStore(), (Log(), Log())
    reporters = [MetricsReporter(store, rank, Pairs(), CPU, None) for rank in range(2)]
    for reporter, log in zip(reporters, logs, strict=True):
        reporter.follow(log)

    def tell(rank: int, losses: dict[int, float]) -> list[int]:
        logs[rank].losses.update(losses)
        reporters[rank].send()
        collector.take_all(store)
        return [row["step"] for row in rows(collector)]

    assert tell(0, {0: 3.0}) == []
    assert tell(0, {2: 9.0}) == []
    assert tell(1, {3: 1.0}) == []  # the second update is whole, but not the first
    assert tell(1, {1: 5.0}) == [1, 2]
    assert [(row["loss"], row["count"]) for row in rows(collector)] == [(2.0, 4), (2.5, 4)]
    assert all(row["peak_bytes"] > 1e6 for row in rows(collector))
    assert all("peak_gpu_bytes" not in row for row in rows(collector))


def test_a_loss_that_is_noted_again_counts_once(collector) -> None:
    """A piece that is recomputed notes its loss a second time."""
    store, log = HashStore(), Log()
    reporter = MetricsReporter(store, 0, Pairs(), CPU, None)
    reporter.follow(log)
    log.losses[0] = 3.0
    reporter.send()
    log.losses[0] = 3.0
    log.losses[1] = 5.0
    reporter.settle()
    assert log.losses == {}
    log.losses[2] = 1.0
    reporter.send()
    collector.take_all(store)
    assert [(row["step"], row["loss"]) for row in rows(collector)] == [(1, 2.0)]


def test_an_update_was_made_when_its_last_loss_was_known_and_not_when_it_was_told(collector) -> None:
    store, log = HashStore(), Log()
    reporter = MetricsReporter(store, 0, Pairs(), CPU, None)
    reporter.follow(log)
    for number in range(4):
        log.note_loss(number, 1.0)
        log.noted_s[number] = reporter.started_s + number
    reporter.settle()
    assert log.noted_s == {}
    reporter.send()
    collector.take_all(store)
    assert [row["elapsed_s"] for row in rows(collector)] == pytest.approx([1.0, 3.0])


def test_reports_come_while_the_run_continues(collector) -> None:
    store, log = HashStore(), Log()
    with MetricsReporter(store, 0, Pairs(), CPU, collector) as reporter:
        reporter.follow(log)
        log.losses.update({0: 1.0, 1: 1.0})
        while not rows(collector):  # the reporter's thread brings them; the test's timeout ends a wait in vain
            pass
        assert rows(collector)[0]["step"] == 1


def test_an_update_does_not_wait_for_a_worker_that_died_but_has_what_it_reported(collector) -> None:
    store, logs = HashStore(), (Log(), Log())
    reporters = [MetricsReporter(store, rank, Pairs(), CPU, None) for rank in range(2)]
    for reporter, log in zip(reporters, logs, strict=True):
        reporter.follow(log)
    logs[0].losses.update({0: 3.0, 2: 9.0, 4: 2.0})
    logs[1].losses.update({1: 5.0})
    reporters[0].send()
    collector.take_all(store)
    assert rows(collector) == []
    reporters[1].send()  # its last report, which nobody has taken when it is known to be dead
    collector.leave_out([1])
    collector.take_all(store)
    told = [(row["step"], row["loss"], row["count"], row["samples"]) for row in rows(collector)]
    assert told == [(1, 2.0, 4, 4), (2, 4.5, 2, 2), (3, 1.0, 2, 2)]


def test_the_progress_says_all_that_is_known(capsys) -> None:
    with Progress(2, "tokens", 1.0) as progress:
        progress.report(1, 0.5, 10, Memory(3 << 20, 0), 1.0)
        progress.report(2, 0.25, 10, Memory(3 << 20, 5 << 30), 2.0)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("step 1/2  loss 0.5000  ")
    assert first.endswith("tokens/s  memory 3.0 MiB  1 s ± 285 ms left")
    assert last.endswith("tokens/s  memory 3.0 MiB + 5.0 GiB GPU")


def test_what_each_rank_says_of_itself_reaches_its_panel(tmp_path) -> None:
    panels, store = [WorkerPanel("cpu0"), WorkerPanel("cpu1")], HashStore()
    with Progress(3, "samples", 1.0, panels=panels) as progress:
        books = Logbooks({}, print)
        collector = MetricsCollector(RunFolder(tmp_path), progress, books, num_ranks=2, update_size=2, num_samples=4)
        reporter = MetricsReporter(store, 1, Pairs(), CPU, None)
        reporter.settle([Span(1, "compute", "F0.0@0", 0.0, 1.0), Span(1, "net>0", "SEND:g0.0>0", 1.0, 2.0)])
        reporter.send()
        collector.take_all(store)
    assert (panels[0].busy, panels[0].peak_bytes) == ({}, 0)
    assert panels[1].busy == {"compute": 0.5, "net>0": 0.5}
    assert panels[1].peak_bytes > 1e6
