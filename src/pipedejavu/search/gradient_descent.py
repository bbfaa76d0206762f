"""The differentiable searcher: cuts are positions on a line, found by gradient descent from many starts at once.

Units u, stages k, strategies s (keep or recompute). Cut k lies at c_k, a sum of softplus(θ). Unit u lies after it with
weight q_uk = σ((u + ½ − c_k)/w), so x_uk = q_uk − q_u,k+1 is its share in stage k, and stages stay in order for any θ.
Strategies are y_u = softmax(β_u). With T_k the time and Q_k the memory of a stage, the loss is

    L = Σ T_k + (m − 1)·τ·log Σ exp(T_k/τ) + Σ[λ_k g_k + ½ μ relu(g_k)²] + η H(y),  g_k = Q_k/C_k − 1,

and its gradient is in closed form (a dozen lines of the chain rule need no autodiff). τ and w shrink during the
descent, and λ grows if memory is short. The result is rounded to cuts, and a local search moves these: first until they
fit, then until they are fast. `is_plain` is the form of DARTS: each unit has a softmax over all stages, and nothing
keeps the stages in order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import inf

import numpy as np

from pipedejavu.search.branch_and_bound import branch_and_bound
from pipedejavu.search.candidate_plan import Array, CandidatePlan, PlanningProblem, Stage
from pipedejavu.search.plan_pool import Pool
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.slot import ScheduledSlot, schedule_slot
from pipedejavu.search.stage_cost import StageCosts, remaining_s
from pipedejavu.search.subspace import SearchSubspace

STARTS, STEPS = 16, 100
RATE = 0.15
"""Learning rate."""
MOVES = (-1, 1, -2, 2, -4, 4, -8, 8)
"""Moves of several cuts in the local search, in units."""
PRICE_RATE, PUSH, ENTROPY = 0.5, 10.0, 0.01
"""Step of λ, and μ and η, all relative to the total time."""


def run(pool: Pool, problems: list[PlanningProblem], options: SearchOptions, *, is_plain: bool = False) -> bool:
    """Descends in the subspaces with equal groups, the best guess first; returns whether it tried all."""

    def solve(subspace: SearchSubspace, costs: StageCosts, _: float) -> CandidatePlan | None:
        if subspace.is_free:
            return None
        return descend(subspace, costs, np.random.default_rng(options.seed), is_plain=is_plain)

    def guess(subspace: SearchSubspace, costs: StageCosts, _: float) -> CandidatePlan | None:
        return None if subspace.is_free else _proportional(subspace, costs)

    return branch_and_bound(pool, problems, options, solve, guess)


def _proportional(subspace: SearchSubspace, costs: StageCosts) -> CandidatePlan | None:
    """Returns the cut that gives each stage work in proportion to the speed of its devices, or None."""
    stages, units = len(subspace.order) // subspace.sizes[0], costs.num_units
    if stages > units:
        return None
    work = _loss_tables(subspace, costs).time[:, :, 0]
    rates = 1 / np.maximum(work.sum(axis=0), 1e-12)
    done, wanted = np.cumsum(work[:, 0]), np.cumsum(rates)[:-1] / rates.sum()
    bounds = np.searchsorted(done, wanted * done[-1])
    low = np.arange(1, stages)  # every stage holds at least one unit
    bounds = np.maximum.accumulate(np.maximum(bounds, low) - low) + low
    return _candidate(subspace, tuple(map(int, np.minimum(bounds, units - stages + low))))


def descend(
    subspace: SearchSubspace, costs: StageCosts, random: np.random.Generator, *, is_plain: bool = False
) -> CandidatePlan | None:
    """Returns the best candidate found in a subspace, whether it fits or not; None if there are too few units."""
    stages, units = len(subspace.order) // subspace.sizes[0], costs.num_units
    if stages > units:
        return None
    if stages == 1:
        return _candidate(subspace, ())
    tables = _loss_tables(subspace, costs)
    rates = 1 / np.maximum(tables.time[:, :, 0].sum(axis=0), 1e-12)
    shape = _Plain(units, stages, random) if is_plain else _Ordinal(units, rates, random)
    parts = _descend(tables, shape, subspace)
    value = _Value(subspace, costs)
    cuts = [_moved(value, bounds, units) for bounds in sorted({_rounded(part) for part in parts})]
    return _candidate(subspace, min(cuts, key=value.of))


@dataclass(frozen=True)
class _LossTables:
    """The constants of the loss."""

    time: Array
    """Seconds by unit, stage and strategy."""
    size: Array
    """Bytes by unit, stage and strategy."""
    sent: Array
    """Seconds of a transfer by cut and stage."""
    limit: Array
    """Memory limit in bytes by stage."""
    microbatches: int


def _loss_tables(subspace: SearchSubspace, costs: StageCosts) -> _LossTables:
    size, mode = subspace.sizes[0], subspace.mode
    schedule = [
        schedule_slot(subspace.device_order.slot(after, size), subspace.microbatches, subspace.is_stale)
        for after in range(len(subspace.order) - size, -1, -size)
    ]
    totals = costs.state
    state = np.diff(totals.weights + totals.gradients + (totals.optimizer if mode.state == "device" else 0.0))
    if mode.state == "window":
        state = np.diff(totals.gradients)
    saved, inputs = np.diff(costs.saved), costs.cut[:-1]
    times, sizes, sent = [], [], []
    for scheduled in schedule:
        kinds = scheduled.slot.kinds
        passes = [np.max([np.diff(costs.times(kind)[index]) for kind in kinds], axis=0) for index in range(3)]
        keep, recompute = passes[0] + passes[1], passes[0] + passes[1] + passes[2]
        times.append(np.stack([keep, recompute], axis=1))
        live = 0 if mode.activations == "host" else scheduled.live
        sizes.append(np.stack([state + live * saved, state + live * inputs], axis=1))
        sent.append(2 * scheduled.slot.next.time(costs.cut[1:]))
    strategies = 2 if mode.recomputes else 1
    return _LossTables(
        time=np.stack(times, axis=1)[:, :, :strategies],
        size=np.stack(sizes, axis=1)[:, :, :strategies],
        sent=np.stack(sent, axis=1),
        limit=np.array([scheduled.slot.memory.device_bytes for scheduled in schedule]),
        microbatches=schedule[0].microbatches,
    )


class _Ordinal:
    """Cuts as positions on a line."""

    def __init__(self, units: int, rates: Array, random: np.random.Generator):
        """Starts with stage lengths between equal and more than proportional to the rates, with noise."""
        self.units = units
        lengths = rates ** np.linspace(0.0, 1.5, STARTS)[:, None]
        lengths = units * lengths / lengths.sum(axis=1, keepdims=True)
        gaps = np.maximum(lengths[:, :-1] * (1 + 0.2 * random.standard_normal((STARTS, len(rates) - 1))), 0.1)
        self.parameters = np.log(np.expm1(gaps))

    def parts(self, width: float) -> Array:
        """Returns each unit's share in each stage."""
        cuts = np.cumsum(np.logaddexp(0.0, self.parameters), axis=1)
        at = (np.arange(self.units)[None, :, None] + 0.5 - cuts[:, None, :]) / width
        self.width, self.after = width, 1 / (1 + np.exp(-np.clip(at, -50, 50)))
        ends = np.ones((STARTS, self.units, 1))
        whole = np.concatenate([ends, self.after, 0 * ends], axis=2)
        # Cuts stay in order: c_k grows with k, so q falls with it.
        return np.asarray(whole[:, :, :-1] - whole[:, :, 1:])

    def gradient(self, slope: Array) -> Array:
        """Returns the gradient with respect to the parameters, given that with respect to the shares."""
        d_after = slope[:, :, 1:] - slope[:, :, :-1]
        cuts = -(d_after * self.after * (1 - self.after)).sum(axis=1) / self.width
        tail = np.cumsum(cuts[:, ::-1], axis=1)[:, ::-1]
        return np.asarray(tail / (1 + np.exp(-self.parameters)))


