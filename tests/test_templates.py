"""Eight template shapes: text and ids equal those of transformers' apply_chat_template."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from itertools import product
from pathlib import Path

import jinja2
import pytest
from chat_templates import (
    AGAIN,
    ANSWER,
    CALL,
    CONVERSATIONS,
    SYSTEM,
    TEMPLATES,
    TOOL,
    USER,
    Message,
)
from encoders import ids_of, make_encoder, make_folder, make_tokenizer, prompt_of, slow_twin
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from ddbatch.core import Prompt
from ddbatch.data.batching.columns import Fault
from ddbatch.data.batching.encoder import PromptEncoder
from ddbatch.data.batching.template import ChatTemplate, parse_template_date

DATE = datetime(2026, 3, 9, 8, 7, 6)
PREFIX: Message = {"role": "assistant", "content": "I <think> so & 'no'  "}

Pair = tuple[PromptEncoder, PreTrainedTokenizerFast]
GetPair = Callable[..., Pair]


class _Clock(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return DATE


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> GetPair:
    """The encoder of a shape and its twin, made once; keywords are chat_template_kwargs."""
    made: dict[str, Pair] = {}

    def get(shape: str, **kwargs: object) -> Pair:
        name = f"{shape} {kwargs}"
        if name not in made:
            template = TEMPLATES[shape]
            folder = make_folder(tmp_path_factory.mktemp("shape"), chat_template=template)
            encoder = make_encoder(folder, chat_template_kwargs=kwargs, template_date=DATE)
            made[name] = encoder, slow_twin(folder, template)
        return made[name]

    return get


@pytest.fixture(autouse=True)
def _one_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", _Clock)


def both(
    pair: Pair,
    messages: list[Message],
    tools: list[Message] | None,
    *,
    is_continued: bool = False,
    **kwargs: object,
) -> tuple[str | Fault, str | Exception]:
    """What ddbatch and transformers make of a conversation; where both give text, ids are equal."""
    encoder, twin = pair
    prompt = prompt_of(messages, tools=tools, is_continued=is_continued)
    options = {
        "tools": tools,
        "add_generation_prompt": not is_continued,
        "continue_final_message": is_continued,
        **kwargs,
    }
    ours = encoder.render(prompt)
    try:
        theirs = twin.apply_chat_template(messages, tokenize=False, **options)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        return ours, error
    if ours == theirs:
        ids = twin.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert ids_of(encoder, prompt) == ids
    return ours, theirs


def check_equal(ours: str | Fault, theirs: str | Exception) -> None:
    if isinstance(theirs, Exception):
        assert isinstance(ours, Fault), (ours, theirs)
        assert ours.code == "template_error"
        if isinstance(theirs, jinja2.TemplateError):
            assert ours.reason == f"{type(theirs).__name__}: {theirs}"
    else:
        assert ours == theirs


@pytest.mark.parametrize("shape", TEMPLATES)
def test_every_shape_renders_as_in_transformers(shape: str, pair_of: GetPair) -> None:
    texts = []
    for messages, tools in CONVERSATIONS.values():
        ours, theirs = both(pair_of(shape), messages, tools)
        check_equal(ours, theirs)
        texts += [ours] if isinstance(ours, str) else []
    assert len(texts) > len(CONVERSATIONS) // 3, "most conversations must render to mean anything"


@pytest.mark.parametrize("shape", TEMPLATES)
def test_every_shape_continues_the_last_message_as_in_transformers(
    shape: str, pair_of: GetPair
) -> None:
    endings: list[Message] = [
        PREFIX,
        {"role": "assistant", "content": "Sure:"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "  spaced\n\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"},
        {"role": "assistant", "content": "x</think>y"},
        {"role": "assistant", "content": "CONTINUE_FINAL_MESSAGE_TAG said"},
        {"role": "assistant", "content": "ok", "reasoning_content": "because"},
        {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("a", " b ")]},
    ]
    num_equal = 0
    for (messages, tools), ending in product(CONVERSATIONS.values(), endings):
        ours, theirs = both(pair_of(shape), [*messages, ending], tools, is_continued=True)
        check_equal(ours, theirs)
        num_equal += ours == theirs
    assert num_equal > len(CONVERSATIONS), "most conversations must render to mean anything"


@pytest.mark.parametrize("shape", ["qwen3", "deepseek", "llama3"])
@settings(max_examples=40)
@given(
    pieces=st.lists(st.sampled_from([" ", "\n", "a", "<think>", "</think>", "\u00e9"]), max_size=8)
)
def test_any_last_message_is_continued_as_in_transformers_or_refused(
    shape: str, pieces: list[str], pair_of: GetPair
) -> None:
    said = "".join(pieces)
    messages = [USER, {"role": "assistant", "content": said}]
    ours, theirs = both(pair_of(shape), messages, None, is_continued=True)
    if isinstance(ours, Fault) and isinstance(theirs, str):
        # Stricter: transformers is content if the text stands anywhere in the prompt.
        assert not theirs.rstrip().endswith(said.strip())
    else:
        check_equal(ours, theirs)
        if isinstance(ours, str):
            assert ours.rstrip().endswith(said.strip())


def test_a_continued_prompt_ends_with_the_text_itself(pair_of: GetPair) -> None:
    for shape in TEMPLATES:
        messages = [USER, {"role": "assistant", "content": "Once upon"}]
        text = pair_of(shape)[0].render(prompt_of(messages, is_continued=True))
        assert isinstance(text, str)
        assert text.endswith("Once upon"), shape
    fault = pair_of("deepseek")[0].render(
        prompt_of([USER, {"role": "assistant", "content": "a</think>b"}], is_continued=True)
    )
    assert isinstance(fault, Fault)
    assert "cannot be continued (data.turns=continue)" in fault.reason


def test_thinking_off_adds_an_empty_think_block_to_the_prompt(pair_of: GetPair) -> None:
    off, on = pair_of("qwen3", enable_thinking=False), pair_of("qwen3", enable_thinking=True)
    text, expected = both(off, [USER], None, enable_thinking=False)
    assert text == expected
    assert isinstance(text, str)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    plain, _ = both(on, [USER], None, enable_thinking=True)
    assert plain == text.removesuffix("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("shape", TEMPLATES)
def test_ids_hold_the_bos_of_the_template_once_and_no_other(shape: str, pair_of: GetPair) -> None:
    bos = make_tokenizer().token_to_id("<s>")
    for value in ("hello", [USER]):
        ids = ids_of(pair_of(shape)[0], value)
        assert ids.count(bos) == ("bos_token" in TEMPLATES[shape]), shape
        assert bos not in ids[1:]


def test_reasoning_is_found_under_each_of_its_names(pair_of: GetPair) -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        said = {"role": "assistant", "content": "so", name: "because"}
        result = {"role": "tool", "content": "1"}
        ours, theirs = both(pair_of("qwen3"), [USER, said, result], None)
        check_equal(ours, theirs)
        assert isinstance(ours, str)
        assert "<think>\nbecause\n</think>\n\nso" in ours


def test_special_characters_reach_the_model_as_they_are(pair_of: GetPair) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    text = pair_of("qwen3")[0].render(prompt_of([USER, call, USER], tools=[TOOL]))
    assert isinstance(text, str)
    assert '{"x": "<1> & \'2\'", "y": [1, null], "z": 1.5}' in text
    assert "x < y & 'z'" in text
    assert "hello <b>w\u00f6rld</b> & '\u4f60'" in text


def test_the_date_of_the_template_is_the_pinned_one(tmp_path: Path) -> None:
    for value in ("2026-01-31", "2026-01-31T23:59:58", "2026-01-31T23:59:58.5"):
        folder = make_folder(tmp_path, chat_template="{{ strftime_now('%Y-%m-%d %H %f') }}")
        date = parse_template_date(value)
        text = make_encoder(folder, template_date=date).render(prompt_of("x"))
        assert text == datetime.fromisoformat(value).strftime("%Y-%m-%d %H %f")
    assert parse_template_date(None) is None
    for value in ("", "today", "31.01.2026", "2026-02-30", "12:00"):
        with pytest.raises(ValueError, match=rf"data\.template_date={value}: expected null"):
            parse_template_date(value)


def test_a_template_cannot_change_what_another_row_sees() -> None:
    changes = {
        "{% set x = dict.update(shared, a=1) %}": "update",
        "{% set x = shared.update({'a': 1}) %}": "update",
        "{% set ns = namespace(_x=1) %}": "_x",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}": "__html__",
    }
    for source, named in changes.items():
        shared: dict[str, object] = {}
        template = ChatTemplate(source, variables={"shared": shared}, now=DATE)
        fault = template.render([USER], None)
        assert isinstance(fault, Fault), source
        assert named in fault.reason
        assert shared == {}
    kept = "{% set ns = namespace({'b': 1}, self=2) %}{% set ns.c = dict({'d': 3}, e=4) %}"
    template = ChatTemplate(kept + "{{ ns.b }}{{ ns.self }}{{ ns.c }}", variables={}, now=DATE)
    assert template.render([USER], None) == "12{'d': 3, 'e': 4}"


def test_a_row_is_the_same_prompt_whatever_was_rendered_before(pair_of: GetPair) -> None:
    encoder = pair_of("tracked")[0]
    prompts: list[Prompt] = [
        prompt_of(messages, tools=tools) for messages, tools in CONVERSATIONS.values()
    ]
    prompts.append(prompt_of([SYSTEM, USER, ANSWER, AGAIN, PREFIX], is_continued=True))
    first = [encoder.render(prompt) for prompt in prompts]
    assert [encoder.render(prompt) for prompt in reversed(prompts)] == first[::-1]
