"""Compares the measured time of each worker's passes with its forecast, to detect slowdowns and stragglers.

Only forward and backward passes and their parts count: a worker that waits for a slow one is not slow itself.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from pipedejavu.facts import Span, joint_spread
from pipedejavu.program import Program
from pipedejavu.simulate import simulate

WINDOW, WINDOW_S = 5, 5.0
"""The median is taken over at least this many recent rounds and at least this many seconds."""
SPREADS = 3.0
"""Tolerance around the forecast, as a multiple of the profile's spread."""
LEAST_BAND, MOST_BAND = 0.25, 1.0
"""Lower and upper limit of the tolerance, as a fraction of the forecast."""

Times = dict[str, float]
"""Seconds by kind of action: F, B, I, W, R."""


class RoundTimes(NamedTuple):
    """One worker's round: its total time, and the time of its passes."""

    time_s: float
    times: Times


def times_of(spans: Iterable[Span]) -> Times:
    """Returns the time of one worker's passes in a round, by kind."""
    times: Times = {}
    for span in spans:
        if span.lane == "compute" and span.action[1].isdigit():  # passes are one letter and the piece, as in F0
            times[span.action[0]] = times.get(span.action[0], 0.0) + span.end_s - span.start_s
    return times


class Straggler(NamedTuple):
    """A worker that is slower than its forecast and than its peers."""

    worker: int
    device: str
    slowdown: float
    """Measured time of its passes divided by the forecast."""
    kinds: Times
    """Slowdown of each kind of action that is slow."""
    peers: float
    """Median slowdown of the other workers."""

    def __str__(self) -> str:
        kinds = " and ".join(f"{kind} {times:.1f}" for kind, times in self.kinds.items())
        peers = f"its peers {self.peers:.1f}"
        return f"worker {self.worker} on {self.device} is a straggler: {kinds} times as long as forecast, {peers}"


class ThroughputMonitor:
    """Tracks the slowdown of each worker: the median time of its passes in recent rounds, divided by the forecast."""

    def __init__(self, program: Program):
        self.known = [1.0] * len(program.workers)
        """Slowdown of each worker that the planner has taken into account."""
        self.named: set[int] = set()
        """Workers that were reported as stragglers."""
        self.expect(program)

    def expect(self, program: Program) -> None:
        """Sets the forecast from a program and discards earlier rounds."""
        prediction, self.program = simulate(program), program
        start, end = prediction.start, prediction.end
        self.forecast = [
            times_of(Span(n, a.lane, str(a), start[op], end[op]) for op, a in zip(ops, worker.actions, strict=True))
            for n, (ops, worker) in enumerate(zip(prediction.graph.of_action, program.workers, strict=True))
        ]
        self.bands = [band_of(program, worker) for worker in range(len(program.workers))]
        self._recent: list[deque[RoundTimes]] = [deque() for _ in program.workers]

    def take(self, worker: int, rounds: Iterable[RoundTimes]) -> None:
        """Adds rounds of one worker; rounds older than the window are dropped."""
        recent = self._recent[worker]
        for times in rounds:
            recent.append(times)
            while len(recent) > WINDOW and sum(r.time_s for r in recent) - recent[0].time_s >= WINDOW_S:
                recent.popleft()

    def take_round(self, time_s: float, spans: Sequence[Span]) -> None:
        """Adds one round of all workers."""
        for worker in range(len(self.forecast)):
            self.take(worker, [RoundTimes(time_s, times_of(span for span in spans if span.worker == worker))])

    def slowdowns(self) -> list[float] | None:
        """Returns each worker's slowdown (1 if it has no passes), or None until the window is full."""
        pairs = [(sum(times.values()), [*rounds]) for times, rounds in zip(self.forecast, self._recent, strict=True)]
        if any(
            forecast and (len(rounds) < WINDOW or sum(r.time_s for r in rounds) < WINDOW_S)
            for forecast, rounds in pairs
        ):
            return None
        return [_ratio([sum(r.times.values()) for r in rounds], forecast) for forecast, rounds in pairs]

    def departure(self) -> list[float] | None:
        """Returns all slowdowns if one has left its band around the known value, else None; marks them as known."""
        slowdowns = self.slowdowns()
        if slowdowns is None:
            return None
        if all(
            1 / band <= slowdown / known <= band
            for slowdown, known, band in zip(slowdowns, self.known, self.bands, strict=True)
        ):
            return None
        self.known = slowdowns
        return slowdowns

    def stragglers(self) -> list[Straggler]:
        """Returns workers newly slower than both their forecast and their peers by more than the band."""
        slowdowns = self.slowdowns()
        if slowdowns is None or len(slowdowns) < 2:
            return []
        stragglers = []
        for worker, slowdown in enumerate(slowdowns):
            peers = median(other for n, other in enumerate(slowdowns) if n != worker)
            if slowdown <= self.bands[worker] * max(1.0, peers):
                self.named.discard(worker)
            elif worker not in self.named:
                self.named.add(worker)
                stragglers.append(Straggler(worker, self.program.devices[worker], slowdown, self._kinds(worker), peers))
        return stragglers

    def _kinds(self, worker: int) -> Times:
        rounds, forecasts = self._recent[worker], self.forecast[worker]
        slowdowns = {kind: _ratio([r.times.get(kind, 0.0) for r in rounds], forecasts[kind]) for kind in forecasts}
        return {kind: slowdown for kind, slowdown in slowdowns.items() if slowdown > self.bands[worker]} or slowdowns


def band_of(program: Program, worker: int) -> float:
    """Returns the largest slowdown within tolerance for a worker, from the time-weighted spread of its profile."""
    profile, kind = program.profile, program.machine.device(program.devices[worker]).kind
    samples = program.plan.feed.samples
    costs = [
        cost
        for piece in program.pieces_on[worker]
        for unit in program.pieces[piece].units
        for time in (profile.time(profile.units[unit], kind),)
        for cost in (time.forward, time.backward)
    ]
    return 1 + min(MOST_BAND, max(LEAST_BAND, SPREADS * joint_spread(costs, samples)))


def _ratio(times: list[float], forecast: float) -> float:
    return median(times) / forecast if forecast and times else 1.0
