"""What a rank checks while its worker runs: requests to stop, a disk that does not answer; the lead also the others."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Self

from pipedejavu.launch.membership import Departure
from pipedejavu.planner.replan import Replanner
from pipedejavu.run.metrics import INTERVAL_S, MetricsCollector
from pipedejavu.run.run_folder import RunFolder
from pipedejavu.run.stop_signal import StopSignal
from pipedejavu.run.throughput import ThroughputMonitor
from pipedejavu.store.saver import SLOW_S


class RankMonitor:
    """Makes its checks in a background thread, while it is entered; tells the user of what it sees."""

    def __init__(
        self,
        stop_signal: StopSignal,
        folder: RunFolder,
        tell: Callable[[str], None],
        throughput: ThroughputMonitor | None = None,
        replanner: Replanner | None = None,
        collector: MetricsCollector | None = None,
        departures: Callable[[], Iterable[Departure]] = tuple,
    ):
        """The lead gives the throughput of all ranks, a replanner if the run may switch plans, and its collector.

        `departures` returns the workers that have died since the last call.
        """
        self.stop_signal, self.folder, self.tell = stop_signal, folder, tell
        self.throughput, self.replanner = throughput, replanner
        self.collector, self.departures = collector, departures
        self._stuck_told_s = 0.0
        """How long the disk had not answered when the user was last told of it."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the process that hosts the store has ended; the run itself reports why
            while not self._ended.wait(INTERVAL_S):
                self.check()

    def check(self) -> None:
        """Makes every check once."""
        self.stop_signal.listen()
        self._check_disk()
        self.check_members()
        for straggler in self.throughput.stragglers() if self.throughput else ():
            self.tell(str(straggler))
            self.folder.add_metrics(
                {"straggler": straggler.worker, "lag": straggler.slowdown, "kinds": straggler.kinds}
            )
        if self.replanner:
            self.replanner.look()

    def check_members(self) -> None:
        """Tells of workers that have died while the others go on; the metrics do not wait for them."""
        for departure in self.departures():
            if self.collector:
                self.collector.leave_out(departure.microbatches)
            self.folder.add_metrics(departure.row())
            self.tell(str(departure))

    def _check_disk(self) -> None:
        if (stuck_s := self.folder.stuck_s()) > self._stuck_told_s + SLOW_S:
            self._stuck_told_s = stuck_s
            self.tell(f"the disk of {self.folder.path} has not answered for {stuck_s:.0f} s; training goes on")
        self._stuck_told_s = min(self._stuck_told_s, stuck_s)
