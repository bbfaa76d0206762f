"""The devices that a plan was made for, as a decision in its file, so that a run on others says so."""

from collections import Counter

from pipedejavu.plan import Decision, Plan
from pipedejavu.program.pipeline import assign_devices
from pipedejavu.search import RankedPlan


def with_origin(best: RankedPlan) -> Plan:
    """Returns the plan with a decision that names its machine and the devices that its workers take there."""
    kinds = Counter(best.machine.device(name).kind for name in assign_devices(best.plan, best.machine))
    devices = " + ".join(f"{count} × {kind}" for kind, count in kinds.items())
    origin = Decision(axis="place", choice=devices, reason=f"what it was planned for: {best.machine.name}")
    return best.plan.replace(decisions=(*best.plan.decisions, origin))
