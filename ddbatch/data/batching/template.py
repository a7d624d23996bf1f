"""Render chat messages to text with a model's jinja template, under transformers' settings.

Knows what a template may call. Knows nothing about tokenizers, prompts or where a template is from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ddbatch.data.batching.columns import Fault
from ddbatch.data.batching.messages import Message

# Names under which a message's reasoning is passed; templates read the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Stands behind the text that is continued while the template renders. Its blank tells trimming.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationTag(Extension):
    """`{% generation %}` marks what a trainer learns from; for rendering it is only a scope."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """The tag's body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """jinja2's namespace without names of Python's internals, as in transformers."""

    def __init__(self, /, *given: Mapping[str, object], **attributes: object) -> None:
        for name in _dict(*given, **attributes):
            _refuse_internals(name)
        super().__init__(*given, **attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_internals(name)
        super().__setitem__(name, value)


class ChatTemplate:
    """A compiled template with the variables that are the same for every prompt of a run."""

    def __init__(self, source: str, *, variables: Mapping[str, object], now: datetime) -> None:
        """Compile; a jinja2.TemplateSyntaxError passes to the caller, who knows the file's name.

        now: what strftime_now tells, one moment for the run: a prompt must not depend on the clock.
        """

        def strftime_now(form: str) -> str:
            return now.strftime(form)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime_now
        environment.globals["namespace"] = _Namespace
        # A function: dict.update and the like would get around the sandbox's immutable values.
        environment.globals["dict"] = _dict
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] | None,
        *,
        is_continued: bool = False,
    ) -> str | Fault:
        """The prompt text up to and with the header of the turn to be generated, or up to the end
        of the last message's text if that is continued."""
        given = [_given(message) for message in messages]
        if is_continued:
            given[-1] = _marked(given[-1])
        try:
            text = self._template.render(
                {
                    # Templates ask `tools is none`; an undefined name would answer otherwise.
                    "tools": tools,
                    "documents": None,
                    **self._variables,
                    "messages": given,
                    "add_generation_prompt": not is_continued,
                }
            )
        # A template is a program of the model's maker: whatever it raises is this row's fault.
        except Exception as error:
            return Fault("template_error", f"{type(error).__name__}: {error}")
        return _cut(text, messages[-1]) if is_continued else text


def parse_template_date(value: str | None) -> datetime | None:
    """The moment of data.template_date, an ISO date or date and time; None = the run's start."""
    try:
        return None if value is None else datetime.fromisoformat(value)
    except ValueError as error:
        raise ValueError(
            f"data.template_date={value}: expected null, an ISO date like 2026-01-31 or a date "
            f"and time like 2026-01-31T12:00:00 ({error})"
        ) from error


def _given(message: Message) -> dict[str, object]:
    """A message as templates expect it: no null field, and its reasoning under the usual names.

    Parquet fills the fields that a message lacks with null, and templates print them as None.
    """
    fields = {name: field for name, field in message.items() if field is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _marked(message: Mapping[str, object]) -> dict[str, object]:
    """The message with a mark after its text, or after the last of its text parts."""
    content = message["content"]
    if isinstance(content, list):
        *parts, last = content
        return {**message, "content": [*parts, {**last, "text": last["text"] + _MARK}]}
    return {**message, "content": f"{content}{_MARK}"}


def _cut(text: str, message: Message) -> str | Fault:
    """The rendered text up to the end of the last message's own, as transformers cuts it.

    The mark ends with a blank: where that is gone, the template trims the text, and so is the
    prompt trimmed.
    """
    content = message["content"]
    said = content[-1]["text"] if isinstance(content, list) else str(content)
    start = text.rfind(_MARK.strip())
    before = text[: max(start, 0)]
    if not text.startswith(_MARK, start):
        before = before.rstrip()
    if start < 0 or not before.rstrip().endswith(said.strip()):
        return Fault(
            "template_error",
            "the template does not show the last message's text as it is, so that it cannot be "
            "continued (data.turns=continue)",
        )
    return before


def _refuse_internals(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template cannot hold {name!r}")


def _dict(*given: Mapping[str, object], **entries: object) -> dict[str, object]:
    merged: dict[str, object] = {}
    for values in (*given, entries):
        merged.update(values)
    return merged


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: jinja2's own filter writes < and > as escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
