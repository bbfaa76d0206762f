"""An independent brute force over pipelines, against which `search.py --brute-force` holds `auto`.

It enumerates contiguous cuts × replicas per stage × recompute per stage × microbatch sizes × orders of unequal devices,
ranks them by an estimate of its own, and simulates the best. It shares no code with `pipedejavu.search`: only plans,
`compile` and the simulator, which decide what a plan takes and whether it fits.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations
from typing import NamedTuple

import numpy as np

from pipedejavu.analysis import verify
from pipedejavu.facts import FaultsError, Machine, Profile, Unit, UnitTime
from pipedejavu.plan import Cut, Feed, Order, Place, Plan, Reduce
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import check_fit, simulate

MOST_ORDERS = 12
"""Distinct orders of kinds up to which all are tried; above it, devices of a kind stay together."""
MOST_CUTS = {4: 39, 8: 15, 16: 11}
"""Boundaries at which stages may begin, by the number of devices; spread evenly over the time of a microbatch."""
MOST_STAGES = {4: 4, 8: 5, 16: 4}
SIMULATED = 30
"""Plans that fit and are simulated, those with the least estimates first."""
EACH = 4
"""Of each division of the devices, the cuts and recomputes that may be simulated."""
TRIED = 150
"""Plans that are simulated at most, those that do not fit included."""


class Guess(NamedTuple):
    """A pipeline with its estimated time and the largest memory that one of its devices needs at least."""

    time_s: float
    need_bytes: float
    order: tuple[str, ...]
    groups: tuple[int, ...]
    bounds: tuple[int, ...]
    mask: tuple[bool, ...]
    microbatches: int
    samples: int


class _Family(NamedTuple):
    """All cuts and recomputes of one division of the devices."""

    order: tuple[str, ...]
    groups: tuple[int, ...]
    microbatches: int
    samples: int
    bounds: np.ndarray
    masks: np.ndarray
    time_s: np.ndarray
    """By cut and mask."""
    need_bytes: np.ndarray

    def guess(self, at: int) -> Guess:
        """Returns the pipeline at a position of the flat arrays."""
        cut, mask = divmod(int(at), len(self.masks))
        bounds, again = tuple(map(int, self.bounds[cut])), tuple(map(bool, self.masks[mask]))
        time, need = float(self.time_s[cut, mask]), float(self.need_bytes[cut, mask])
        return Guess(time, need, self.order, self.groups, bounds, again, self.microbatches, self.samples)

    def fastest(self, limit_bytes: float) -> Iterator[Guess]:
        """Yields the few with the least estimates that may fit."""
        times = np.where(self.need_bytes <= limit_bytes, self.time_s, np.inf).ravel()
        for at in np.argsort(times)[:EACH]:
            if times[at] < np.inf:
                yield self.guess(at)

    def leanest(self) -> Iterator[Guess]:
        """Yields the few that need least memory."""
        return (self.guess(at) for at in np.argsort(self.need_bytes, axis=None)[:EACH])


class Answer(NamedTuple):
    """A simulated pipeline."""

    time_s: float
    peak_bytes: float
    plan: Plan


class BruteForce:
    """All pipelines of one profile on one machine."""

    def __init__(self, profile: Profile, machine: Machine, batch: int, *, any_replicas: bool = True):
        self.profile, self.machine, self.batch = profile, machine, batch
        self.any_replicas = any_replicas
        self.crossing = np.array([_crossing(profile, at) for at in range(len(profile.units) + 1)])
        self._known: dict[Guess, Answer | None] = {}
        self.families = [family for samples in _divisors(batch) for family in self._all(samples)]

    def best(self, limit_bytes: float) -> Answer | None:
        """Returns the fastest pipeline that fits, as simulated."""
        fitting = sorted(guess for family in self.families for guess in family.fastest(limit_bytes))
        answers = list[Answer]()
        for guess in fitting[:TRIED]:
            if len(answers) >= SIMULATED:
                break
            answer = self.simulated(guess)
            if answer is not None and answer.peak_bytes <= limit_bytes:
                answers.append(answer)
        return min(answers, key=lambda answer: answer.time_s, default=None)

    def least_bytes(self) -> float:
        """Returns the least memory per device in which some pipeline fits."""
        lean = sorted((g for f in self.families for g in f.leanest()), key=lambda g: (g.need_bytes, g.time_s))[:TRIED]
        answers = [self.simulated(guess) for guess in lean]
        return min(answer.peak_bytes for answer in answers if answer is not None)

    def simulated(self, guess: Guess) -> Answer | None:
        """Returns a pipeline with its simulated time and memory, or None if it is illegal."""
        if guess not in self._known:
            plan = self._plan(guess)
            try:
                program = compile_plan(plan, self.profile, self.machine)
                prediction = simulate(program, verify(program))
                check_fit(prediction)
                peak = max(peaks["device"] for peaks in prediction.peaks())
                self._known[guess] = Answer(prediction.makespan_s, peak, plan)
            except FaultsError:
                self._known[guess] = None
        return self._known[guess]

    def _all(self, samples: int) -> Iterator[_Family]:
        """Yields the pipelines with one microbatch size."""
        microbatches = self.batch // samples
        for order in self._orders():
            for groups in _compositions(len(order), MOST_STAGES[len(self.machine.devices)]):
                if len(groups) > microbatches or max(groups) > microbatches:
                    continue
                if self.any_replicas or not any(microbatches % size for size in groups):
                    family = self._family(order, groups, microbatches, samples)
                    if family is not None:
                        yield family

    def _orders(self) -> Iterator[tuple[str, ...]]:
        """Yields every number of devices in every order of kinds."""
        names = {d.name: d.kind for d in self.machine.devices if d.type == "gpu"}
        kinds = sorted({*names.values()})
        orders = {tuple(order) for order in permutations(names.values())} if len(names) <= 4 else set()
        if not 0 < len(orders) <= MOST_ORDERS:
            orders = {tuple(k for kind in o for k in names.values() if k == kind) for o in permutations(kinds)}
        seen = set()
        for order in sorted(orders):
            left = {kind: iter([n for n, k in names.items() if k == kind]) for kind in kinds}
            devices = tuple(next(left[kind]) for kind in order)
            counts = range(1, len(devices) + 1) if len(devices) <= 4 else (len(devices), len(devices) // 2)
            for count in counts:
                if order[:count] not in seen:
                    seen.add(order[:count])
                    yield devices[:count]

    def _family(
        self, order: tuple[str, ...], groups: tuple[int, ...], microbatches: int, samples: int
    ) -> _Family | None:
        """Returns the pipelines of one division of the devices, if the model has so many units."""
        units, stages = self.profile.units, len(groups)
        at = _positions(self.profile, MOST_CUTS[len(self.machine.devices)])
        if stages - 1 > len(at):
            return None
        cuts = [*combinations(at, stages - 1)]
        bounds = np.array(cuts, dtype=int).reshape(len(cuts), stages - 1)
        ends = np.hstack([np.zeros((len(bounds), 1), int), bounds, np.full((len(bounds), 1), len(units))])
        masks = np.array([[bool(n >> s & 1) for s in range(stages)] for n in range(2**stages)])
        time = np.zeros((len(bounds), len(masks)))
        slowest, need = np.zeros_like(time), np.zeros_like(time)
        saved = _sums([u.activation_bytes * samples for u in units])
        state = _sums([u.parameter_bytes + u.gradient_bytes + u.optimizer_bytes for u in units])
        weights = _sums([u.gradient_bytes for u in units])
        first = 0
        for stage, size in enumerate(groups):
            start, end = ends[:, stage], ends[:, stage + 1]
            devices, after = order[first : first + size], len(order) - first - size
            work, again = (
                np.max([row[end] - row[start] for row in rows], axis=0) for rows in self._work(devices, samples)
            )
            count = -(-microbatches // size)
            live = 1 if stages == 1 else min(-(-after // size) + 1, count)
            step = work[:, None] + np.outer(again, masks[:, stage])
            sent = (
                self._link_s(devices, order[first + size :][:1]) * samples * self.crossing[end] if after else 0 * work
            )
            reduced = 2 * (size - 1) / size * (weights[end] - weights[start]) * self._link_s(devices, devices[:1])
            time += step + 2 * sent[:, None]
            slowest = np.maximum(slowest, (count - 1) * np.maximum(step, sent[:, None]) + reduced[:, None])
            kept, held = (saved[end] - saved[start])[:, None], samples * self.crossing[start][:, None]
            inside = np.where(masks[:, stage], live * held + kept, live * kept)
            need = np.maximum(need, (state[end] - state[start])[:, None] + inside)
            first += size
        return _Family(order, groups, microbatches, samples, bounds, masks, time + slowest, need)

    def _work(self, devices: Sequence[str], samples: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns prefix sums of the time of a microbatch and of its recompute, for each kind among some devices."""
        work, again = [], []
        for kind in {self.machine.device(name).kind for name in devices}:
            times = [unit.times[kind] for unit in self.profile.units]
            work.append(_sums([t.forward.at(samples) + t.backward.at(samples) for t in times]))
            again.append(_sums([t.recompute.at(samples) for t in times]))
        return work, again

    def _link_s(self, sources: Sequence[str], targets: Sequence[str]) -> float:
        """Returns the seconds per byte of the slowest link between some devices."""
        pairs = [(a, b) for a in sources for b in targets if a != b]
        return max((1 / self.machine.route(a, b).bytes_per_s for a, b in pairs), default=0.0)

    def _plan(self, guess: Guess) -> Plan:
        """Returns the plan of a pipeline."""
        groups, count = guess.groups, len(guess.groups)
        ends = (0, *guess.bounds, len(self.profile.units))
        again = tuple(u for s, (a, b) in enumerate(pairwise(ends)) if guess.mask[s] for u in range(a, b))
        form = {"kind": "1f1b" if count > 1 else "step", "recompute_units": again or None}
        if count == 1 and guess.microbatches % groups[0] == 0:
            place, share = Place(replicas=groups[0], devices=guess.order), guess.microbatches // groups[0]
        else:
            place = Place(workers=count, stage_replicas=groups, devices=guess.order)
            share, form["kind"] = guess.microbatches, "1f1b"
        return Plan(
            name="brute force",
            cut=Cut(kind="chain", bounds=guess.bounds) if guess.bounds else Cut(),
            place=place,
            feed=Feed(microbatches=share, samples=guess.samples),
            order=Order.model_validate(form),
            reduce=Reduce(wire="all-reduce" if max(groups) > 1 else "none"),
        )


