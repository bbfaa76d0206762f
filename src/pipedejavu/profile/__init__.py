"""Models as units: read from a chain or cut from any module, and measured on the devices of this machine."""

from pipedejavu.profile.background_load import background_load
from pipedejavu.profile.meta_model import make_meta_model, make_mode, meta_like
from pipedejavu.profile.model_cut import ModelCut, cut_model
from pipedejavu.profile.predictor import Efficiency, known_efficiencies
from pipedejavu.profile.rates import read_rates
from pipedejavu.profile.sequential import Units, is_chain, read_chain
from pipedejavu.profile.time_budget import TimeBudget
from pipedejavu.profile.unit_estimate import estimate_units
from pipedejavu.profile.unit_sample import UnitSample, has_same_units, make_samples
from pipedejavu.profile.unit_time import measure_profile, merge_profiles

__all__ = [
    "Efficiency",
    "ModelCut",
    "TimeBudget",
    "UnitSample",
    "Units",
    "background_load",
    "cut_model",
    "estimate_units",
    "has_same_units",
    "is_chain",
    "known_efficiencies",
    "make_meta_model",
    "make_mode",
    "make_samples",
    "measure_profile",
    "merge_profiles",
    "meta_like",
    "read_chain",
    "read_rates",
]