class _Plain:
    """A softmax over stages for each unit, as in DARTS."""

    def __init__(self, units: int, stages: int, random: np.random.Generator):
        self.parameters = 0.1 * random.standard_normal((STARTS, units, stages))

    def parts(self, width: float) -> Array:
        """Returns each unit's share in each stage."""
        self.width, self.shares = width, _softmax(self.parameters / width)
        return self.shares

    def gradient(self, slope: Array) -> Array:
        """Returns the gradient with respect to the parameters, given that with respect to the shares."""
        return _through_softmax(self.shares, slope) / self.width


def _descend(tables: _LossTables, shape: "_Ordinal | _Plain", subspace: SearchSubspace) -> Array:
    """Descends from all starts at once; returns each unit's shares in the stages."""
    units, stages, strategies = tables.time.shape
    total = float(tables.time[:, :, 0].mean(axis=1).sum()) or 1.0
    choices = np.zeros((STARTS, units, strategies))
    prices = np.zeros((STARTS, stages))
    steps = [_Adam(shape.parameters.shape), _Adam(choices.shape)]
    extra = 0 if subspace.is_stale else 1
    for step in range(STEPS):
        done = step / STEPS
        smooth, width, sharp = (a * (b / a) ** done for a, b in ((0.05 * total, 0.001 * total), (2.0, 0.1), (1.0, 0.1)))
        x = shape.parts(width if isinstance(shape, _Ordinal) else sharp)
        y = _softmax(choices / sharp)
        time, size = (np.einsum("rus,uks->ruk", y, part) for part in (tables.time, tables.size))
        jumps = np.diff(x, axis=1)
        taken = (x * time).sum(axis=1) + 0.5 * (np.abs(jumps) * tables.sent[:-1]).sum(axis=1)
        short = (x * size).sum(axis=1) / tables.limit - 1
        d_time = extra + (tables.microbatches - 1) * _softmax(taken / smooth)
        d_size = total * (prices + PUSH * np.maximum(short, 0.0)) / tables.limit
        slope = d_time[:, None] * time + d_size[:, None] * size
        turns = 0.5 * d_time[:, None] * np.sign(jumps) * tables.sent[:-1]
        slope[:, 1:] += turns
        slope[:, :-1] -= turns
        entropy = -ENTROPY * total * (np.log(np.maximum(y, 1e-12)) + 1)
        weighed = np.einsum("rk,ruk,uks->rus", d_time, x, tables.time)
        weighed += np.einsum("rk,ruk,uks->rus", d_size, x, tables.size) + entropy
        shape.parameters -= RATE * steps[0].step(shape.gradient(slope))
        choices -= RATE * steps[1].step(_through_softmax(y, weighed) / sharp)
        prices = np.maximum(prices + PRICE_RATE * short, 0.0)
    return shape.parts(0.1)


