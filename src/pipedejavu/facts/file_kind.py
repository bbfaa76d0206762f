"""What a JSON file holds, by its keys, so that a file given in place of another is named for what it is."""

from collections.abc import Collection
from typing import Any

_KEYS: dict[str, tuple[Collection[str], str]] = {
    "machine": (("devices", "links", "survey"), "give it as --machine"),
    "cluster": (("hosts", "network_bytes_per_s"), "give it as --machine"),
    "profile": (("units", "ties", "begins"), "give it as the MODEL of 'plan', or as --profile of 'simulate'"),
    "timeline": (("makespan_s", "bubble_fraction"), "runs have it as a result, and no option takes it"),
    "plan": (
        ("cut", "place", "feed", "order", "version", "reduce", "keep"),
        "give it as --plan of 'train', or as the PLAN of 'simulate'",
    ),
    "configuration of transformers": (("model_type", "architectures"), "give it as the model 'hf:FILE'"),
}
"""Keys of which each kind of file has one at least and no other kind has any, and where the file belongs."""


def describe_kind(plain: Any, wanted: str) -> str:
    """Returns a sentence if plain data is a known kind of file other than the one that is wanted; empty otherwise."""
    if not isinstance(plain, dict) or wanted not in _KEYS:
        return ""
    for kind, (keys, remedy) in _KEYS.items():
        if any(key in plain for key in keys):
            return "" if kind == wanted else f"this is a {kind}, and a {wanted} is read here; {remedy}"
    return ""
