"""Conversations as text, by the template that a model's file brings.

Templates are foreign code: they run in Jinja's sandbox, which gives them nothing that changes
anything. What they may use is what transformers gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from lowbit.registry.extras import require

if TYPE_CHECKING:
    from jinja2 import Template


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The text of a conversation.

    messages: each with a role and most often with a content: a text, None, which is an empty one,
    or parts of text, as OpenAI's clients send them, which become lines. variables: what else the
    template may ask for. ValueError: a message without a role, or with a content that is no text,
    or the template has an error or raises one, with its message.
    """
    plain = [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]
    try:
        return _compiled(template).render(messages=plain, **variables)
    except Exception as error:  # a template may raise anything
        raise ValueError(f"the chat template: {error or type(error).__name__}") from error


def _plain(name: str, message: Any) -> dict[str, Any]:
    """A message whose content, if it has one, is a text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} is {message!r:.200}; it needs a role and a content")
    if "content" not in message:
        return dict(message)
    content = message["content"]
    if content is None:
        content = ""
    elif isinstance(content, list | tuple):
        content = "\n".join(_text(f"{name}.content[{i}]", part) for i, part in enumerate(content))
    elif not isinstance(content, str):
        raise ValueError(f"{name}.content is {content!r:.200}; it must be a text, or parts of text")
    return {**message, "content": content}


def _text(name: str, part: Any) -> str:
    """The text of a part of a message."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str) or part.get("type", "text") not in ("text", "input_text"):
        raise ValueError(f"{name} is {part!r:.200}; only parts of text are read")
    return text


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    require("a chat template", "lm", "jinja2")
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what a model is trained on; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    # Jinja's own escapes what HTML would.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
