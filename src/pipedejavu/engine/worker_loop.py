"""The loop of a worker: runs its sequence of a program on its lanes, once per call.

Lanes run concurrently, each in a thread unless it only sends. An action starts when it is first in its lane and the
actions of this worker that it depends on have ended; dependences on other workers block in the wire. `handlers` defines
what an action does, `lane` where it runs.
"""

import threading
import time
from collections.abc import Callable
from itertools import zip_longest

from pipedejavu.analysis import Graph
from pipedejavu.engine.action_lane import ActionEvent, ActionLane, make_lane
from pipedejavu.engine.device import CPU
from pipedejavu.engine.handlers import Handlers
from pipedejavu.engine.round_end import add_unpulled_waves, send_first_weights
from pipedejavu.engine.wire import PeerLeftError
from pipedejavu.facts import Span
from pipedejavu.program import Action, ActionKind
from pipedejavu.runtime.lane_event import ClockOrigin

JOIN_S = 0.1
"""How often a worker that joins its lanes checks for a failure: after one, other lanes may block for ever."""


class WorkerLoop:
    """One worker's sequence and its lanes."""

    def __init__(self, graph: Graph, index: int, handlers: Handlers):
        self.index, self.handlers, self.worker = index, handlers, graph.program.workers[index]
        self.names = [(a.lane, str(a)) for a in self.worker.actions]
        self.positions: dict[str, list[int]] = {"compute": []}
        for position, (lane, _) in enumerate(self.names):
            self.positions.setdefault(lane, []).append(position)
        self.lanes = {
            name: make_lane(name, handlers.device, name.startswith("net") and handlers.wire.is_issued(name))
            for name in self.positions
        }
        self.waits = self._waits(graph)
        self.done = {before: threading.Event() for waits in self.waits for before in waits}
        """Set when an action that others wait for has ended or, on a stream, is issued."""
        self.sent_by: dict[int, set[str]] = {}
        """By action, the lanes without a thread that may continue after it: sending from a CPU does not block, so the
        thread that computes a value also sends it."""
        for name in self._threadless():
            for before in (before for position in self.positions[name] for before in self.waits[position]):
                self.sent_by.setdefault(before, set()).add(name)
        self.heads: dict[str, int] = {}
        self.marks: dict[int, ActionEvent] = {}
        self.failure: BaseException | None = None
        self.lock, self.sending = threading.Lock(), threading.RLock()

    def _threadless(self) -> list[str]:
        return [name for name in self.positions if name.startswith("net>") and self.handlers.device == CPU]

    def _waits(self, graph: Graph) -> list[list[int]]:
        """Returns, for each action, the actions of this worker that it waits for, beyond the order of its lane."""
        position = {op: p for p, op in enumerate(graph.of_action[self.index])}
        waits: list[list[int]] = [[] for _ in self.worker.actions]
        for op, before in position.items():
            lane = self.names[before][0]
            keeps_order = lane != "compute" or not self.worker.picks_ready
            for after in graph.successors[op]:
                if after in position and not (keeps_order and self.names[position[after]][0] == lane):
                    waits[position[after]].append(before)
        return waits

    def run(self) -> list[Span]:
        """Runs the sequence and returns the span of each action; raises the first error of any lane."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            for event in self.done.values():
                event.clear()
        self.marks.clear()
        self.heads = dict.fromkeys(self._threadless(), 0)
        others = [
            threading.Thread(target=self._guarded, args=(self._run_in_order, name), daemon=True)
            for name in self.positions
            if name != "compute" and name not in self.heads
        ]
        self._guarded(lambda _: self._between(send_first_weights), "compute")
        origin = ClockOrigin.now(self.handlers.device)
        for thread in others:
            thread.start()
        for name in self.heads:
            self._guarded(self._go_on, name)
        self._guarded(self._take_ready if self.worker.picks_ready else self._run_in_order, "compute")
        for thread in others:
            while thread.is_alive() and self.failure is None:
                thread.join(JOIN_S)
        if self.failure is None:
            self._guarded(lambda _: self._finish(), "compute")
        if self.failure is not None:
            raise self.failure
        return [
            Span(self.index, lane, action, *self.marks[position].times_s(origin))
            for position, (lane, action) in enumerate(self.names)
            if position in self.marks  # not what a server has left out
        ]

    def _finish(self) -> None:
        """Waits for all issued work, then ends the round."""
        self.handlers.notice("compute", "the end of the round")
        for mark in self.marks.values():
            mark.wait_on_host()
        self.handlers.notice("compute", "")
        self._between(add_unpulled_waves)
        self.handlers.finish()

    def _between(self, exchange: Callable[[Handlers], None]) -> None:
        """Runs an exchange with other workers between rounds, outside of any lane."""
        self.handlers.notice("net", "what is told between two rounds")
        exchange(self.handlers)
        self.handlers.notice("net", "")

    def _run_in_order(self, name: str) -> None:
        """Runs one lane in its order."""
        lane, positions = self.lanes[name], self.positions[name]
        for position, after in zip_longest(positions, positions[1:]):
            for before in self.waits[position]:
                self.done[before].wait()
            if self.failure is not None:
                return
            if name.startswith("net<") and after is not None and self._is_free(after):
                self.handlers.expect(self.worker.actions[after])
            self._do(lane, position)

    def _is_free(self, position: int) -> bool:
        return all(self.done[before].is_set() for before in self.waits[position])

    def _go_on(self, name: str) -> None:
        """Runs the ready actions at the head of a lane that has no thread."""
        positions = self.positions[name]
        with self.sending:
            while self.failure is None and self.heads[name] < len(positions):
                position = positions[self.heads[name]]
                if not self._is_free(position):
                    return
                self.heads[name] += 1
                self._do(self.lanes[name], position)

    def _take_ready(self, name: str) -> None:
        """Runs any action that is ready, within the limit of live microbatches."""
        lane, left, limit = self.lanes[name], list(self.positions[name]), self.worker.live_limit
        while left and self.failure is None:
            for position in left:
                is_forward = self.worker.actions[position].kind == ActionKind.FORWARD
                is_held_back = is_forward and limit and self.handlers.live >= limit
                if not is_held_back and self._is_free(position):
                    left.remove(position)
                    self._do(lane, position)
                    break
            else:
                time.sleep(1e-4)

    def _do(self, lane: ActionLane, position: int) -> None:
        name, action = self.names[position]
        a = self.worker.actions[position]
        if not self._is_left_out(a):
            self.handlers.notice(name, action)
            for before in self.waits[position]:
                lane.wait(self.marks[before])
            try:
                self.marks[position] = lane.run(self.handlers.do, a)
            except PeerLeftError:
                self.handlers.log.left[a.replica] = self.handlers.first_version + a.version
            self.handlers.notice(name, "")
        if position in self.done:
            self.done[position].set()
            for name in self.sent_by.get(position, ()):
                self._go_on(name)

    def _is_left_out(self, a: Action) -> bool:
        """Whether an action of a server belongs to a push that never comes, as the worker of its replica has died."""
        if not (left := self.handlers.log.left) or a.replica not in left:
            return False
        update = a.version + (a.kind == ActionKind.RECV)  # a push has the number of the weights that it was made with
        return self.handlers.first_version + update > left[a.replica]

    def _guarded(self, call: Callable[[str], None], name: str) -> None:
        try:
            call(name)
        except BaseException as error:  # a lane is a thread: its error must reach the other lanes
            self.stop(error)

    def stop(self, error: BaseException) -> None:
        """Makes every lane, here and on other workers, stop after its current action; callable from any thread."""
        with self.lock:
            self.failure = self.failure or error
            for event in self.done.values():
                event.set()
        self.handlers.wire.stop()
