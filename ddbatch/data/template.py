"""Render chat messages to text with a model's jinja template, under transformers' settings.

Knows what a template may call. Knows nothing about tokenizers, prompts or where a template is from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ddbatch.data.columns import Fault

Message = Mapping[str, object]


class _GenerationTag(Extension):
    """`{% generation %}` marks what a trainer learns from; for rendering it is only a scope."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """The tag's body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


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
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(self, messages: Sequence[Message], tools: Sequence[object] | None) -> str | Fault:
        """The prompt text up to and with the header of the turn to be generated."""
        # Parquet fills the fields that a message lacks with null, and templates print them as None.
        given = [
            {name: field for name, field in message.items() if field is not None}
            for message in messages
        ]
        try:
            return self._template.render(
                {
                    # Templates ask `tools is none`; an undefined name would answer otherwise.
                    "tools": tools,
                    "documents": None,
                    **self._variables,
                    "messages": given,
                    "add_generation_prompt": True,
                }
            )
        # A template is a program of the model's maker: whatever it raises is this row's fault.
        except Exception as error:
            return Fault("template_error", f"{type(error).__name__}: {error}")


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
