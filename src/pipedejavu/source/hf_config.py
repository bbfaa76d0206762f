"""Checks of untrusted transformers configurations: fields that must not be set, and limits on the model's size.

Some fields make transformers download and run code: attention and expert kernels, custom model classes, backbones,
quantizers. All of these are rejected.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

from pipedejavu.facts import InputError, format_bytes
from pipedejavu.facts.error import brief

MOST_LAYERS = 4096
"""The most units that a plan may have."""
MOST_MODULES = 1 << 20

_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""Implementations that come with transformers and torch; others may be fetched from the hub."""
_CODE = {"auto_map", "custom_pipelines", "trust_remote_code", "quantization_config", "use_kernels", "kernel_config"}
_FETCHED = {"use_pretrained_backbone", "backbone", "backbone_kwargs", "architecture", "timm_model_name"}
_REPEATED, _SIZE = re.compile("layer|block|depth|expert|stage"), re.compile("size|dim|capacity|norm|token")
"""Patterns of names that count layers, and of names that match the first pattern but do not."""
_MOST_NESTED = 32


def check_configuration(plain: Any, name: str) -> None:
    """Raises InputError for a configuration that would download or run code, or that has too many layers."""
    if not isinstance(plain, Mapping):
        raise InputError(f"the configuration 'hf:{name}' is no object of JSON but {brief(plain)}")
    for path, key, value in _fields(plain):
        _check_code(path, key, value, name)
        most = max((abs(n) for n in _integers(value)), default=0)
        if most > MOST_LAYERS and _REPEATED.search(key) and not _SIZE.search(key):
            raise InputError(
                f"the configuration 'hf:{name}' has {path} {brief(value)}; models of up to {MOST_LAYERS} layers are"
                " read"
            )


def _check_code(path: str, key: str, value: Any, name: str) -> None:
    start = f"the configuration 'hf:{name}' has {path} {brief(value)}, which "
    allowed = _IMPLEMENTATIONS.get(key.removeprefix("_").removesuffix("_internal"))
    if allowed is not None:
        asked = value.values() if isinstance(value, Mapping) else [value]
        if any(word is not None and word not in allowed for word in asked):
            raise InputError(f"{start}may fetch code and run it; use one of {', '.join(allowed)}, or remove it")
    elif key in _CODE and value:
        raise InputError(f"{start}stands for code that is not run here; remove it to build transformers' own model")
    elif key in _FETCHED and value and (key != "architecture" or "/" in str(value) or ":" in str(value)):
        raise InputError(f"{start}may fetch another model; write it out, or remove it")


def _fields(plain: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Yields (path, name, value) of every field at any depth."""
    if depth > _MOST_NESTED:
        raise InputError(f"{brief(path)} of a configuration is nested more than {_MOST_NESTED} times")
    for key, value in plain.items() if isinstance(plain, Mapping) else enumerate(plain):
        inside = f"{path}.{key}" if path else str(key)
        if isinstance(plain, Mapping):
            yield inside, str(key), value
        if isinstance(value, Mapping | list | tuple):
            yield from _fields(value, inside, depth + 1)


def _integers(value: Any) -> Iterator[int]:
    items = value if isinstance(value, list | tuple) else [value]
    yield from (int(n) for n in items if isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < 1e300)


@contextmanager
def bounded_build(name: str) -> Iterator[None]:
    """Raises InputError if a model that is built inside the context needs more memory than this host has.

    Parameters are counted when modules register them, before they are initialised and their memory is touched.
    """
    most_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_modules, size_bytes = 0, 0

    def count_parameter(_: nn.Module, __: str, parameter: nn.Parameter | None) -> None:
        nonlocal size_bytes
        if parameter is not None and parameter.device.type != "meta":
            size_bytes += parameter.nbytes
        if size_bytes > most_bytes:
            raise InputError(
                f"a model of the configuration 'hf:{name}' takes more than the {format_bytes(most_bytes)} of this host;"
                " 'pipedejavu profile --estimate' counts it without memory"
            )

    def count_module(_: nn.Module, __: str, ___: nn.Module | None) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > MOST_MODULES:
            raise InputError(f"a model of the configuration 'hf:{name}' has more than {MOST_MODULES} modules")

    handles = (
        hooks.register_module_parameter_registration_hook(count_parameter),
        hooks.register_module_module_registration_hook(count_module),
    )
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # untrusted fields may raise anything
        text = next(iter(str(error).strip().splitlines()), "")
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise InputError(f"cannot build a model of the configuration 'hf:{name}': {kind}{text}") from None
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def offline() -> Iterator[None]:
    """Disables network access of huggingface_hub inside the context."""
    constants: Any = import_module("huggingface_hub.constants")
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
