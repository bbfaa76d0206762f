"""Whether workers keep the pace of their forecast: what their passes take against it, round by round.

Only forwards, backwards and their parts count: a worker that waits for a slow one is not slow itself.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from pipedejavu.facts import Span, joint_spread
from pipedejavu.program import Program
from pipedejavu.simulate import simulate

WINDOW, WINDOW_S = 5, 5.0
"""The median of the last rounds counts: of so many at least, and of those of so long."""
SPREADS = 3.0
"""How many times the profile's own spread a worker may be off its forecast."""
LEAST_BAND, MOST_BAND = 0.25, 1.0
"""What it may be off in any case, and what in none, as parts of the forecast: a median spreads less."""

Times = dict[str, float]
"""Seconds by kind of action: F, B, I, W, R."""


class RoundTimes(NamedTuple):
    """One worker's round: how long it took in all, and its passes."""

    time_s: float
    times: Times


def times_of(spans: Iterable[Span]) -> Times:
    """Returns what one worker's passes took in a round."""
    found: Times = {}
    for span in spans:
        if span.lane == "compute" and span.action[1].isdigit():  # a pass names its piece behind one letter
            found[span.action[0]] = found.get(span.action[0], 0.0) + span.end_s - span.start_s
    return found


class Straggler(NamedTuple):
    """A worker that is slower than its forecast and than its peers."""

    worker: int
    device: str
    slowdown: float
    """How many times as long as forecast its passes take."""
    kinds: Times
    """The same for each kind of action that is slow."""
    peers: float
    """The median of its peers."""

    def __str__(self) -> str:
        kinds = " and ".join(f"{kind} {times:.1f}" for kind, times in self.kinds.items())
        peers = f"its peers {self.peers:.1f}"
        return f"worker {self.worker} on {self.device} is a straggler: {kinds} times as long as forecast, {peers}"


class ThroughputMonitor:
    """What each worker's passes take as a multiple of their forecast, in the median of the last rounds."""

    def __init__(self, program: Program):
        self.known = [1.0] * len(program.workers)
        """By worker, the multiple that the planner knows of."""
        self.named: set[int] = set()
        """Workers that were called stragglers."""
        self.expect(program)

    def expect(self, program: Program) -> None:
        """Takes the forecast of a program; rounds before it no longer count."""
        prediction, self.program = simulate(program), program
        start, end = prediction.start, prediction.end
        self.forecast = [
            times_of(Span(n, a.lane, str(a), start[op], end[op]) for op, a in zip(ops, worker.actions, strict=True))
            for n, (ops, worker) in enumerate(zip(prediction.graph.of_action, program.workers, strict=True))
        ]
        self.bands = [band_of(program, worker) for worker in range(len(program.workers))]
        self._recent: list[deque[RoundTimes]] = [deque() for _ in program.workers]

    def take(self, worker: int, rounds: Iterable[RoundTimes]) -> None:
        """Takes rounds of one worker; those before the window are forgotten."""
        recent = self._recent[worker]
        for found in rounds:
            recent.append(found)
            while len(recent) > WINDOW and sum(r.time_s for r in recent) - recent[0].time_s >= WINDOW_S:
                recent.popleft()

    def take_round(self, time_s: float, spans: Sequence[Span]) -> None:
        """Takes one round of all workers."""
        for worker in range(len(self.forecast)):
            self.take(worker, [RoundTimes(time_s, times_of(span for span in spans if span.worker == worker))])

    def slowdowns(self) -> list[float] | None:
        """Returns each worker's multiple, 1 for one without passes; None while rounds are missing."""
        pairs = [(sum(times.values()), [*rounds]) for times, rounds in zip(self.forecast, self._recent, strict=True)]
        if any(
            forecast and (len(rounds) < WINDOW or sum(r.time_s for r in rounds) < WINDOW_S)
            for forecast, rounds in pairs
        ):
            return None
        return [_ratio([sum(r.times.values()) for r in rounds], forecast) for forecast, rounds in pairs]

    def departure(self) -> list[float] | None:
        """Returns all multiples where one is out of its band around what the planner knows; it knows them then."""
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
        """Returns workers that have become slower than their forecast and than their peers by more than the band."""
        slowdowns = self.slowdowns()
        if slowdowns is None or len(slowdowns) < 2:
            return []
        found = []
        for worker, slowdown in enumerate(slowdowns):
            peers = median(other for n, other in enumerate(slowdowns) if n != worker)
            if slowdown <= self.bands[worker] * max(1.0, peers):
                self.named.discard(worker)
            elif worker not in self.named:
                self.named.add(worker)
                found.append(Straggler(worker, self.program.devices[worker], slowdown, self._kinds(worker), peers))
        return found

    def _kinds(self, worker: int) -> Times:
        rounds, forecasts = self._recent[worker], self.forecast[worker]
        slowdowns = {kind: _ratio([r.times.get(kind, 0.0) for r in rounds], forecasts[kind]) for kind in forecasts}
        return {kind: slowdown for kind, slowdown in slowdowns.items() if slowdown > self.bands[worker]} or slowdowns


def band_of(program: Program, worker: int) -> float:
    """Returns how many times its forecast a worker may take: by the profile's spread, weighted by time."""
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


def _ratio(found: list[float], forecast: float) -> float:
    return median(found) / forecast if forecast and found else 1.0
