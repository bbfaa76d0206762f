"""A chat as text, by the template that comes with a tokenizer, and which characters of it are answers."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from pipedejavu.facts import InputError

Messages = Sequence[Mapping[str, Any]]
_REFUSED = "the chat template refuses a conversation: {}; give conversations as the template expects them"


class ChatTemplate:
    """A Jinja template of conversations, rendered in a sandbox as `transformers` does."""

    def __init__(self, text: str, tokens: Mapping[str, str]):
        """`tokens` are the special tokens that a template may name, such as bos_token."""
        self.text, self.tokens = text, dict(tokens)

    def render(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Returns a conversation as text, and the spans of its answers: the first character and the one after."""
        whole, spans = self._text(messages), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:number], add_generation_prompt=True)
            after = self._text(messages[: number + 1])
            if not after.startswith(before) or not whole.startswith(after):
                raise InputError(
                    "the chat template renders the beginning of a conversation in another way than the whole, so the"
                    " answers cannot be told apart; write prompt and completion instead of messages"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _text(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.tokens
            )
        except (TemplateError, TypeError, AttributeError) as error:
            raise InputError(_REFUSED.format(error)) from None
        return text

    @cached_property
    def _template(self) -> Any:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise InputError("chats need the package jinja2; pip install 'pipedejavu[text]'") from None

        def refuse(text: str) -> NoReturn:
            raise TemplateError(text)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.text)
        except TemplateError as error:
            raise InputError(f"the chat template cannot be read: {error}; put back the tokenizer's files") from None
