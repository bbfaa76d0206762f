"""Reference models and data sets of the project; model shapes are available without torch."""

from importlib import import_module
from typing import TYPE_CHECKING

from pipedejavu.facts import InputError
from pipedejavu.zoo.gpt_profile import estimate_profile
from pipedejavu.zoo.gpt_shape import SHAPES

if TYPE_CHECKING:
    from pipedejavu.zoo.chain import Chain, Flow
    from pipedejavu.zoo.data import DATA_NAMES, Dataset, open_data, order
    from pipedejavu.zoo.zoo_task import (
        MODEL_NAMES,
        Task,
        build,
        default_data,
        form_of,
        is_graph_model,
        separates_documents,
    )

__all__ = [
    "DATA_NAMES",
    "MODEL_NAMES",
    "SHAPES",
    "Chain",
    "Dataset",
    "Flow",
    "Task",
    "build",
    "default_data",
    "estimate_profile",
    "form_of",
    "is_graph_model",
    "open_data",
    "order",
    "separates_documents",
]

_WITH_TORCH = {
    **dict.fromkeys(("Chain", "Flow"), "chain"),
    **dict.fromkeys(("DATA_NAMES", "Dataset", "open_data", "order"), "data"),
    **dict.fromkeys(
        ("MODEL_NAMES", "Task", "build", "default_data", "form_of", "is_graph_model", "separates_documents"), "zoo_task"
    ),
}


def __getattr__(name: str) -> object:
    """Imports a name that needs torch on first use."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_WITH_TORCH[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError("the zoo's models need torch; pip install 'pipedejavu[train]'") from None
    return getattr(module, name)
