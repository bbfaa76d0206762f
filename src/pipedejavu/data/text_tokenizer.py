"""Tokenizers: a text as token ids, each with the characters that it stands for.

Bytes for models without a tokenizer, or a tokenizer.json read by the `tokenizers` package, with the end token and the
chat template of the files beside it.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipedejavu.data.chat_template import ChatTemplate
from pipedejavu.facts import InputError, read_file

_END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]", "<|eot_id|>")
"""Usual end tokens, for a tokenizer that does not name its own."""
_NUM_BYTES = 256


class Tokens(NamedTuple):
    """A tokenised text."""

    ids: Sequence[int]
    spans: Sequence[tuple[int, int]]
    """First character of each token, and the one after its last."""


class TextTokenizer(Protocol):
    """Turns text into token ids."""

    name: str
    vocabulary: int
    """One more than the highest token id."""
    end: int
    """The token after a document."""
    digest: str
    """A hash of all that decides about the tokens."""
    body_digest: str
    """A hash of what decides about the ids of a text."""
    template: ChatTemplate | None

    def ids(self, text: str) -> Sequence[int]:
        """Returns the token ids of a text, without special tokens around it."""
        ...

    def encode(self, text: str) -> Tokens:
        """Returns the token ids of a text and the characters that they stand for."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as token ids; the byte 0 separates documents."""

    name, vocabulary, end = "bytes", _NUM_BYTES, 0
    digest = body_digest = "bytes"
    template: ChatTemplate | None = None

    def ids(self, text: str) -> Sequence[int]:
        """Returns the bytes of a text."""
        return text.encode()

    def encode(self, text: str) -> Tokens:
        """Returns the bytes of a text, each with its character."""
        return Tokens(text.encode(), [(n, n + 1) for n, character in enumerate(text) for _ in character.encode()])


class FileTokenizer:
    """The tokenizer of a tokenizer.json."""

    def __init__(self, path: Path):
        self.name = str(path)
        body = read_file(path)
        settings = _read_settings(path.parent / "tokenizer_config.json")
        self._tokenizer = _open(body, path)
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise InputError(f"{path} has an empty vocabulary; give the tokenizer of the model")
        self.vocabulary = 1 + max(ids.values())
        self.end = _end_token(settings, ids, path)
        self.template = _read_template(settings, path.parent)
        self.body_digest = sha256(body).hexdigest()
        about = {"settings": settings, "template": self.template.text if self.template else None}
        self.digest = sha256(body + json.dumps(about, sort_keys=True).encode()).hexdigest()

    def ids(self, text: str) -> Sequence[int]:
        """Returns the token ids of a text, without special tokens around it."""
        return self.encode(text).ids

    def encode(self, text: str) -> Tokens:
        """Returns the token ids of a text and the characters that they stand for."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return Tokens(encoding.ids, encoding.offsets)


def find_tokenizer(chosen: str | None, model_folder: str | None, *, is_zoo: bool) -> TextTokenizer:
    """Returns the tokenizer to use: the chosen one, else that in the model's folder, else bytes for a zoo model."""
    for named in (chosen, model_folder):
        if named is None:
            continue
        path = Path(named) / "tokenizer.json" if Path(named).is_dir() else Path(named)
        if path.name.endswith(".json") and path.is_file():
            return FileTokenizer(path)
        if chosen is not None:
            raise InputError(f"--tokenizer is {chosen}, which has no tokenizer.json; give that file or its folder")
    if is_zoo:
        return ByteTokenizer()
    raise InputError(
        f"the text is to be tokenised as the model expects, but {model_folder or 'its folder'} has no tokenizer.json;"
        " give one with --tokenizer"
    )


def check_vocabulary(tokenizer: TextTokenizer, vocabulary: int, needs_special: bool = False) -> None:
    """Raises InputError if a tokenizer has more ids than the model's embedding has rows for data."""
    if tokenizer.vocabulary > vocabulary:
        rest = ", one of which is the model's own mask or start token" if needs_special else ""
        raise InputError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocabulary} token ids, and the model's embedding has"
            f" {vocabulary + needs_special}{rest}; give the tokenizer that belongs to the model"
        )


def _open(body: bytes, path: Path) -> Any:
    try:
        package = import_module("tokenizers")
    except ImportError:
        raise InputError(f"{path} needs the package tokenizers; pip install 'pipedejavu[text]'") from None
    try:
        return package.Tokenizer.from_str(body.decode())
    except Exception as error:  # tokenizers raises Exception itself
        raise InputError(f"{path} is no tokenizer: {error}; give a tokenizer.json as `tokenizers` writes it") from None


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(read_file(path))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}; put back the file of the tokenizer") from None
    return settings if isinstance(settings, dict) else {}


def _end_token(settings: Mapping[str, Any], ids: Mapping[str, int], path: Path) -> int:
    named = settings.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    for name in (text, *_END_NAMES):
        if isinstance(name, str) and name in ids:
            return ids[name]
    raise InputError(
        f"{path} has no end token to put between documents: none of {', '.join(_END_NAMES)}; name it as eos_token in"
        " tokenizer_config.json beside it"
    )


def _read_template(settings: Mapping[str, Any], folder: Path) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    text = read_file(file).decode() if file.is_file() else settings.get("chat_template")
    if isinstance(text, list):  # several, by name
        text = next((t.get("template") for t in text if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(text, str):
        return None
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(name)
        tokens[name] = token.get("content", "") if isinstance(token, dict) else token or ""
    return ChatTemplate(text, tokens)
