"""Models as units: read from a chain, and measured on devices of this machine."""

from pipedejavu.profile.chain import Units, read_chain
from pipedejavu.profile.measure import measure_profile, merge_profiles

__all__ = ["Units", "measure_profile", "merge_profiles", "read_chain"]
