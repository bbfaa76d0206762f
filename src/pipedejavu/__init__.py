"""pipeDejavu: plan, preview and run the training of deep networks on mixed CPU and GPU hardware.

Public names are imported on first use, so that planning works without torch.

`probe`, `profile`, `plan` and `simulate` are functions and packages alike: `pipedejavu.plan(profile)` searches for a
plan, and `from pipedejavu.plan import Plan` imports from the package. The functions are short names for what most
programs need, and the packages had these names before.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipedejavu.facts.version import VERSION

if TYPE_CHECKING:
    from pipedejavu.analysis import verify
    from pipedejavu.engine import AdamW
    from pipedejavu.facts import InputError, Machine, Profile, Timeline
    from pipedejavu.hybrid import HybridAdamW
    from pipedejavu.plan import Plan, preset, presets
    from pipedejavu.program import Program, compile  # noqa: A004
    from pipedejavu.runtime.host_pages import warm_host_memory
    from pipedejavu.session import Callback, Checkpoints, Trainer
    from pipedejavu.session.top_level import plan, probe, profile, simulate
    from pipedejavu.source.deferred_init import build_model

__version__ = VERSION

_ROOMS = {
    "AdamW": "engine",
    "Callback": "session",
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
    "warm_host_memory": "runtime.host_pages",
}
_CALLABLE = ("plan", "probe", "profile", "simulate")
"""Packages that are also functions."""

__all__ = [
    "AdamW",
    "Callback",
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
    "plan",
    "preset",
    "presets",
    "probe",
    "profile",
    "simulate",
    "verify",
    "warm_host_memory",
]


class _Room(ModuleType):
    """A package that can be called: it passes the call on to the function of its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        functions = import_module("pipedejavu.session.top_level")
        return getattr(functions, self.__name__.rpartition(".")[2])(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The function, for `inspect.signature` and `help`."""
        return getattr(import_module("pipedejavu.session.top_level"), self.__name__.rpartition(".")[2])


class _Root(ModuleType):
    """This package, which makes some of its packages callable when the import system adds them to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLABLE and type(value) is ModuleType:
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Root


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(import_module(f"pipedejavu.{_ROOMS[name]}"), name)
    if name in _CALLABLE:
        return import_module(f"pipedejavu.{name}")
    raise AttributeError(f"module 'pipedejavu' has no attribute '{name}'")
