"""Shares: whole replicas on devices of unequal speed, each with the part of the batch that it can train in time."""

from pipedejavu.search.draft import Draft, Scene, Stage
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.space import microbatch_sizes

MOST_DEVICES = 16
"""Beyond which the devices of one kind are taken all together."""


def offer_shares(pool: Pool, scenes: list[Scene], options: Options) -> None:
    """Offers shares over the fastest devices, so many as may be worth it, of each scene whose devices differ."""
    for scene in scenes:
        units, kind_of = len(scene.profile.units), {name: scene.machine.device(name).kind for name in scene.devices}
        if len({*kind_of.values()}) < 2 or len(scene.degrees) > 1:
            continue
        for samples in microbatch_sizes(options, 1):
            costs = pool.costs(scene, samples)
            work = {kind: sum(float(costs.times(kind)[row][-1]) for row in (0, 1)) for kind in {*kind_of.values()}}
            order = sorted(scene.devices, key=lambda name: (work[kind_of[name]], kind_of[name]))
            kinds = [kind_of[name] for name in order]
            ends = [n for n in range(2, len(order) + 1) if n == len(order) or kinds[n] != kinds[n - 1]]
            counts = range(2, len(order) + 1) if len(order) <= MOST_DEVICES else ends
            for count in (n for n in counts if n <= options.batch and len({*kinds[:n]}) > 1):
                if pool.is_over:
                    return
                stage = Stage(0, units, tuple(order[:count]))
                pool.offer(Draft(scene, (stage,), samples, options.batch // samples, is_shared=True))
