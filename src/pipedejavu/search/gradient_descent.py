"""The differentiable searcher: cuts as positions on a line, found by gradients, many starts at once.

Units u, stages k, strategies s (keep, or compute again). Cut k lies at c_k, a sum of softplus(θ); a unit lies behind it
with q_uk = σ((u + ½ − c_k)/w), so x_uk = q_uk − q_u,k+1 is its part of stage k, and stages stay in order whatever θ is.
Strategies are y_u = softmax(β_u). With T_k the time and Q_k the memory of a stage,

    L = Σ T_k + (m − 1)·τ·log Σ exp(T_k/τ) + Σ[λ_k g_k + ½ μ relu(g_k)²] + η H(y),  g_k = Q_k/C_k − 1,

is followed by its gradient in closed form (a dozen lines of the chain rule need no autodiff), while τ and w shrink and
λ grows where memory is short. What comes out is rounded to cuts, and these are moved while that helps: first until they
fit, then until they are fast.
`is_plain` is the form of DARTS: each unit has a softmax over all stages of its own, and nothing keeps the order.
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
from pipedejavu.search.slot import ScheduledSlot, slot_of
from pipedejavu.search.stage_cost import StageCosts, bound_s
from pipedejavu.search.subspace import SearchSubspace

STARTS, STEPS = 16, 100
RATE = 0.15
MOVES = (-1, 1, -2, 2, -4, 4, -8, 8)
"""Of several cuts, in units, once they are rounded."""
PRICE_RATE, PUSH, ENTROPY = 0.5, 10.0, 0.01
"""Of λ, μ and η, all as parts of the total time."""


def run(pool: Pool, problems: list[PlanningProblem], options: SearchOptions, *, is_plain: bool = False) -> bool:
    """Follows gradients in frames whose groups are alike, the most promising first."""

    def solve(subspace: SearchSubspace, costs: StageCosts, _: float) -> CandidatePlan | None:
        if subspace.is_free:
            return None
        return descend(subspace, costs, np.random.default_rng(options.seed), is_plain=is_plain)

    def guess(subspace: SearchSubspace, costs: StageCosts, _: float) -> CandidatePlan | None:
        return None if subspace.is_free else _proportional(subspace, costs)

    return branch_and_bound(pool, problems, options, solve, guess)


def _proportional(subspace: SearchSubspace, costs: StageCosts) -> CandidatePlan | None:
    """Returns the cut that gives each stage as much work as its devices are fast."""
    stages, units = len(subspace.order) // subspace.sizes[0], costs.num_units
    if stages > units:
        return None
    work = _field(subspace, costs).time[:, :, 0]
    rates = 1 / np.maximum(work.sum(axis=0), 1e-12)
    done, wanted = np.cumsum(work[:, 0]), np.cumsum(rates)[:-1] / rates.sum()
    bounds = np.searchsorted(done, wanted * done[-1])
    low = np.arange(1, stages)  # every stage has a unit at least
    bounds = np.maximum.accumulate(np.maximum(bounds, low) - low) + low
    return _draft(subspace, tuple(map(int, np.minimum(bounds, units - stages + low))))


def descend(
    subspace: SearchSubspace, costs: StageCosts, random: np.random.Generator, *, is_plain: bool = False
) -> CandidatePlan | None:
    """Returns the best draft of a frame that was found, whether it fits or not; None where units are too few."""
    stages, units = len(subspace.order) // subspace.sizes[0], costs.num_units
    if stages > units:
        return None
    if stages == 1:
        return _draft(subspace, ())
    field = _field(subspace, costs)
    rates = 1 / np.maximum(field.time[:, :, 0].sum(axis=0), 1e-12)
    shape = _Plain(units, stages, random) if is_plain else _Ordinal(units, rates, random)
    parts = _follow(field, shape, subspace)
    value = _Value(subspace, costs)
    found = [_moved(value, bounds, units) for bounds in sorted({_rounded(part) for part in parts})]
    return _draft(subspace, min(found, key=value.of))


@dataclass(frozen=True)
class _Field:
    """What the loss is made of: seconds and bytes of each (unit, stage, strategy), seconds of a cut, and room."""

    time: Array
    size: Array
    sent: Array
    room: Array
    microbatches: int


def _field(subspace: SearchSubspace, costs: StageCosts) -> _Field:
    size, mode = subspace.sizes[0], subspace.mode
    slots = [
        slot_of(subspace.row.place(after, size), subspace.microbatches, subspace.is_stale)
        for after in range(len(subspace.order) - size, -1, -size)
    ]
    state = np.diff(costs.weights + costs.gradients + (costs.optimizer if mode.state == "device" else 0.0))
    if mode.state == "window":
        state = np.diff(costs.gradients)
    saved, inputs = np.diff(costs.saved), costs.cut[:-1]
    times, sizes, sent = [], [], []
    for slot in slots:
        rows = [np.max([np.diff(costs.times(kind)[row]) for kind in slot.place.kinds], axis=0) for row in range(3)]
        keep, again = rows[0] + rows[1], rows[0] + rows[1] + rows[2]
        times.append(np.stack([keep, again], axis=1))
        live = 0 if mode.activations == "host" else slot.live
        sizes.append(np.stack([state + live * saved, state + live * inputs], axis=1))
        sent.append(2 * slot.place.next.time(costs.cut[1:]))
    strategies = 2 if mode.recomputes else 1
    return _Field(
        time=np.stack(times, axis=1)[:, :, :strategies],
        size=np.stack(sizes, axis=1)[:, :, :strategies],
        sent=np.stack(sent, axis=1),
        room=np.array([slot.place.room_bytes for slot in slots]),
        microbatches=slots[0].share,
    )


class _Ordinal:
    """Cuts on a line."""

    def __init__(self, units: int, rates: Array, random: np.random.Generator):
        """Starts with stages whose lengths follow the rates of their devices, more or less."""
        self.units = units
        lengths = rates ** np.linspace(0.0, 1.5, STARTS)[:, None]
        lengths = units * lengths / lengths.sum(axis=1, keepdims=True)
        gaps = np.maximum(lengths[:, :-1] * (1 + 0.2 * random.standard_normal((STARTS, len(rates) - 1))), 0.1)
        self.parameters = np.log(np.expm1(gaps))

    def parts(self, width: float) -> Array:
        cuts = np.cumsum(np.logaddexp(0.0, self.parameters), axis=1)
        at = (np.arange(self.units)[None, :, None] + 0.5 - cuts[:, None, :]) / (width)
        self.width, self.behind = width, 1 / (1 + np.exp(-np.clip(at, -50, 50)))
        ends = np.ones((STARTS, self.units, 1))
        whole = np.concatenate([ends, self.behind, 0 * ends], axis=2)
        # Cuts never change places: c_k grows with k, so q falls with it.
        return np.asarray(whole[:, :, :-1] - whole[:, :, 1:])

    def gradient(self, slope: Array) -> Array:
        """Returns the slope of the parameters from that of the parts."""
        behind = slope[:, :, 1:] - slope[:, :, :-1]
        cuts = -(behind * self.behind * (1 - self.behind)).sum(axis=1) / self.width
        tail = np.cumsum(cuts[:, ::-1], axis=1)[:, ::-1]
        return np.asarray(tail / (1 + np.exp(-self.parameters)))


class _Plain:
    """A softmax over stages for each unit, as DARTS has it."""

    def __init__(self, units: int, stages: int, random: np.random.Generator):
        self.parameters = 0.1 * random.standard_normal((STARTS, units, stages))

    def parts(self, width: float) -> Array:
        self.width, self.found = width, _softmax(self.parameters / width)
        return self.found

    def gradient(self, slope: Array) -> Array:
        """Returns the slope of the parameters from that of the parts."""
        return _through_softmax(self.found, slope) / self.width


def _follow(field: _Field, shape: "_Ordinal | _Plain", subspace: SearchSubspace) -> Array:
    """Follows the gradient from all starts at once; returns each unit's parts of the stages."""
    units, stages, strategies = field.time.shape
    total = float(field.time[:, :, 0].mean(axis=1).sum()) or 1.0
    choices = np.zeros((STARTS, units, strategies))
    prices = np.zeros((STARTS, stages))
    steps = [_Adam(shape.parameters.shape), _Adam(choices.shape)]
    extra = 0 if subspace.is_stale else 1
    for step in range(STEPS):
        done = step / STEPS
        smooth, width, sharp = (a * (b / a) ** done for a, b in ((0.05 * total, 0.001 * total), (2.0, 0.1), (1.0, 0.1)))
        x = shape.parts(width if isinstance(shape, _Ordinal) else sharp)
        y = _softmax(choices / sharp)
        time, size = (np.einsum("rus,uks->ruk", y, part) for part in (field.time, field.size))
        jumps = np.diff(x, axis=1)
        taken = (x * time).sum(axis=1) + 0.5 * (np.abs(jumps) * field.sent[:-1]).sum(axis=1)
        short = (x * size).sum(axis=1) / field.room - 1
        d_time = extra + (field.microbatches - 1) * _softmax(taken / smooth)
        d_size = total * (prices + PUSH * np.maximum(short, 0.0)) / field.room
        slope = d_time[:, None] * time + d_size[:, None] * size
        turns = 0.5 * d_time[:, None] * np.sign(jumps) * field.sent[:-1]
        slope[:, 1:] += turns
        slope[:, :-1] -= turns
        entropy = -ENTROPY * total * (np.log(np.maximum(y, 1e-12)) + 1)
        weighed = np.einsum("rk,ruk,uks->rus", d_time, x, field.time)
        weighed += np.einsum("rk,ruk,uks->rus", d_size, x, field.size) + entropy
        shape.parameters -= RATE * steps[0].step(shape.gradient(slope))
        choices -= RATE * steps[1].step(_through_softmax(y, weighed) / sharp)
        prices = np.maximum(prices + PRICE_RATE * short, 0.0)
    return shape.parts(0.1)


