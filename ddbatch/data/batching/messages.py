"""Chat messages and tools as rows bring them: lists, or JSON strings of lists; checked.

Knows which messages and tools can be rendered at all. Roles and fields pass as they are: what they
mean is the template's matter. Knows nothing about turns or templates.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddbatch.data.batching.columns import Fault, dump_json, holds_surrogates, kind_of, load_json

Message = Mapping[str, object]

_FORM = 'expected: {"role": "user", "content": "..."}'


def read_messages(value: object, where: str) -> list[Message] | Fault:
    """The messages of a conversation that can be rendered; `where` names the column."""
    messages = _read_list(value, where)
    if isinstance(messages, Fault):
        return messages
    if not messages:
        return Fault("empty_prompt", f"{where} has no messages to answer")
    for position, message in enumerate(messages):
        fault = _fault_of_message(message, f"{where}[{position}]")
        if fault is not None:
            return fault
    if holds_surrogates(messages):
        return Fault("bad_text", f"{where} holds a lone surrogate")
    return [message for message in messages if isinstance(message, dict)]


def read_tools(value: object, where: str) -> str | Fault | None:
    """The tools as JSON; None where the row has none."""
    if value is None:
        return None
    tools = _read_list(value, where)
    if isinstance(tools, Fault):
        return tools
    for position, tool in enumerate(tools):
        if not isinstance(tool, dict):
            return Fault("wrong_type", f"{where}[{position}] is {kind_of(tool)}, not an object")
    if holds_surrogates(tools):
        return Fault("bad_text", f"{where} holds a lone surrogate")
    return dump_json(tools)


def _read_list(value: object, where: str) -> list[object] | Fault:
    """A list as it is in a JSON string; one of a column without the nulls of its objects.

    Parquet gives every object of a list the fields of all, filled with null, and a template would
    print them as None. What a JSON string holds was written on purpose.
    """
    if isinstance(value, str):
        value = load_json(value)
        if isinstance(value, Fault):
            return Fault(value.code, f"{where} is a string that is {value.reason}")
    else:
        value = _without_null_fields(value)
    if not isinstance(value, list):
        return Fault("wrong_type", f"{where} is {kind_of(value)}, not a list")
    return value


def _without_null_fields(value: object) -> object:
    if isinstance(value, dict):
        return {
            name: _without_null_fields(field) for name, field in value.items() if field is not None
        }
    return [_without_null_fields(item) for item in value] if isinstance(value, list) else value


def _fault_of_message(message: object, where: str) -> Fault | None:
    """A message has a string role and a string content; null content only beside tool calls."""
    if not isinstance(message, dict):
        return Fault("wrong_type", f"{where} is {kind_of(message)}, not an object")
    role, content = message.get("role"), message.get("content")
    if role is None:
        if "from" in message and "value" in message:
            reason = f"{where} has no role but from and value (the ShareGPT form); {_FORM}"
            return Fault("missing_field", reason)
        return Fault("missing_field", f"{where}.role is absent or null")
    if not isinstance(role, str):
        return Fault("wrong_type", f"{where}.role is {kind_of(role)}, not a string")
    if content is None:
        if message.get("tool_calls"):
            return None
        return Fault("missing_field", f"{where}.content is absent or null, without tool_calls")
    if isinstance(content, list):
        if all(_is_text_part(part) for part in content):
            return None
        return Fault("unsupported_content", f"{where}.content has a part that is not text")
    if not isinstance(content, str):
        return Fault("wrong_type", f"{where}.content is {kind_of(content)}, not a string")
    return None


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )
