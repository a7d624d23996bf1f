"""Which assistant turns of a row are generated, and the prompt of each (data.turns).

last: the final assistant turn anew. all: every assistant turn in order, each after the texts that
were generated for the earlier ones. continue: the final assistant turn goes on from its text. A
conversation that ends with another role's turn is answered. Knows nothing about templates or the
engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ddbatch.core import Key, Prompt
from ddbatch.data.batching.columns import dump_json
from ddbatch.data.batching.messages import Message

Turns = Literal["last", "all", "continue"]


def messages_to_answer(messages: Sequence[Message], turns: Turns) -> Sequence[Message]:
    """What of a row's conversation its prompts are made of; empty if there is nothing to generate.

    A final assistant turn goes, unless it is continued or (turns=all) one of many.
    """
    if turns == "all":
        return messages if _generated(messages) else ()
    if messages and _is_assistant(messages[-1]) and not is_continued(messages, turns):
        return messages[:-1]
    return messages


def is_continued(messages: Sequence[Message], turns: Turns) -> bool:
    """Whether the completion goes on from the text of the last message.

    Tool calls end a turn: one that has them is not continued but generated anew.
    """
    if turns != "continue" or not messages or not _is_assistant(messages[-1]):
        return False
    content = messages[-1].get("content")
    has_text = isinstance(content, str) or (isinstance(content, list) and len(content) > 0)
    return has_text and not messages[-1].get("tool_calls")


def num_turns(prompt: Prompt, turns: Turns) -> int:
    """How many turns of the row are generated."""
    if turns != "all" or prompt.messages_json is None:
        return 1
    return len(_generated(json.loads(prompt.messages_json)))


def prompt_for_turn(
    prompt: Prompt, turn: int, earlier_texts: Sequence[str], sample: int, turns: Turns
) -> Prompt:
    """The prompt of one turn of a row's Prompt; earlier_texts: what the turns before it became."""
    assert len(earlier_texts) == turn, f"{prompt.key}: turn {turn} after {len(earlier_texts)} texts"
    key = Key(prompt.key.row_id, turn, sample)
    if turns != "all" or prompt.messages_json is None:
        assert turn == 0, f"{key}: a row with one turn"
        return replace(prompt, key=key)
    messages = json.loads(prompt.messages_json)
    places = _generated(messages)
    assert turn < len(places), f"{key}: a row with {len(places)} turns"
    for place, text in zip(places, earlier_texts, strict=False):
        messages[place] = _answer(messages[place], text)
    return replace(prompt, key=key, messages_json=dump_json(messages[: places[turn]]))


def _generated(messages: Sequence[Message]) -> list[int]:
    """Places of the turns that turns=all generates; len(messages) is the answer to the last.

    Kept as they are: a turn with tool calls, whose results stand in the conversation, and a first
    message, before which there is nothing to answer.
    """
    places = [
        place
        for place, message in enumerate(messages)
        if place and _is_assistant(message) and not message.get("tool_calls")
    ]
    if messages and not _is_assistant(messages[-1]):
        places.append(len(messages))
    return places


def _answer(message: Message, text: str) -> Message:
    """The generated turn in place of the given one, whose other fields told of the old text."""
    name = {"name": message["name"]} if message.get("name") is not None else {}
    return {"role": message["role"], **name, "content": text}


def _is_assistant(message: Message) -> bool:
    return message.get("role") == "assistant"
