"""Processes and a clock that are not real: jobs make updates at a rate, stop late, and are killed at random."""

import signal
from collections.abc import Sequence
from pathlib import Path
from random import Random

from pipedejavu.cluster import ClusterJob
from pipedejavu.job_queue import JobProcesses


class CrashError(Exception):
    """The scheduler was killed."""


class World:
    """What lives on when a scheduler crashes: time, processes, and the checkpoints of jobs."""

    def __init__(self, num_devices: int, random: Random, kill_share: float, crash_share: float):
        self.num_devices, self.random = num_devices, random
        self.kill_share, self.crash_share = kill_share, crash_share
        self.now_s, self.num_waits, self.num_crashes, self.num_kills = 0.0, 0, 0, 0
        self.alive: dict[str, tuple[ClusterJob, tuple[int, ...], float]] = {}
        """Jobs with their devices, and the times at which they began to train."""
        self.stops: dict[str, float] = {}
        """Times at which processes end that were asked to stop."""
        self.codes: dict[str, int] = {}
        """Exit codes of processes that have ended and were not waited for."""
        self.saved: dict[str, float] = {}
        self.ended: list[str] = []
        self.told: set[str] = set()
        """Jobs whose end a scheduler has seen and stored; without that it starts them once more, for no updates."""

    def made(self, name: str) -> float:
        job, devices, since_s = self.alive[name]
        return min(job.work, self.saved.get(name, 0.0) + max(0.0, self.now_s - since_s) * len(devices))

    def end_of(self, name: str) -> float:
        job, devices, since_s = self.alive[name]
        return min(since_s + (job.work - self.saved.get(name, 0.0)) / len(devices), self.stops.get(name, float("inf")))

    def end(self, name: str, code: int) -> None:
        if code != -signal.SIGKILL:  # a killed job loses what it made since its checkpoint
            self.saved[name] = self.made(name)
        self.codes[name] = code
        del self.alive[name]
        self.stops.pop(name, None)
        if code == 0:
            self.ended.append(name)

    def maybe_crash(self) -> None:
        if self.random.random() < self.crash_share and self.num_crashes < 10:
            self.num_crashes += 1
            raise CrashError


class FakeProcesses(JobProcesses):
    """One scheduler's view of a world."""

    def __init__(self, world: World):
        super().__init__(Path("q"), [])
        self.world, self.own = world, set[str]()

    def start(self, job: ClusterJob, devices: Sequence[int]) -> int:
        world = self.world
        world.maybe_crash()
        held = {device for _, others, _ in world.alive.values() for device in others}
        assert job.name not in world.alive, "a job runs twice"
        assert job.name not in world.told, "a job runs after a scheduler has seen its end"
        assert devices
        assert not held & {*devices}, "a device is given out twice"
        assert {*devices} <= {*range(world.num_devices)}
        assert set(job.after) <= {*world.ended}
        assert job.arrival_s <= world.now_s
        world.codes.pop(job.name, None)
        world.alive[job.name] = (job, tuple(devices), world.now_s + world.random.choice([0.0, 2.0]))
        self.own.add(job.name)
        world.maybe_crash()
        return 1

    def adopt(self, name: str) -> int | None:
        if name not in self.world.alive:
            self.world.codes.pop(name, None)
        return 1 if name in self.world.alive else None

    def has_ended(self, name: str) -> bool:
        return name not in self.world.alive

    def exit_code(self, name: str) -> int | None:
        code = self.world.codes.pop(name)
        return code if name in self.own else None

    def send(self, name: str, number: signal.Signals) -> None:
        world = self.world
        if name in world.alive and number == signal.SIGKILL:
            world.end(name, -signal.SIGKILL)
        elif name in world.alive:
            world.stops.setdefault(name, world.now_s + world.random.choice([0.0, 1.0, 20.0, 1e9]))

    def steps(self, name: str) -> int:
        world = self.world
        return int(world.made(name) if name in world.alive else world.saved.get(name, 0.0))

    def last_words(self, _: str) -> str:
        return ""

    def wait(self, timeout_s: float | None) -> None:
        world = self.world
        world.num_waits += 1
        assert world.num_waits < 3000, "the scheduler waits busily"
        if world.codes or (self.stop_number and not world.stops):  # a process has ended, or the signal came just now
            return
        times = [world.end_of(name) for name in world.alive]
        times += [world.now_s + timeout_s] if timeout_s is not None else []
        assert times, "the scheduler sleeps for ever"
        world.now_s = max(world.now_s, min(times))
        for name in list(world.alive):
            if world.random.random() < world.kill_share:
                world.num_kills += 1
                world.end(name, -signal.SIGKILL)
            elif world.end_of(name) <= world.now_s + 1e-9:
                is_done = world.made(name) >= world.alive[name][0].work - 1e-6
                world.end(name, 0 if is_done else 143)
        world.maybe_crash()

    def now_at(self) -> float:
        return self.world.now_s
