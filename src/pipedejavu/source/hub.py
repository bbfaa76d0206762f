"""The Hugging Face hub: names on it, and whether it can be reached.

Without a network huggingface_hub tries each file again for minutes. Here the connection is tried once, for some
seconds, and without one only the local cache is read.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib import error, request

from pipedejavu.facts import InputError
from pipedejavu.source.hf_config import offline

CONNECT_S = 5.0
"""Longest wait for the hub's first answer."""


def check_source(text: str, what: str) -> None:
    """Raises InputError if a text is a path that does not exist, or a name on the hub that cannot be read from here."""
    path = Path(text).expanduser()
    if path.exists():
        return
    if is_path(text):
        raise InputError(f"cannot read the {what} '{text}': there is no such file or folder")
    if not _is_cached(text) and not is_reachable():
        raise InputError(
            f"cannot read the {what} '{text}': there is no such file or folder, the hub ({_constants().ENDPOINT}) does"
            " not answer, and the local cache does not hold it; give a folder, or download it where there is a network"
        )


def is_path(text: str) -> bool:
    """Whether a text can only be a path: names on the hub are NAME or OWNER/NAME."""
    has_suffix = text.endswith((".safetensors", ".json", ".bin", ".pt", ".pth"))
    return has_suffix or text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") > 1


@contextmanager
def hub_access() -> Iterator[None]:
    """Reads only the local cache inside the context if the hub does not answer."""
    if is_reachable():
        yield
        return
    with offline():
        yield


@cache
def is_reachable() -> bool:
    """Whether the hub answers within some seconds; any answer counts."""
    if _constants().HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []
    # The system's name lookup has no timeout of its own, so it runs in a thread.
    caller = threading.Thread(target=lambda: answers.append(_answers(_constants().ENDPOINT)), daemon=True)
    caller.start()
    caller.join(CONNECT_S)
    return answers == [True]


def _answers(address: str) -> bool:
    try:
        with request.urlopen(request.Request(address, method="HEAD"), timeout=CONNECT_S):
            return True
    except error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


def _is_cached(name: str) -> bool:
    folder = Path(_constants().HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    return folder.is_dir()


def _constants() -> Any:
    try:
        return import_module("huggingface_hub.constants")
    except ImportError:
        raise InputError("names on the hub need transformers; pip install 'pipedejavu[hf]'") from None
