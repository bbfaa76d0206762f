"""The exact searcher of chains: dynamic programming over suffixes of units and of devices.

The cost is Σ a + max z over stages. Under a bound on z the least Σ a is a shortest path; a better plan than the best
so far must have its z below best − Σ a, which is the next bound. So every bound rules out all that lies above it, and
the loop ends with the optimum.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from pipedejavu.search.cost import Costs
from pipedejavu.search.draft import Array, Draft, Scene, Stage
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.seat import Seats
from pipedejavu.search.space import Frame, frames, least_s

EXACT = 1e-12


@dataclass(frozen=True)
class _Table:
    """Stages that may stand before `after` devices: what they add and their part of the maximum, by start and end."""

    after: int
    size: int
    sum_s: Array
    slowest_s: Array


def solve(frame: Frame, costs: Costs, below_s: float = inf) -> Draft | None:
    """Returns the best draft of a frame that fits and takes less than `below_s`; None where there is none."""
    tables = _tables(frame, costs)
    if not tables:
        return None
    least_slowest = _least_slowest(frame, costs, tables)
    if least_slowest == inf:
        return None
    best, best_s, bound = None, below_s, inf
    first = True
    while True:
        limit = least_slowest if first else bound
        found = _shortest(frame, costs, tables, limit * (1 + EXACT))
        if found is None:
            break
        sum_s, path = found
        slowest = max(table.slowest_s[start, end] for table, start, end in path)
        if sum_s + slowest < best_s:
            best, best_s = path, sum_s + slowest
        if first:  # the fastest bottleneck gives a good start; from here bounds come down from above
            first, bound = False, best_s
            continue
        if sum_s + least_slowest >= best_s * (1 - EXACT):
            break
        bound = min(slowest, best_s - sum_s) * (1 - 2 * EXACT)
        if bound < least_slowest:
            break
    return None if best is None else _draft(frame, best)


def _tables(frame: Frame, costs: Costs) -> list[list[_Table]]:
    """Returns, for each number of devices behind, the stages that may stand there; empty where the mode cannot be."""
    count, units = len(frame.order), costs.num_units
    seats = Seats(
        frame.scene, frame.order, frame.microbatches, frame.is_stale, frame.sizes if len(frame.sizes) == 1 else ()
    )
    start, end = np.indices((units + 1, units + 1))
    tables = []
    known: dict[object, tuple[Array, Array]] = {}
    for after in range(count):
        row = []
        for size in frame.sizes:
            if after + size > count or (len(frame.sizes) == 1 and after % size):
                continue
            seat = seats.seat(after, size)
            if not seats.allows(seat, frame.mode):
                continue
            key = (
                seat.kinds,
                size,
                seat.live,
                seat.is_alone,
                seat.ring,
                seat.next,
                seat.host,
                seat.room_bytes,
                seat.host_room_bytes,
            )
            if key not in known:
                cost = costs.stage(start, end, seat, frame.mode)
                fits = (
                    (start < end) & (cost.device_bytes <= seat.room_bytes) & (cost.host_bytes <= seat.host_room_bytes)
                )
                known[key] = np.where(fits, cost.sum_s, inf), np.where(fits, cost.slowest_s, inf)
            row.append(_Table(after, size, *known[key]))
        tables.append(row)
    return tables


def _least_slowest(frame: Frame, costs: Costs, tables: list[list[_Table]]) -> float:
    best = [np.full(costs.num_units + 1, inf) for _ in range(len(frame.order) + 1)]
    best[0][-1] = 0.0
    for row in tables:
        for table in row:
            found = np.maximum(table.slowest_s, best[table.after][None, :]).min(axis=1)
            ahead = best[table.after + table.size]
            np.minimum(ahead, found, out=ahead)
    return float(best[-1][0])


def _shortest(
    frame: Frame, costs: Costs, tables: list[list[_Table]], bound: float
) -> tuple[float, list[tuple[_Table, int, int]]] | None:
    """Returns the least sum of a path of stages that are all within the bound, and the path."""
    units = costs.num_units
    best = [np.full(units + 1, inf) for _ in range(len(frame.order) + 1)]
    best[0][-1] = 0.0
    flat = [table for row in tables for table in row]
    chosen = np.zeros((len(best), units + 1), dtype=np.intp)
    ends = np.zeros_like(chosen)
    for index, table in enumerate(flat):
        total = np.where(table.slowest_s <= bound, table.sum_s, inf) + best[table.after][None, :]
        end = total.argmin(axis=1)
        found, ahead = total[np.arange(units + 1), end], table.after + table.size
        better = found < best[ahead]
        best[ahead] = np.where(better, found, best[ahead])
        chosen[ahead] = np.where(better, index, chosen[ahead])
        ends[ahead] = np.where(better, end, ends[ahead])
    if best[-1][0] == inf:
        return None
    path, used, start = [], len(frame.order), 0
    while used:
        table, end = flat[chosen[used, start]], int(ends[used, start])
        path.append((table, start, end))
        used, start = table.after, end
    return float(best[-1][0]), path


def _draft(frame: Frame, path: list[tuple[_Table, int, int]]) -> Draft:
    count = len(frame.order)
    stages = tuple(
        Stage(start, end, frame.order[count - table.after - table.size : count - table.after])
        for table, start, end in path
    )
    return Draft(frame.scene, stages, frame.samples, frame.microbatches, frame.mode, frame.is_stale)


def run(pool: Pool, scenes: list[Scene], options: Options) -> bool:
    """Solves frames, the most promising first, until none can be better; returns whether that point was reached."""
    queue = []
    for scene in scenes:
        for frame in frames(scene, options):
            least = least_s(frame, pool.costs(scene, frame.samples))
            if least < inf:
                queue.append((pool.score(scene, frame.order, least), frame))
            if pool.is_over:
                return False
    queue.sort(key=lambda item: item[0])
    for index, (least, frame) in enumerate(queue):
        if least >= pool.cutoff:
            break
        if pool.is_over:
            return False
        pool.report(index / len(queue), f"cutting for {len(frame.order)} devices, {frame.mode}")
        draft = solve(frame, pool.costs(frame.scene, frame.samples))
        if draft is not None:
            pool.offer(draft)
    return True
