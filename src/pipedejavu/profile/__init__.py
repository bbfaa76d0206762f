"""Models as units: read from a chain or cut out of any module, and measured on devices of this machine."""

from pipedejavu.profile.blank import blank_like, make_blank, make_mode
from pipedejavu.profile.chain import Units, is_chain, read_chain
from pipedejavu.profile.company import company
from pipedejavu.profile.cut import Cut, cut_model
from pipedejavu.profile.estimate import estimate_units, read_rates
from pipedejavu.profile.measure import measure_profile, merge_profiles
from pipedejavu.profile.predictor import Efficiency, known_efficiencies
from pipedejavu.profile.shot import Shot, has_same_units, make_shots

__all__ = [
    "Cut",
    "Efficiency",
    "Shot",
    "Units",
    "blank_like",
    "company",
    "cut_model",
    "estimate_units",
    "has_same_units",
    "is_chain",
    "known_efficiencies",
    "make_blank",
    "make_mode",
    "make_shots",
    "measure_profile",
    "merge_profiles",
    "read_chain",
    "read_rates",
]