def describe(plan: Plan) -> str:
    """Returns a plan in a few words: replicas per stage, cuts, microbatches, recomputed units."""
    groups = plan.place.stage_replicas or (plan.place.replicas,)
    again = len(plan.order.recompute_units or ())
    cut = f" before {', '.join(map(str, plan.cut.bounds))}" if plan.cut.bounds else ""
    text = f"{'-'.join(map(str, groups))}{cut}, {plan.feed.microbatches} of {plan.feed.samples}"
    return text + f", {again} recomputed" * bool(again)


def blocks_of(profile: Profile, count: int) -> Profile:
    """Returns the profile with runs of units merged into about `count` blocks of equal time, as one chain."""
    ends = [0, *_positions(profile, count - 1), len(profile.units)]
    merged = [_merged(profile, a, b) for a, b in pairwise(ends)]
    return Profile(name=f"{profile.name}-blocks", units=tuple(merged))


def _merged(profile: Profile, start: int, end: int) -> Unit:
    units = profile.units[start:end]
    times = {}
    for kind in units[0].times:
        rows = [unit.times[kind] for unit in units]
        forward, backward, recompute = (
            rows[0].forward.replace(per_sample_s=sum(getattr(row, name).per_sample_s for row in rows))
            for name in ("forward", "backward", "recompute")
        )
        times[kind] = UnitTime(forward=forward, backward=backward, recompute=recompute)
    total = {
        name: sum(getattr(unit, name) for unit in units)
        for name in ("num_parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
    }
    return Unit(name=f"{units[0].name}..{units[-1].name}", times=times, boundary_bytes=_crossing(profile, end), **total)


def _crossing(profile: Profile, at: int) -> float:
    """Returns the bytes per sample that units before a boundary send to units after it; each output counts once."""
    if at == len(profile.units):
        return profile.units[-1].boundary_bytes * 0
    outputs: dict[int, float] = {}
    for source, target, size in profile.links:
        if source < at <= target:
            outputs[source] = max(size, outputs.get(source, 0.0))
    return sum(outputs.values())


def _positions(profile: Profile, most: int) -> list[int]:
    """Returns at most so many boundaries, those nearest to equal parts of the time of a microbatch."""
    kind = next(iter(profile.units[0].times))
    times = [unit.times[kind] for unit in profile.units]
    ends = _sums([time.forward.at(1) + time.backward.at(1) for time in times])
    if len(times) - 1 <= most:
        return [*range(1, len(times))]
    wanted = ends[-1] * np.arange(1, most + 1) / (most + 1)
    return sorted({int(np.abs(ends - w).argmin()) for w in wanted} - {0, len(times)})


def _sums(values: Sequence[float]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _compositions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yields the ways to write a number as a sum of at most so many positive numbers, in order."""
    for stages in range(1, min(total, most) + 1):
        for cuts in combinations(range(1, total), stages - 1):
            yield tuple(b - a for a, b in pairwise((0, *cuts, total)))
