"""pipeDejavu: plan, preview and run the training of deep networks on mixed CPU and GPU hardware.

Public names are imported on first use, so that planning works without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipedejavu.facts.version import VERSION

if TYPE_CHECKING:
    from pipedejavu.analysis import verify
    from pipedejavu.facts import InputError, Machine, Profile, Timeline
    from pipedejavu.hybrid import HybridAdamW
    from pipedejavu.plan import Plan, preset, presets
    from pipedejavu.program import Program, compile  # noqa: A004
    from pipedejavu.session import Checkpoints, Trainer
    from pipedejavu.source.deferred_init import build_model

__version__ = VERSION

_ROOMS = {
    "Checkpoints": "session",
    "HybridAdamW": "hybrid",
    "InputError": "facts",
    "Machine": "facts",
    "Plan": "plan",
    "Profile": "facts",
    "Program": "program",
    "Timeline": "facts",
    "Trainer": "session",
    "build_model": "source.deferred_init",
    "compile": "program",
    "preset": "plan",
    "presets": "plan",
    "verify": "analysis",
}

__all__ = [
    "Checkpoints",
    "HybridAdamW",
    "InputError",
    "Machine",
    "Plan",
    "Profile",
    "Program",
    "Timeline",
    "Trainer",
    "__version__",
    "build_model",
    "compile",
    "preset",
    "presets",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(f"pipedejavu.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'pipedejavu' has no attribute '{name}'")
