"""Templates of conversations: what they may use, and what becomes of their errors."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

pytest.importorskip("jinja2")

from lowbit.lm.chat import render

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}\n  {% if m.role %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
         "Hi\n"),
        ("{% for m in messages * 3 %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}",
         "x"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}!",
         "Hi!"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ extra }}", "27"),
    ],
)  # fmt: skip
def test_what_templates_use(template: str, text: str) -> None:
    assert render(template, MESSAGES, extra=7) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "the chat template: no system role"),
        ("{% if %}", "the chat template: "),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 'a' + none }}", "the chat template: .*str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(3) }}", "the chat template: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "the chat template: .*unsafe"),
        ("{% for i in range(1000000000) %}{% endfor %}", "the chat template: Range too big"),
    ],
)
def test_a_template_that_raises(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(template, MESSAGES)


@pytest.mark.parametrize("message", [{"content": "Hi"}, {"role": 3, "content": "Hi"}, "Hi"])
def test_messages_have_roles(message: Any) -> None:
    with pytest.raises(ValueError, match=r"messages\[1\] is .* needs a role"):
        render("", [*MESSAGES, message])


@pytest.mark.parametrize(("content", "text"), [
    (None, "[]"), ("Hi", "[Hi]"), ([], "[]"), ([{"type": "text", "text": "a"}], "[a]"),
    ([{"type": "text", "text": "a"}, {"text": "b"}, "c"], "[a\nb\nc]"),
])  # fmt: skip
def test_contents_as_clients_send_them(content: Any, text: str) -> None:
    message = {"role": "assistant", "content": content, "tool_calls": []}
    assert render("{% for m in messages %}[{{ m.content }}]{% endfor %}", [message]) == text
    assert message["content"] is content


@pytest.mark.parametrize(("content", "name"), [
    (3, "content"), ({"text": "a"}, "content"),
    ([{"type": "image_url", "image_url": {"url": "x"}}], r"content\[0\]"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": None}], r"content\[1\]"),
    ([None], r"content\[0\]"),
])  # fmt: skip
def test_a_content_that_is_no_text_is_named(content: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"messages\[0\]\.{name} is .*text"):
        render("{{ messages[0].content }}", [{"role": "user", "content": content}])
