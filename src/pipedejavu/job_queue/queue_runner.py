"""Runs a queue: carries out one decision after the other, and keeps the state on disk ahead of what it does.

    waiting ──start──▶ running ──stop──▶ stopping
       ▲                  │ exit            │ exit       exit with 0: ended; killed too often, or an error: failed
       └──────────────────┴─────────────────┘

While a job stops, or waits for devices that were decided for it, no other decision is made.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipedejavu.cluster import QueuedJob, ScheduleOptions, Server, decide
from pipedejavu.job_queue.job_process import JobProcesses
from pipedejavu.job_queue.queue_state import HeldSpan, JobEntry, QueueState

KILL_AFTER_S = 90.0
"""How long a job may take to stop before it is killed; its checkpoint before that stays."""
MOVED = 74
"""Exit code of a job that has ended but had to leave files elsewhere, as its log says."""
_KILLED = {128 + n for n in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)}


class QueueRunner:
    """A queue on this host, or on several; `keep` stores its state and `tell` informs the user."""

    def __init__(
        self, state: QueueState, servers: Sequence[Server], options: ScheduleOptions, processes: JobProcesses,
        keep: Callable[[QueueState], None], tell: Callable[[str], None], retries: int = 1,
    ):  # fmt: skip
        self.state, self.servers, self.options, self.processes = state, servers, options, processes
        self.keep, self.tell, self.retries = keep, tell, retries
        self._now_s = state.now_s
        self._round_s: float | None = None
        self._may_change = True
        self._num_devices = sum(server.gpus for server in servers)

    def run(self) -> None:
        """Returns when all jobs are over, or have stopped because a signal came."""
        self._adopt()
        while True:
            self._read_clock()
            for number, entry in enumerate(self.state.entries):
                if entry.holds_devices and self.processes.has_ended(entry.job.name):
                    self._settle(number, self.processes.exit_code(entry.job.name))
            if self.processes.stop_number:
                self._stop_all()
            else:
                self._fail_followers()
                self._decide()
                self._start_planned()
            if self._is_over():
                return
            next_s = self._next_s()
            if next_s is None and not any(entry.holds_devices for entry in self.state.entries):
                self.tell("the jobs that are left fit on no node that is left; repeat the command when nodes are back")
                return
            self.processes.wait(next_s)

    def _is_over(self) -> bool:
        entries = self.state.entries
        if self.processes.stop_number:
            return not any(entry.holds_devices for entry in entries)
        return all(entry.is_over for entry in entries)

    def _read_clock(self) -> None:
        self._now_s = max(self._now_s, self.processes.now_at() - self.state.began_at)

    def _change(self, number: int, **changes: Any) -> None:
        self._store({number: changes})

    def _store(self, changes: Mapping[int, Mapping[str, Any]]) -> None:
        """Changes entries by their number, all at once on disk."""
        if not changes:
            return
        entries = list(self.state.entries)
        for number, fields in changes.items():
            entries[number] = entries[number].replace(**fields)
        self.state = self.state.replace(entries=tuple(entries), now_s=self._now_s)
        self.keep(self.state)

    def _adopt(self) -> None:
        """Finds the processes of an earlier scheduler; jobs whose process has ended wait again."""
        self._read_clock()
        adopted: dict[int, dict[str, Any]] = {}
        for number, entry in enumerate(self.state.entries):
            if entry.planned and max(entry.planned) >= self._num_devices:  # there are fewer devices than before
                self._change(number, planned=())
            if not entry.holds_devices:
                continue
            pid = self.processes.adopt(entry.job.name)
            if pid is None:
                self._release(number, "waiting")
                continue
            adopted[number] = {"pid": pid, "devices": self.processes.devices_of(entry.job.name) or entry.devices}
            self.tell(f"job '{entry.job.name}' still runs as process {pid}")
        self._store(adopted)  # at once: devices may have other numbers than before
        entries = self.state.entries
        self._stop(
            [n for n in adopted if entries[n].state == "stopping" or max(entries[n].devices) >= self._num_devices]
        )

    def _release(self, number: int, state: str, **changes: Any) -> None:
        """Takes the devices of an entry back."""
        entry = self.state.entries[number]
        steps = self.processes.steps(entry.job.name)
        span = HeldSpan(start_s=entry.since_s, end_s=self._now_s, devices=entry.devices, steps=steps)
        self._change(
            number, state=state, devices=(), pid=None, asked_s=None, steps=steps, spans=(*entry.spans, span), **changes
        )

    def _settle(self, number: int, code: int | None) -> None:
        """Handles the end of a job's process."""
        entry = self.state.entries[number]
        name, log = entry.job.name, self.processes.log_of(entry.job.name)
        words = self.processes.last_words(name)
        if code in (0, MOVED):
            self._release(number, "ended", end_s=self._now_s, planned=(), reason=words if code else "")
            self.tell(f"job '{name}' has ended")
        elif entry.state == "stopping" or code is None:
            is_moved = bool(entry.planned) or code is None
            self._release(number, "waiting", num_preemptions=entry.num_preemptions + (not is_moved))
        elif _is_killed(code, words) and entry.num_retries < self.retries:
            self._release(number, "waiting", num_retries=entry.num_retries + 1)
            self.tell(f"job '{name}' was killed ({_describe(code)}); it goes on from its last checkpoint")
        else:
            reason = f"{_describe(code)}: {words}" if words else _describe(code)
            self._release(number, "failed", end_s=self._now_s, reason=reason)
            self.tell(f"job '{name}' has failed, {reason}; its log is {log}")

    def _stop(self, numbers: Sequence[int], planned: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """Asks jobs to stop with a checkpoint; together with devices that are planned, so that no half is stored."""
        changes: dict[int, dict[str, Any]] = {n: {"planned": devices} for n, devices in (planned or {}).items()}
        for number in numbers:
            changes.setdefault(number, {}).update(state="stopping", asked_s=self._now_s)
        self._store(changes)
        for number in numbers:
            self.processes.send(self.state.entries[number].job.name, signal.SIGTERM)

    def _stop_all(self) -> None:
        entries = self.state.entries
        self._store({n: {"planned": ()} for n, entry in enumerate(entries) if entry.planned})
        self._stop([n for n, entry in enumerate(entries) if entry.state == "running"])
        self._kill_late()

    def _kill_late(self) -> None:
        """Kills jobs that have not stopped in time."""
        for number, entry in enumerate(self.state.entries):
            if entry.asked_s is not None and self._now_s >= entry.asked_s + KILL_AFTER_S:
                self._change(number, asked_s=self._now_s)
                self.processes.send(entry.job.name, signal.SIGKILL)

    def _fail_followers(self) -> None:
        """Gives jobs up that wait for one that has failed."""
        failed = [entry.job.name for entry in self.state.entries if entry.state == "failed"]
        for name in failed:  # it grows
            for number, entry in enumerate(self.state.entries):
                if name in entry.job.after and not entry.is_over:
                    reason = f"job '{name}', which it waits for, has failed"
                    self._change(number, state="failed", planned=(), end_s=self._now_s, reason=reason)
                    self.tell(f"job '{entry.job.name}' does not start: {reason}")
                    failed.append(entry.job.name)

    @property
    def _is_changing(self) -> bool:
        """Whether the last decision is still being carried out."""
        return any(entry.state == "stopping" or entry.planned for entry in self.state.entries)

    def _decide(self) -> None:
        """Decides what to change, unless the last decision is still being carried out."""
        self._kill_late()
        if self._is_changing:
            return
        numbers = [n for n, entry in enumerate(self.state.entries) if not entry.is_over]
        steps = {n: self.processes.steps(self.state.entries[n].job.name) for n in numbers}
        self._store({n: {"steps": made} for n, made in steps.items() if made != self.state.entries[n].steps})
        is_round = self._round_s is not None and self._now_s >= self._round_s
        queue = [self._queued(self.state.entries[number]) for number in numbers]
        decision = decide(queue, self.servers, self.options, is_round=is_round, lost=self.processes.lost())
        planned = {numbers[position]: devices for position, devices in decision.starts.items()}
        self._stop([numbers[position] for position in decision.stops], planned)
        self._may_change = decision.may_change
        if is_round or self._round_s is None:
            self._round_s = self._now_s + self.options.round_s

    def _queued(self, entry: JobEntry) -> QueuedJob:
        ended = {other.job.name for other in self.state.entries if other.state == "ended"}
        has_arrived = entry.job.arrival_s <= self._now_s and ended.issuperset(entry.job.after)
        left = max(entry.job.work - entry.steps, 0.0)
        held_s = sum((span.end_s - span.start_s) * len(span.devices) for span in entry.spans)
        held_s += (self._now_s - entry.since_s) * len(entry.devices)
        received_s = {self.servers[0].kind: entry.ran_s(self._now_s)}
        return QueuedJob(entry.job, left, has_arrived, held_s, received_s, entry.devices)

    def _start_planned(self) -> None:
        held = {device for entry in self.state.entries for device in entry.devices}
        for number, entry in enumerate(self.state.entries):
            if entry.state == "waiting" and entry.planned and not held & {*entry.planned}:
                devices = entry.planned
                self._change(number, state="running", devices=devices, planned=(), since_s=self._now_s)
                self._change(number, pid=self.processes.start(entry.job, devices))
                held |= {*devices}
                started = self._now_s + self.options.start_s
                self._round_s = max(self._round_s or 0.0, started)  # it is not preempted before it has begun

    def _next_s(self) -> float | None:
        """Returns the time until something happens that no process tells of."""
        times = [e.job.arrival_s for e in self.state.entries if not e.is_over and e.job.arrival_s > self._now_s]
        times += [e.asked_s + KILL_AFTER_S for e in self.state.entries if e.asked_s is not None]
        if self._may_change and self._round_s is not None and not self._is_changing:
            times.append(self._round_s)
        return max(0.001, min(times) - self._now_s) if times else None


def _is_killed(code: int, words: str) -> bool:
    """Whether a signal has ended a job's process, or one of its workers."""
    return code < 0 or code in _KILLED or "was ended by SIG" in words


def _describe(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
