"""Turns of a conversation: which are generated, and what the prompt of each one is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddbatch.core import Key, Prompt, Rejected
from ddbatch.data.batching.columns import Columns, Row
from ddbatch.data.batching.prompts import to_prompt
from ddbatch.data.batching.turns import Turns, num_turns, prompt_for_turn

COLUMNS = Columns("messages", "messages")
MODES: tuple[Turns, ...] = ("last", "all", "continue")

Message = dict[str, object]


def message(letter: str, text: str = "t") -> Message:
    """u user, s system, t tool, a assistant, c assistant with tool calls."""
    if letter == "c":
        return {"role": "assistant", "content": text, "tool_calls": [{"function": {"name": text}}]}
    role = {"u": "user", "s": "system", "t": "tool", "a": "assistant"}[letter]
    return {"role": role, "content": text}


def conversation(letters: str) -> list[Message]:
    return [message(letter, f"{letter}{place}") for place, letter in enumerate(letters)]


def read(messages: object, turns: Turns) -> Prompt | Rejected:
    return to_prompt(Row({"messages": messages}, "{}"), Key(7, 0, 0), COLUMNS, turns=turns)


def contents(prompt: Prompt) -> list[object]:
    assert prompt.messages_json is not None
    return [turn["content"] for turn in json.loads(prompt.messages_json)]


def all_prompts(letters: str, turns: Turns = "all") -> list[str]:
    """The prompt of each turn as contents in a row; the generated text of turn n is gn."""
    prompt = read(conversation(letters), turns)
    if isinstance(prompt, Rejected):
        return [prompt.code]
    texts = [f"g{turn}" for turn in range(num_turns(prompt, turns))]
    prompts = [prompt_for_turn(prompt, turn, texts[:turn], 3, turns) for turn in range(len(texts))]
    assert [turn.key for turn in prompts] == [Key(7, turn, 3) for turn in range(len(texts))]
    return [" ".join(map(str, contents(turn))) for turn in prompts]


@pytest.mark.parametrize(
    ("letters", "prompts"),
    [
        ("u", ["u0"]),
        ("ua", ["u0"]),
        ("sua", ["s0 u1"]),
        ("uaua", ["u0", "u0 g0 u2"]),
        ("uauau", ["u0", "u0 g0 u2", "u0 g0 u2 g1 u4"]),
        ("ucta", ["u0 c1 t2"]),
        ("uctauctta", ["u0 c1 t2", "u0 c1 t2 g0 u4 c5 t6 t7"]),
        ("uct", ["u0 c1 t2"]),
        ("uauc", ["u0"]),
        ("uaa", ["u0", "u0 g0"]),
        ("auaua", ["a0 u1", "a0 u1 g0 u3"]),
        ("sa", ["s0"]),
        ("a", ["empty_prompt"]),
        ("uc", ["empty_prompt"]),
        ("c", ["empty_prompt"]),
        ("", ["empty_prompt"]),
    ],
)
def test_all_regenerates_each_assistant_turn_after_the_generated_ones(
    letters: str, prompts: list[str]
) -> None:
    assert all_prompts(letters) == prompts


@pytest.mark.parametrize(
    ("letters", "last", "continued"),
    [
        ("u", "u0", None),
        ("ua", "u0", "u0 a1"),
        ("uaua", "u0 a1 u2", "u0 a1 u2 a3"),
        ("uct", "u0 c1 t2", None),
        ("uc", "u0", None),
        ("a", "empty_prompt", "a0"),
        ("", "empty_prompt", None),
    ],
)
def test_last_drops_and_continue_keeps_a_final_assistant_turn(
    letters: str, last: str, continued: str | None
) -> None:
    assert all_prompts(letters, "last") == [last]
    assert all_prompts(letters, "continue") == [last if continued is None else continued]
    prompt = read(conversation(letters), "continue")
    assert isinstance(prompt, Rejected) or prompt.is_continued == (continued is not None)


def test_a_final_turn_without_text_is_not_continued() -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "so"}]}
    empty = {"role": "assistant", "content": ""}
    for final, is_continued in ((parts, True), (empty, True), ({**parts, "content": []}, False)):
        prompt = read([message("u"), final], "continue")
        assert isinstance(prompt, Prompt)
        assert prompt.is_continued == is_continued
        assert len(contents(prompt)) == 1 + is_continued
    for turns in ("last", "all"):
        prompt = read([message("u"), empty], turns)
        assert isinstance(prompt, Prompt)
        assert not prompt.is_continued


def test_a_generated_turn_keeps_who_speaks_and_nothing_of_the_old_text() -> None:
    old = {"role": "assistant", "name": "Bo", "content": "old", "reasoning_content": "old too"}
    prompt = read([message("u"), old, message("u")], "all")
    assert isinstance(prompt, Prompt)
    later = prompt_for_turn(prompt, 1, ["new \u00e9"], 0, "all")
    assert later.messages_json is not None
    said = json.loads(later.messages_json)[1]
    assert said == {"role": "assistant", "name": "Bo", "content": "new \u00e9"}


def test_a_text_or_token_prompt_has_one_turn() -> None:
    key = Key(1, 0, 0)
    for prompt in (Prompt(key, text="x"), Prompt(key, token_ids=(1, 2))):
        for turns in MODES:
            assert num_turns(prompt, turns) == 1
            made = prompt_for_turn(prompt, 0, (), 2, turns)
            assert (made.key, made.text, made.token_ids) == (
                Key(1, 0, 2),
                prompt.text,
                prompt.token_ids,
            )


@given(st.text("usatc", max_size=9), st.sampled_from(MODES))
def test_the_turns_of_any_conversation_follow_from_each_other(letters: str, turns: Turns) -> None:
    prompts = all_prompts(letters, turns)
    if prompts == ["empty_prompt"]:
        return
    # Slow twin: walk the conversation and answer where an assistant speaks.
    said: list[str] = []
    expected: list[str] = []
    for place, letter in enumerate(letters):
        is_final = place == len(letters) - 1
        if letter == "a" and place and (turns == "all" or (is_final and turns == "last")):
            expected.append(" ".join(said))
            said.append(f"g{len(expected) - 1}")
        elif letter == "c" and is_final and turns != "all":
            expected.append(" ".join(said))
        else:
            said.append(f"{letter}{place}")
    is_answered = letters[-1] not in "ac" or (turns == "continue" and letters[-1] == "a")
    assert prompts == [*expected, *([" ".join(said)] if is_answered else [])]
