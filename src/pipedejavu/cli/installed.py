"""Checks that torch is installed: measuring and training need it, planning does not.

Files of `cli` import rooms that need torch inside functions, after `require_torch`.
"""

from importlib import import_module

from pipedejavu.facts import InputError


def require_torch(purpose: str, remedy: str = "pip install 'pipedejavu[train]'") -> None:
    """Raises InputError if torch or safetensors cannot be imported."""
    try:
        for name in ("torch", "safetensors"):
            import_module(name)
    except ImportError as error:
        raise InputError(f"{purpose} needs torch and safetensors: {remedy} ({error})") from None
