"""The served model's chat template, rendered in a sandbox as the engine's own library renders it.

The environment is that of transformers' ``apply_chat_template``: trimmed blocks, loop controls, ``tojson`` without
HTML escapes, ``raise_exception`` and ``strftime_now``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvduplex_router.tokens.errors import NotRenderableError

__all__ = ["ChatTemplate"]

Message = Mapping[str, Any]

_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class ChatTemplate:
    """A compiled template.

    Args:
        source: Its text.
        specials: ``bos_token`` and the like, by name.

    Raises:
        ValueError: The text is not a template.

    Attributes:
        takes_parts: Whether it goes through the parts of a message's content; engines hand all content to such
            templates as lists of parts.
    """

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of the chat template: {error.message}") from None
        self._specials = dict(specials)
        self.takes_parts = any(map(_over_content, environment.parse(source).find_all(nodes.For)))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Raises:
            NotRenderableError: The template refuses the messages.
        """
        try:
            return self._template.render(
                {
                    **self._specials,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": generation_prompt,
                    **(arguments or {}),
                }
            )
        except _TEMPLATE_FAULTS as error:
            raise NotRenderableError("template", f"the chat template: {type(error).__name__}") from None


def _over_content(loop: nodes.For) -> bool:
    """Whether a loop's items are those of a message's content."""
    match loop.iter:
        case (
            nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")) | nodes.Name(name="content")
        ):
            return True
        case _:
            return False


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
