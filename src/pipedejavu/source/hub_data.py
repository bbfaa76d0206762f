"""Data sets of the Hugging Face hub: `datasets` fetches one once, into a folder of the cache that runs read it from."""

import os
import shutil
from importlib import import_module
from pathlib import Path

from pipedejavu.data.data_choice import HUB, DataChoice, path_of
from pipedejavu.facts import InputError
from pipedejavu.facts.printable import tell
from pipedejavu.source.hub import is_reachable


def fetch_data(choice: DataChoice) -> None:
    """Fetches what a choice names on the hub, if it is not in the cache; raises InputError if that fails."""
    for name in (choice.name, choice.evaluation):
        if name is not None and name.startswith(HUB) and not path_of(name).exists():
            _fetch(name, path_of(name))


def _fetch(name: str, folder: Path) -> None:
    data, _, split = name.removeprefix(HUB).partition(":")
    try:
        library = import_module("datasets")
    except ImportError:
        raise InputError(
            f"data on the hub, as '{name}', needs `datasets`; pip install datasets, or give a folder that it has saved"
        ) from None
    if not is_reachable():
        raise InputError(
            f"cannot read the data set '{data}': the hub does not answer, and the cache does not hold it; give a file"
            " or folder, or fetch it where there is a network"
        )
    tell(f"fetching the split '{split or 'train'}' of the data set '{data}'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        library.load_dataset(data, split=split or "train").save_to_disk(str(part))
        part.rename(folder)
    except Exception as error:  # of the library, of its network, or of the disk
        shutil.rmtree(part, ignore_errors=True)
        if folder.exists():  # another process was faster
            return
        text = str(error).strip().partition("\n")[0]
        raise InputError(f"cannot read the data set '{data}': {text or type(error).__name__}") from None
