"""The random searcher: Markov chain Monte Carlo over whole drafts, with the rule of FlexFlow or with ours.

A step changes one thing of a draft: a cut, the frame, or both; worse drafts are accepted with exp(−Δ/temperature).
FlexFlow's rule has one temperature for the whole run and goes on from wherever it is. Ours is relative to the best time
so far, cools down, and starts again from the best when nothing was gained for long.
"""

import random
from dataclasses import replace
from math import exp, inf

from pipedejavu.search.cost import estimate
from pipedejavu.search.draft import Draft, Scene, Stage
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.space import Frame, frames

STEPS = 4000
PATIENCE = 200
"""Steps without gain, after which ours starts again from the best."""
FIRST, LAST = 0.2, 0.002
"""Of our temperature, as parts of the best time."""
FLEXFLOW = 0.05
"""Of FlexFlow's temperature, as a part of the first draft's time."""
PENALTY = 10.0
"""Times that a shortage of memory makes a draft longer, so that a chain can pass through what does not fit."""


def run(pool: Pool, scenes: list[Scene], options: Options, *, is_flexflow: bool = False, steps: int = STEPS) -> bool:
    """Walks at random from data parallelism on; returns False, as it never knows that it saw all."""
    chance = random.Random(options.seed)
    found = (frame for scene in scenes for frame in frames(scene, options))
    every = [frame for frame in found if any(True for _ in frame.seatings(len(frame.scene.profile.units)))]
    if not every:
        return True
    chain = _Chain(pool, every, chance)
    first = max(every, key=lambda f: (f.mode.is_plain, f.sizes == (len(f.order),), len(f.order), not f.scene.note))
    state = chain.start(first)
    best = state
    since = 0
    for step in range(steps):
        if pool.is_over:
            break
        if step % PATIENCE == 0:
            pool.report(step / steps, f"walking at random, step {step} of {steps}")
        new = chain.change(state)
        cooled = FIRST * (LAST / FIRST) ** (step / steps)
        warmth = FLEXFLOW * first_s if is_flexflow and (first_s := chain.first_s) < inf else cooled * best[1]
        if new[1] <= state[1] or chance.random() < exp((state[1] - new[1]) / warmth if warmth else -inf):
            state = new
        since = 0 if new[1] < best[1] else since + 1
        best = min(best, new, key=lambda found: found[1])
        if not is_flexflow and since >= PATIENCE:
            state, since = best, 0
    return False


_State = tuple[Draft, float, Frame]


class _Chain:
    """Drafts and the changes that lead from one to the next."""

    def __init__(self, pool: Pool, every: list[Frame], chance: random.Random):
        self.pool, self.every, self.chance = pool, every, chance
        self.first_s = inf

    def start(self, frame: Frame) -> _State:
        state = self._seen(frame, self._equal(frame))
        self.first_s = state[1]
        return state

    def change(self, state: _State) -> _State:
        """Moves a cut, divides the state of a stage or leaves it whole, or takes another frame, its cut if it fits."""
        draft, _, frame = state
        if len(draft.stages) > 1 and self.chance.random() < 0.6:
            return self._seen(frame, self._moved(draft))
        if len(frame.zeros) > 1 and self.chance.random() < 0.3:
            at = self.chance.randrange(len(draft.stages))
            return self._seen(
                frame, (*draft.stages[:at], self._with_zero(draft.stages[at], frame), *draft.stages[at + 1 :])
            )
        near = [f for f in self.chance.choices(self.every, k=8) if self._likeness(f, frame)]
        other = self.chance.choice(near or self.every)
        if other.order == frame.order and (other.sizes, other.degrees) == (frame.sizes, frame.degrees):
            return self._seen(other, tuple(self._with_zero(stage, other) for stage in draft.stages))
        return self._seen(other, self._equal(other))

    @staticmethod
    def _likeness(one: Frame, other: Frame) -> bool:
        return sum((one.order == other.order, one.sizes == other.sizes, one.samples == other.samples)) == 2

    def _seen(self, frame: Frame, stages: tuple[Stage, ...]) -> _State:
        draft = Draft(frame.scene, stages, frame.samples, frame.microbatches, frame.mode, frame.is_stale)
        cost = estimate(draft, self.pool.costs(frame.scene, frame.samples))
        self.pool.num_estimated += 1
        self.pool.offer(draft, cost)
        short = max(cost.shortage - 1, 0.0)
        return draft, self.pool.score(frame.scene, draft.devices, cost.time_s) * (1 + PENALTY * short), frame

    def _equal(self, frame: Frame) -> tuple[Stage, ...]:
        """Returns stages with about as many units each, on groups of random sizes where these are free."""
        units, count = len(frame.scene.profile.units), len(frame.order)
        groups: list[tuple[int, int]] = []
        after = 0
        while after < count:
            size, shards = self.chance.choice([*frame.groups(after)])
            groups.append((after + size * shards, shards))
            after = groups[-1][0]
            if len(groups) > units:
                groups, after = [], 0
        groups.reverse()
        stages, first = [], 0
        for n, (behind, shards) in enumerate(groups):
            last = groups[n + 1][0] if n + 1 < len(groups) else 0
            members = frame.order[count - behind : count - last]
            end = units * (n + 1) // len(groups)
            stages.append(self._with_zero(Stage(first, end, members, shards), frame))
            first = end
        return tuple(stages)

    def _with_zero(self, stage: Stage, frame: Frame) -> Stage:
        """Returns a stage with its state divided or whole, at random, as far as a frame lets it."""
        return replace(stage, zero=self.chance.choice(frame.zeros) if stage.replicas > 1 else 0)

    def _moved(self, draft: Draft) -> tuple[Stage, ...]:
        """Moves one border between stages, mostly by one unit."""
        stages = [*draft.stages]
        at = self.chance.randrange(1, len(stages))
        low, high = stages[at - 1].start + 1, stages[at].end - 1
        here = stages[at].start
        to = self.chance.randint(low, high) if self.chance.random() < 0.2 else here + self.chance.choice((-1, 1))
        to = min(max(to, low), high)
        stages[at - 1] = replace(stages[at - 1], end=to)
        stages[at] = replace(stages[at], start=to)
        return tuple(stages)
