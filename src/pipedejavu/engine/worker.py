"""A worker: runs its sequence of a program, lane by lane.

The lanes run side by side, each a thread. An action starts when it is at the head of its lane and the actions
of this worker that it depends on have ended; what depends on other workers waits in the wire. What an action
does is `handle`'s business.
"""

import threading
import time
from collections.abc import Callable, Sequence

from pipedejavu.engine.handle import Handlers
from pipedejavu.facts import Span
from pipedejavu.program import Graph

JOIN_S = 0.1
"""How often a worker that waits for its lanes looks whether one has failed; the others may wait for peers for ever."""


class Worker:
    """One run of one worker's sequence."""

    def __init__(self, graph: Graph, index: int, handlers: Handlers):
        self.graph, self.index, self.handlers = graph, index, handlers
        self.own = graph.program.workers[index]
        self.spans: list[Span] = []
        self.done = [threading.Event() for _ in self.own.actions]
        self.failure: BaseException | None = None
        self.lock = threading.Lock()

    def run(self) -> None:
        """Runs the sequence to its end; raises what any of its lanes raised first."""
        lanes: dict[str, list[int]] = {"compute": []}
        for position, a in enumerate(self.own.actions):
            lanes.setdefault(a.lane, []).append(position)
        waits = self._waits()
        compute = lanes.pop("compute")
        others = [threading.Thread(target=self._lane, args=(ps, waits), daemon=True) for ps in lanes.values()]
        self.started_s = time.perf_counter()
        for thread in others:
            thread.start()
        if self.own.picks_ready:
            self._guarded(lambda: self._take_ready(compute, waits))
        else:
            self._lane(compute, waits)
        for thread in others:
            while thread.is_alive() and self.failure is None:
                thread.join(JOIN_S)
        if self.failure is not None:
            raise self.failure

    def _waits(self) -> list[list[int]]:
        """For each action, the actions of this worker that must have ended."""
        position = {op: p for p, op in enumerate(self.graph.of_action[self.index])}
        waits: list[list[int]] = [[] for _ in self.own.actions]
        for op, before in position.items():
            for after in self.graph.successors[op]:
                if after in position:
                    waits[position[after]].append(before)
        return waits

    def _lane(self, positions: Sequence[int], waits: list[list[int]]) -> None:
        """Runs one lane in its order."""

        def run_in_order() -> None:
            for position in positions:
                for before in waits[position]:
                    self.done[before].wait()
                if self.failure is not None:
                    return
                self._do(position)

        self._guarded(run_in_order)

    def _take_ready(self, positions: Sequence[int], waits: list[list[int]]) -> None:
        """Runs whatever is ready, within the limit of live microbatches."""
        left, limit = list(positions), self.own.live_limit
        while left and self.failure is None:
            for position in left:
                is_held_back = self.own.actions[position].kind == "F" and limit and self.handlers.live >= limit
                if not is_held_back and all(self.done[before].is_set() for before in waits[position]):
                    left.remove(position)
                    self._do(position)
                    break
            else:
                time.sleep(1e-4)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # a lane is a thread: whatever it raises must reach the others
            with self.lock:
                self.failure = self.failure or error
            for event in self.done:
                event.set()
            self.handlers.wire.stop()

    def _do(self, position: int) -> None:
        a = self.own.actions[position]
        start = time.perf_counter() - self.started_s
        self.handlers.do(a)
        span = Span(self.index, a.lane, str(a), start, time.perf_counter() - self.started_s)
        with self.lock:
            self.spans.append(span)
        self.done[position].set()
