"""Shares: whole replicas on devices of unequal speed, each with the part of the batch that it can train in time."""

from pipedejavu.search.draft import Draft, Scene, Stage
from pipedejavu.search.option import Options
from pipedejavu.search.pool import Pool
from pipedejavu.search.space import microbatch_sizes

MOST_DEVICES = 64


def offer_shares(pool: Pool, scenes: list[Scene], options: Options) -> None:
    """Offers shares over the fastest two devices, three, and so on, of each scene whose devices differ."""
    for scene in scenes:
        units, kinds = len(scene.profile.units), {scene.machine.device(name).kind for name in scene.devices}
        if len(kinds) < 2:
            continue
        for samples in microbatch_sizes(options, 1):
            costs = pool.costs(scene, samples)
            speed = {
                name: sum(float(costs.times(scene.machine.device(name).kind)[row][-1]) for row in (0, 1))
                for name in scene.devices
            }
            order = sorted(scene.devices, key=speed.__getitem__)[:MOST_DEVICES]
            for count in range(2, min(len(order), options.batch) + 1):
                stage = Stage(0, units, tuple(order[:count]))
                pool.offer(Draft(scene, (stage,), samples, options.batch // samples, is_shared=True))
