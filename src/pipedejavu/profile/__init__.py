"""Models as units: read from a chain, and measured on this machine's CPU."""

from pipedejavu.profile.chain import Units, read_chain
from pipedejavu.profile.measure import measure_profile

__all__ = ["Units", "measure_profile", "read_chain"]