class _Adam:
    """Adam's direction."""

    def __init__(self, form: tuple[int, ...]):
        self.mean, self.square, self.count = np.zeros(form), np.zeros(form), 0

    def step(self, slope: Array) -> Array:
        self.count += 1
        self.mean += 0.1 * (slope - self.mean)
        self.square += 0.01 * (slope * slope - self.square)
        mean, square = self.mean / (1 - 0.9**self.count), self.square / (1 - 0.99**self.count)
        return np.asarray(mean / (np.sqrt(square) + 1e-30))


def _softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _through_softmax(found: Array, slope: Array) -> Array:
    return np.asarray(found * (slope - (found * slope).sum(axis=-1, keepdims=True)))


def _rounded(parts: Array) -> tuple[int, ...]:
    """Returns the cuts in order under which units are most where their parts say (a Viterbi pass)."""
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
    """What cuts of a frame are worth: tables of all their stages, which make a cut a matter of microseconds."""

    def __init__(self, subspace: SearchSubspace, costs: StageCosts):
        size, units = subspace.sizes[0], costs.num_units
        self.units, self.slots, self.tables = units, list[ScheduledSlot](), list[list[list[list[float]]]]()
        self.known: dict[tuple[int, ...], tuple[float, float]] = {}
        start, end = np.triu_indices(units + 1, 1)
        for after in range(0, len(subspace.order), size):  # from the last stage on
            place = subspace.row.place(after, size)
            slot = slot_of(place, subspace.microbatches, subspace.is_stale, subspace.mode.zero)
            cost = costs.stage(start, end, slot, subspace.mode)
            need = np.maximum(
                cost.device_bytes / max(place.room_bytes, 1), cost.host_bytes / max(place.host_room_bytes, 1)
            )
            columns = np.zeros((units + 1, units + 1, 5))
            columns[start, end] = np.stack([cost.sum_s, cost.total_s, cost.slowest_s, cost.after_s, need], axis=1)
            self.slots.append(slot)
            self.tables.append(columns.tolist())

    def of(self, bounds: tuple[int, ...]) -> tuple[float, float]:
        """Returns a cut's shortage of memory, 1 where it fits, and then its time."""
        if bounds not in self.known:
            behind = total = bound = 0.0
            short, ends = 1.0, (0, *bounds, self.units)
            for stage, (slot, table) in enumerate(zip(self.slots, self.tables, strict=True)):
                sum_s, total_s, slowest, after, need = table[ends[-stage - 2]][ends[-stage - 1]]
                bound = max(bound, bound_s(slot, sum_s, slowest, after, behind))
                behind, total, short = behind + sum_s, total + total_s, max(short, need)
            self.known[bounds] = short, total + bound
        return self.known[bounds]


def _moved(value: _Value, bounds: tuple[int, ...], units: int) -> tuple[int, ...]:
    """Moves one cut anywhere, or several neighbours together by a few units, while that helps."""
    gains = True
    while gains:
        gains = False
        for other in _neighbours(bounds, units):
            if value.of(other) < value.of(bounds):
                bounds, gains = other, True
                break
    return bounds


def _neighbours(bounds: tuple[int, ...], units: int) -> Iterator[tuple[int, ...]]:
    """Yields cuts of which one is elsewhere, the nearest places first, or two by little, or neighbours together."""
    places = [place for place in range(1, units) if place not in bounds]
    for at, bound in enumerate(bounds):
        for place in sorted(places, key=lambda place: abs(place - bound)):
            yield tuple(sorted((*bounds[:at], place, *bounds[at + 1 :])))
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


def _draft(subspace: SearchSubspace, bounds: tuple[int, ...]) -> CandidatePlan:
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