class _Adam:
    """The update direction of Adam."""

    def __init__(self, form: tuple[int, ...]):
        self.mean, self.square, self.count = np.zeros(form), np.zeros(form), 0

    def step(self, slope: Array) -> Array:
        """Returns the direction for a gradient."""
        self.count += 1
        self.mean += 0.1 * (slope - self.mean)
        self.square += 0.01 * (slope * slope - self.square)
        mean, square = self.mean / (1 - 0.9**self.count), self.square / (1 - 0.99**self.count)
        return np.asarray(mean / (np.sqrt(square) + 1e-30))


def _softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _through_softmax(shares: Array, slope: Array) -> Array:
    return np.asarray(shares * (slope - (shares * slope).sum(axis=-1, keepdims=True)))


def _rounded(parts: Array) -> tuple[int, ...]:
    """Returns the ordered cuts with the highest likelihood under the units' shares (a Viterbi pass)."""
    units, stages = parts.shape
    gain = np.concatenate([np.zeros((1, stages)), np.cumsum(np.log(np.maximum(parts, 1e-12)), axis=0)])
    best = np.full((stages + 1, units + 1), -inf)
    best[0, 0] = 0.0
    came = np.zeros((stages + 1, units + 1), dtype=np.intp)
    for k in range(stages):
        for end in range(k + 1, units - (stages - 1 - k) + 1):
            values = best[k, :end] - gain[:end, k]
            came[k + 1, end] = values.argmax()
            best[k + 1, end] = values.max() + gain[end, k]
    bounds, end = [], units
    for k in range(stages, 1, -1):
        end = int(came[k, end])
        bounds.append(end)
    return tuple(reversed(bounds))


