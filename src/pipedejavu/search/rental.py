"""Which of several machines to rent: the time and the cost of a whole training on each, from its best plan.

Machines that fail, or that a provider takes back, lose the work since their last checkpoint. The interval between
checkpoints is Young's, and the expected time is exact for failures at random times (Daly).
"""

from collections.abc import Callable, Mapping, Sequence
from math import exp, expm1, inf, sqrt

from pydantic import Field

from pipedejavu.facts import InputError, Machine, Profile, Record, known_device
from pipedejavu.facts.quantity import Seconds
from pipedejavu.search.search_options import SearchOptions
from pipedejavu.search.search_result import RankedPlan, SearchResult

ASSUMED_DISK_BYTES_PER_S = 1e9
"""Rate at which checkpoints are written, and read after a failure, on machines whose disk was not measured."""
ASSUMED_START_S = 120.0
"""Time until a machine that failed, or its replacement, begins to read the checkpoint."""

SearchOne = Callable[[Profile, Machine, SearchOptions], SearchResult]


class TrainingGoal(Record):
    """What is to be trained, by when, and how often devices fail."""

    samples: int = Field(ge=1)
    """Samples of the whole training."""
    deadline_s: Seconds | None = None
    """Most time for it."""
    failure_s: dict[str, float] = Field(default_factory=dict)
    """Mean time between failures of one device, by kind; others do not fail."""
    energy_price: float = Field(default=0.0, ge=0)
    """Price per kWh."""
    power_w: dict[str, float] = Field(default_factory=dict)
    """Power of one device, by kind; otherwise the stated one."""


class Rental(Record):
    """A machine with its best plan, and what the whole training takes there."""

    machine: str
    best: RankedPlan | None
    """None if no plan fits."""
    refusal: str = ""
    """Why there is no plan."""
    price_per_hour: float = 0.0
    """Of all devices of the machine, also of those that the plan leaves idle."""
    power_w: float = 0.0
    """Of all devices at their stated power, if energy has a price."""
    energy_price: float = 0.0
    """Price per kWh."""
    time_s: float = inf
    """Expected time of the whole training, with checkpoints and failures."""
    lost_share: float = 0.0
    """The share of the time that checkpoints, restarts and repeated work take."""
    is_in_time: bool = False
    """Whether it ends by the deadline."""

    @property
    def energy_kwh(self) -> float:
        """The energy of the whole training, at most: devices draw less than their stated power now and then."""
        return self.power_w * self.time_s / 3.6e6

    @property
    def cost(self) -> float:
        """The price of the whole training, with its energy."""
        return self.price_per_hour * self.time_s / 3600 + self.energy_price * self.energy_kwh


def compare_rentals(
    problems: Sequence[tuple[Profile, Machine]], options: SearchOptions, goal: TrainingGoal, search_one: SearchOne
) -> tuple[Rental, ...]:
    """Returns all machines, the best first: those in time before the others, then the cheapest, then the soonest.

    Raises InputError if a price or a time between failures is of a kind that no machine has, or if there are prices and
    a machine has none.
    """
    kinds = {device.kind for _, machine in problems for device in machine.devices}
    for what, given in (("price", options.prices), ("failures", goal.failure_s), ("power", goal.power_w)):
        if unknown := sorted(given.keys() - kinds):
            raise InputError(
                f"--{what} names '{unknown[0]}', which none of the machines has; they have {', '.join(sorted(kinds))}"
            )
    for _, machine in problems:
        if options.prices and not _price_per_hour(machine, options):
            known = ", ".join(sorted({device.kind for device in machine.devices}))
            raise InputError(f"machine '{machine.name}' has no price; give --price for a kind of its devices ({known})")
    rentals = [_rental(profile, machine, options, goal, search_one) for profile, machine in problems]
    return tuple(sorted(rentals, key=lambda rental: (rental.best is None, not rental.is_in_time, *_rank(rental))))


def _rank(rental: Rental) -> tuple[float, float]:
    if rental.best is None:
        return inf, inf
    # Late ones are ordered by how late they are: what they cost does not help.
    return (rental.cost if rental.is_in_time else 0.0), rental.time_s


def _rental(
    profile: Profile, machine: Machine, options: SearchOptions, goal: TrainingGoal, search_one: SearchOne
) -> Rental:
    price, power_w = _price_per_hour(machine, options), _power_of(machine, goal)
    result = search_one(profile, machine, options)
    best = result.best
    if best is None:
        why = "no plan fits" if result.is_complete else "no plan was found in time (--time-budget)"
        return Rental(machine=machine.name, best=None, refusal=why, price_per_hour=price)
    work_s = best.time_per_sample_s * goal.samples
    time_s = expected_time(work_s, failure_of(machine, goal.failure_s), *_checkpoint_times(profile, machine))
    return Rental(
        machine=machine.name,
        best=best,
        price_per_hour=price,
        power_w=power_w,
        energy_price=goal.energy_price,
        time_s=time_s,
        lost_share=1 - work_s / time_s if time_s else 0.0,
        is_in_time=goal.deadline_s is None or time_s <= goal.deadline_s,
    )


def _price_per_hour(machine: Machine, options: SearchOptions) -> float:
    return sum(options.prices.get(device.kind, 0.0) for device in machine.devices)


def _power_of(machine: Machine, goal: TrainingGoal) -> float:
    """Returns the power of all devices of a machine if energy has a price; raises InputError if one is not known."""
    if not goal.energy_price:
        return 0.0
    total_w = 0.0
    for device in machine.devices:
        if device.kind in goal.power_w:
            total_w += goal.power_w[device.kind]
            continue
        try:
            total_w += known_device(device.kind, device.type).power_w
        except InputError:
            raise InputError(
                f"the power of '{device.kind}' is not known, and energy has a price; give it (--power {device.kind}=W)"
            ) from None
    return total_w


def failure_of(machine: Machine, failure_s: Mapping[str, float]) -> float:
    """Returns the mean time between failures of any device of a machine; infinite if none fails."""
    rate = sum(1 / failure_s[device.kind] for device in machine.devices if device.kind in failure_s)
    return 1 / rate if rate else inf


def _checkpoint_times(profile: Profile, machine: Machine) -> tuple[float, float]:
    """Returns the time to write a checkpoint, and the time from a failure until training goes on."""
    size = sum(unit.parameter_bytes + unit.optimizer_bytes for unit in profile.units)
    host = machine.hosts[0] if machine.hosts else None
    write = (host.disk_write_bytes_per_s if host else 0.0) or ASSUMED_DISK_BYTES_PER_S
    read = (host.disk_read_bytes_per_s if host else 0.0) or ASSUMED_DISK_BYTES_PER_S
    return size / write, ASSUMED_START_S + size / read


def expected_time(work_s: float, failure_s: float, save_s: float, restart_s: float) -> float:
    """Returns the expected time of work that is interrupted at random, with the best interval between checkpoints.

    A failure repeats the work since the last checkpoint, and may strike while a checkpoint is written or read.
    """
    if failure_s == inf or not work_s:
        return work_s
    interval_s = min(work_s, max(sqrt(2 * save_s * failure_s), work_s * 1e-9))
    segments = work_s / interval_s
    exponent = (interval_s + save_s) / failure_s
    if exponent + restart_s / failure_s > 700:  # beyond what a float holds: it never ends
        return inf
    return segments * failure_s * exp(restart_s / failure_s) * expm1(exponent)
