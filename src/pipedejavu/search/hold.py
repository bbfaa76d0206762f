"""Whether a machine can hold a model at all, by estimates of memory alone: quicker than a search, and no promise."""

import numpy as np

from pipedejavu.facts import Machine, Profile
from pipedejavu.search.cost import Costs
from pipedejavu.search.option import Options
from pipedejavu.search.scene import scenes_of
from pipedejavu.search.seat import seat_of
from pipedejavu.search.space import Frame, frames


def can_hold(profile: Profile, machine: Machine, options: Options) -> bool:
    """Returns whether some pipeline of groups that are alike is estimated to have room for all units."""
    for scene in scenes_of(profile, machine, options):
        costs: dict[int, Costs] = {}
        for frame in frames(scene, options):
            if frame.is_free:
                continue
            if frame.samples not in costs:
                costs[frame.samples] = Costs(scene, frame.samples)
            if _can_hold(frame, costs[frame.samples]):
                return True
    return False


def _can_hold(frame: Frame, costs: Costs) -> bool:
    """Gives each stage as many units as it has room for, from the first stage on: what is left must fit the last."""
    size, start = frame.sizes[0], 0
    for after in range(len(frame.order) - size, -1, -size):
        place = frame.row.place(after, size)
        seat = seat_of(place, frame.microbatches, frame.is_stale, frame.mode.zero)
        ends = np.arange(start + 1, costs.num_units - after // size + 1)  # every stage has a unit at least
        cost = costs.stage(np.full_like(ends, start), ends, seat, frame.mode)
        fitting = ends[(cost.device_bytes <= place.room_bytes) & (cost.host_bytes <= place.host_room_bytes)]
        if not len(fitting):
            return False
        start = int(fitting[-1])
    return start == costs.num_units