class _Value:
    """Evaluates cuts of a subspace in microseconds, from tables of all possible stages."""

    def __init__(self, subspace: SearchSubspace, costs: StageCosts):
        size, units = subspace.sizes[0], costs.num_units
        self.units, self.schedule, self.tables = units, list[ScheduledSlot](), list[list[list[list[float]]]]()
        self.known: dict[tuple[int, ...], tuple[float, float]] = {}
        start, end = np.triu_indices(units + 1, 1)
        for after in range(0, len(subspace.order), size):  # from the last stage on
            slot = subspace.device_order.slot(after, size)
            scheduled = schedule_slot(slot, subspace.microbatches, subspace.is_stale, subspace.mode.zero)
            cost = costs.stage(start, end, scheduled, subspace.mode)
            limit = slot.memory
            need = np.maximum(
                cost.device_bytes / max(limit.device_bytes, 1), cost.host_bytes / max(limit.host_bytes, 1)
            )
            columns = np.zeros((units + 1, units + 1, 5))
            columns[start, end] = np.stack([cost.sum_s, cost.total_s, cost.slowest_s, cost.tail_s, need], axis=1)
            self.schedule.append(scheduled)
            self.tables.append(columns.tolist())

    def of(self, bounds: tuple[int, ...]) -> tuple[float, float]:
        """Returns a cut's need of memory relative to its limit (1 if it fits), then its time."""
        if bounds not in self.known:
            later = total = remaining = 0.0
            short, ends = 1.0, (0, *bounds, self.units)
            for stage, (scheduled, table) in enumerate(zip(self.schedule, self.tables, strict=True)):
                sum_s, total_s, slowest, tail, need = table[ends[-stage - 2]][ends[-stage - 1]]
                remaining = max(remaining, remaining_s(scheduled, sum_s, slowest, tail, later))
                later, total, short = later + sum_s, total + total_s, max(short, need)
            self.known[bounds] = short, total + remaining
        return self.known[bounds]


def _moved(value: _Value, bounds: tuple[int, ...], units: int) -> tuple[int, ...]:
    """Returns the local optimum that is reached by moving to the first better neighbour again and again."""
    gains = True
    while gains:
        gains = False
        for other in _neighbours(bounds, units):
            if value.of(other) < value.of(bounds):
                bounds, gains = other, True
                break
    return bounds


def _neighbours(bounds: tuple[int, ...], units: int) -> Iterator[tuple[int, ...]]:
    """Yields neighbouring cuts: one boundary moved (nearest first), two moved by little, adjacent ones together."""
    free = [position for position in range(1, units) if position not in bounds]
    for at, bound in enumerate(bounds):
        for position in sorted(free, key=lambda position: abs(position - bound)):
            yield tuple(sorted((*bounds[:at], position, *bounds[at + 1 :])))
    ends = (0, *bounds, units)
    for one, two in combinations(range(len(bounds)), 2):
        for first, second in product(MOVES[:4], repeat=2):
            moved = [*bounds]
            moved[one], moved[two] = bounds[one] + first, bounds[two] + second
            if all(a < b for a, b in pairwise((0, *moved, units))):
                yield tuple(moved)
    for at, until in combinations(range(len(bounds) + 1), 2):
        for move in MOVES if until - at > 1 else ():
            shifted = tuple(b + move for b in bounds[at:until])
            if ends[at] < shifted[0] and shifted[-1] < ends[until + 1]:
                yield (*bounds[:at], *shifted, *bounds[until:])


def _candidate(subspace: SearchSubspace, bounds: tuple[int, ...]) -> CandidatePlan:
    ends, size = (0, *bounds, len(subspace.problem.profile.units)), subspace.sizes[0]
    stages = tuple(
        Stage(
            ends[k], ends[k + 1], subspace.order[k * size : (k + 1) * size], zero=subspace.mode.zero if size > 1 else 0
        )
        for k in range(len(subspace.order) // size)
    )
    return CandidatePlan(
        subspace.problem, stages, subspace.samples, subspace.microbatches, subspace.mode, subspace.is_stale
    )
