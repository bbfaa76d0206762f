"""Tokenised data in the user's cache folder: written once, under a key of its contents, and mapped into memory."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipedejavu.data.document import Document
from pipedejavu.facts import InputError
from pipedejavu.facts.file import fresh_path, read_regular

_FORMAT = 2
"""Part of the key; another layout of the files has another number."""


class TokenTable(NamedTuple):
    """Tokens of all documents one after another, mapped from files."""

    tokens: NDArray[Any]
    answers: NDArray[np.bool_] | None
    """Which tokens are part of an answer; None if all tokens count."""
    starts: NDArray[np.int64]
    """The first token of each document, and the number of all tokens."""


def cache_folder() -> Path:
    """Returns the folder of tokenised data: in XDG_CACHE_HOME if that is set, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipedejavu" / "data"


def cache_path(key: Mapping[str, object]) -> Path:
    """Returns the folder of a key."""
    text = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
    return cache_folder() / sha256(text.encode()).hexdigest()[:32]


def open_table(path: Path) -> TokenTable | None:
    """Returns the table in a folder of the cache; None if there is none, or it is not complete."""
    with suppress(OSError, ValueError, KeyError):
        about = json.loads(read_regular(path / "about.json"))
        tokens: NDArray[Any] = np.memmap(path / "tokens.bin", dtype=about["dtype"], mode="r")
        if len(tokens) != about["tokens"]:
            return None
        starts: NDArray[np.int64] = np.memmap(path / "starts.bin", dtype=np.int64, mode="r")
        if not about["has_answers"]:
            return TokenTable(tokens, None, starts)
        answers: NDArray[np.bool_] = np.memmap(path / "answers.bin", dtype=np.bool_, mode="r")
        return TokenTable(tokens, answers, starts) if len(answers) == len(tokens) else None
    return None


def write_table(path: Path, documents: Iterable[Document], vocabulary: int) -> None:
    """Writes documents under a fresh name and renames the folder, so that readers see all of it or nothing."""
    temporary = fresh_path(path)
    try:
        temporary.mkdir(parents=True)
        _write(temporary, documents, np.dtype(_narrowest(vocabulary)))
        if path.exists() and open_table(path) is None:  # left incomplete by a damaged disk
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # another process was faster, with the same contents
            temporary.rename(path)
    except OSError as error:
        raise InputError(
            f"cannot write tokens to {path.parent}: {error.strerror}; make room there, or set XDG_CACHE_HOME to"
            " another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: Path, documents: Iterable[Document], dtype: np.dtype[Any]) -> None:
    starts, total, has_answers = [0], 0, False
    with (folder / "tokens.bin").open("xb") as tokens, (folder / "answers.bin").open("xb") as answers:
        for ids, is_answer, is_ended in documents:
            # bytes are token ids already; numpy would read them as one text
            row = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.asarray(ids, np.int64)
            tokens.write(row.astype(dtype).tobytes())
            total += len(row)
            if is_ended:
                starts.append(total)
            if is_answer is not None:
                has_answers = True
                answers.write(np.asarray(is_answer, np.bool_).tobytes())
    (folder / "starts.bin").write_bytes(np.asarray(starts, np.int64).tobytes())
    about = {"dtype": dtype.name, "tokens": total, "has_answers": has_answers}
    (folder / "about.json").write_text(json.dumps(about))


def _narrowest(vocabulary: int) -> str:
    """Returns the smallest type that holds all ids."""
    return "uint8" if vocabulary <= 1 << 8 else "uint16" if vocabulary <= 1 << 16 else "uint32"
