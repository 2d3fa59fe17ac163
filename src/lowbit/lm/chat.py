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

    messages: each with a role and most often with a content. variables: what else the template
    may ask for. ValueError: a message without a role, or the template has an error or raises one,
    with its message.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] is {message!r}; it needs a role and a content")
    try:
        return _compiled(template).render(messages=list(messages), **variables)
    except Exception as error:  # a template may raise anything
        raise ValueError(f"the chat template: {error or type(error).__name__}") from error


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
