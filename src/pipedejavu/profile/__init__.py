"""Models as units: read from a chain or cut out of any module, and measured on devices of this machine."""

from pipedejavu.profile.chain import Units, is_chain, read_chain
from pipedejavu.profile.cut import Cut, cut_model
from pipedejavu.profile.measure import Shot, measure_profile, merge_profiles

__all__ = ["Cut", "Shot", "Units", "cut_model", "is_chain", "measure_profile", "merge_profiles", "read_chain"]
