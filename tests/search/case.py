"""Profiles and machines for tests of the search, made by hand."""

from collections.abc import Sequence

from pipedejavu.facts import Cost, Device, Host, Link, Machine, Profile, Unit, UnitTime

FAST = 1e15
"""Bytes a second that take no time beside a millisecond."""
ROOM = 2**60


def profile(
    times: Sequence[float],
    speeds: dict[str, float] | None = None,
    *,
    weights: Sequence[int] | int = 4,
    saved: Sequence[float] | float = 1.0,
    boundary: Sequence[float] | float = 1.0,
    optimizer: int = 2,
    update_s: float = 0.0,
) -> Profile:
    """Units with these forward times for a sample, twice that backward; `optimizer` bytes for each of weights."""
    kinds = speeds or {"fast": 1.0}

    def row(value: Sequence[float] | float) -> Sequence[float]:
        return [value] * len(times) if isinstance(value, int | float) else value

    units = []
    for n, (time, size, kept, sent) in enumerate(zip(times, row(weights), row(saved), row(boundary), strict=True)):
        times_by_kind = {
            kind: UnitTime(
                forward=Cost(per_sample_s=time / speed),
                backward=Cost(per_sample_s=2 * time / speed),
                recompute=Cost(per_sample_s=time / speed),
                update_s=update_s / speed,
            )
            for kind, speed in kinds.items()
        }
        units.append(
            Unit(
                name=f"u{n}",
                times=times_by_kind,
                parameter_bytes=int(size),
                gradient_bytes=int(size),
                optimizer_bytes=int(optimizer * size),
                activation_bytes=float(kept),
                boundary_bytes=float(sent),
            )
        )
    return Profile(name="test", units=tuple(units))


def machine(
    kinds: Sequence[str],
    *,
    room: int = ROOM,
    hosts: int = 1,
    within: float = FAST,
    between: float = FAST,
    host_room: int = 0,
    pcie: float = FAST,
    has_interfaces: bool = False,
) -> Machine:
    """GPUs of these kinds spread over hosts in turn, each host with a CPU where `host_room` is given.

    With interfaces, all that leaves a host shares a wire, and so does all that enters it.
    """
    per_host = len(kinds) // hosts
    devices = [
        Device(name=f"gpu{n}", kind=kind, type="gpu", host=f"h{n // per_host}", memory_bytes=room)
        for n, kind in enumerate(kinds)
    ]
    links = [Link(source="gpu*", target="gpu*", scope="same-host", bytes_per_s=within)]
    if host_room:
        devices += [
            Device(name=f"cpu{h}", kind="cpu", type="cpu", host=f"h{h}", memory_bytes=host_room) for h in range(hosts)
        ]
        links += [Link(scope="same-host", bytes_per_s=pcie)]
    wires = {"wires": ("out:{source_host}", "in:{target_host}")} if has_interfaces else {}
    links += [Link(scope="other-host", bytes_per_s=between, **wires)] if hosts > 1 else []
    return Machine(
        name="test", hosts=tuple(Host(name=f"h{h}") for h in range(hosts)), devices=tuple(devices), links=tuple(links)
    )
