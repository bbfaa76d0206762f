"""The time of a step with clipping, from the times of its parts: the rule by which state is placed.

All updates wait for the norm, at the end of the backward pass. The deadline of each is the forward of its unit: an
update on the host is free if it ends before, a streamed one if its state has come by then. Streamed state must also be
back in host memory before the next backward pass fetches it again:

    compute    V0 F0 F1 V2 F2 ...  loss  B2 B1 B0 ...     V: the update of streamed state
    host       U1 U3 U4 ...                               U: updates on the host, in the order of the forward pass
    copy-out   o0 o2 ...                                  o: streamed state returns
"""

from collections.abc import Sequence
from dataclasses import dataclass

PART_SHARE = 0.7
"""The time of one part of a divided update over that of the whole: 18 of 26 bytes of memory traffic for a bf16 weight
with a split master, 20 of 28 for a float32 weight."""
ASSUMED_HOST_S = 1 / 4.0e9
"""Seconds of a parameter's update on the host until one is measured: about 26 bytes at 100 GB/s."""
ASSUMED_COPY_S = 1 / 53e9
"""Seconds of a byte of streamed state until one is measured: 16 lanes of PCIe 5."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What a step took, without waits."""

    forward_s: Sequence[float]
    """By unit; 0 for the last one, which is part of the rest."""
    host_s: Sequence[float]
    """By unit: a whole update on the host."""
    rest_s: float
    """From the start of the last unit to the end of the backward pass."""
    return_s: Sequence[float] = ()
    """By unit: the copy of its streamed state to the host; none if empty."""
    fetch_s: Sequence[float] = ()
    """By unit: the copy of its streamed state to the GPU; none if empty."""


def assumed_times(num_parameters: Sequence[int], streamed_bytes: Sequence[int]) -> StepTimes:
    """Returns times of a step that has not been measured: forwards of no length, and rates that are assumed."""
    return StepTimes(
        forward_s=[0.0] * len(num_parameters),
        host_s=[count * ASSUMED_HOST_S for count in num_parameters],
        rest_s=0.0,
        return_s=[size * ASSUMED_COPY_S for size in streamed_bytes],
    )


def estimate_step(
    on_host: Sequence[int],
    times: StepTimes,
    num_deferred: int = 0,
    streamed: Sequence[int] = (),
    num_fetched: int = 0,
) -> float:
    """Returns the seconds of a step in which these units are updated on the host or have streamed state.

    The first units on the host defer their moments; the first streamed ones are fetched during the backward pass, and
    the others into the memory of those that have returned.
    """
    deferred, is_held, is_streamed = {*on_host[:num_deferred]}, {*on_host}, {*streamed}
    compute_s = host_s = arrive_s = leave_s = 0.0
    returned: list[float] = []
    for unit, forward_s in enumerate(times.forward_s):
        if unit in is_held:
            host_s += times.host_s[unit] * (PART_SHARE if unit in deferred else 1.0)
            compute_s = max(compute_s, host_s)
        elif unit in is_streamed:
            if len(returned) >= num_fetched:
                freed_s = returned[len(returned) - num_fetched] if num_fetched else 0.0
                arrive_s = max(arrive_s, freed_s) + _of(times.fetch_s, unit)
                compute_s = max(compute_s, arrive_s)
            leave_s = max(leave_s, compute_s) + _of(times.return_s, unit)
            returned.append(leave_s)
        compute_s += forward_s
    moments_s = sum(times.host_s[unit] * PART_SHARE for unit in deferred)
    fetched_s = sum(_of(times.fetch_s, unit) for unit in streamed[:num_fetched])
    return max(compute_s + times.rest_s, host_s + moments_s, leave_s + fetched_s)


def _of(seconds: Sequence[float], unit: int) -> float:
    return seconds[unit] if seconds else 0.0
