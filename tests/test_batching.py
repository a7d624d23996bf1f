"""Prompts to ids and back: BOS once, long prompts, every refusal named (shapes: test_templates)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from chat_templates import CONVERSATIONS, GEMMA, LLAMA3, QWEN2, QWEN3
from encoders import (
    VOCAB_SIZE,
    ids_of,
    make_encoder,
    make_folder,
    make_tokenizer,
    prompt_of,
    slow_twin,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ddbatch.core import Key, Rejected, RowSampling
from ddbatch.data.batching.columns import Columns
from ddbatch.data.batching.encoder import Encoded, OnLong, PromptEncoder

REAL = Path(__file__).parents[2] / "shared" / "models" / "smollm2-135m-instruct"

TURNS = [
    {"role": "user", "content": "  hello <b>w\u00f6rld</b> & '\u4f60' \n"},
    {"role": "assistant", "content": "lo and behold", "name": None},
    {"role": "user", "content": "again <|end|> then\n\n  more"},
]


def fault_of(
    encoder: PromptEncoder,
    value: object,
    *,
    max_prompt_len: int = 4096,
    vocab_size: int = VOCAB_SIZE,
    on_long: OnLong = "reject",
) -> Rejected:
    result = encoder.encode(
        prompt_of(value), vocab_size=vocab_size, max_prompt_len=max_prompt_len, on_long=on_long
    )
    assert isinstance(result, Rejected), result
    assert (result.key, result.user_id) == (Key(5, 0, 0), "u")
    return result


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_any_text_renders_to_the_ids_of_apply_chat_template(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-text"
    encoder = make_encoder(make_folder(folder, chat_template=LLAMA3))
    messages = [{"role": "user", "content": content} for content in contents]
    expected = slow_twin(folder, LLAMA3).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids_of(encoder, messages) == expected


@pytest.mark.shared
@pytest.mark.skipif(not REAL.exists(), reason="needs the models of ../shared")
def test_a_real_model_folder_gives_the_ids_of_transformers() -> None:
    encoder = make_encoder(REAL)
    twin = PreTrainedTokenizerFast.from_pretrained(REAL)
    for messages in (TURNS, [{"role": "system", "content": "Be brief."}, TURNS[0]]):
        expected = twin.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        ids = encoder.encode(
            prompt_of(messages), vocab_size=49152, max_prompt_len=999, on_long="reject"
        )
        assert ids == Encoded(tuple(expected))
    assert encoder.eos_token_id == twin.eos_token_id


def test_the_bos_token_appears_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template=LLAMA3)
    bos = make_tokenizer().token_to_id("<s>")
    for template, value in (("auto", "hello"), ("none", "hello"), ("none", "<s>hello")):
        ids = ids_of(make_encoder(folder, template), value)
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_a_text_prompt_is_one_user_turn_and_the_system_prompt_comes_first(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template=QWEN2)
    plain, system = make_encoder(folder), make_encoder(folder, system_prompt="Be brief.")
    user = {"role": "user", "content": "hello"}
    brief, own = ({"role": "system", "content": text} for text in ("Be brief.", "Own."))
    assert ids_of(plain, "hello") == ids_of(plain, [user])
    assert ids_of(system, "hello") == ids_of(plain, [brief, user])
    assert ids_of(system, [own, user]) == ids_of(plain, [own, user])
    with pytest.raises(ValueError, match=r"data.system_prompt=.*token ids"):
        ids_of(system, (1, 2))


def test_template_variables_come_from_chat_template_kwargs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template=QWEN3)
    encoder = make_encoder(folder, chat_template_kwargs={"enable_thinking": False})
    text, tail = encoder.render(prompt_of("hi")), "<think>\n\n</think>\n\n"
    assert isinstance(text, str)
    assert text.endswith("hi<|im_end|>\n<|im_start|>assistant\n" + tail)
    assert make_encoder(folder).render(prompt_of("hi")) == text.removesuffix(tail)
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ValueError, match=rf"data.chat_template_kwargs=.*{name} is set"):
            make_encoder(folder, chat_template_kwargs={name: 1})


def test_a_row_that_cannot_be_encoded_is_rejected_with_its_code(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template=GEMMA)
    chat, raw = make_encoder(folder), make_encoder(folder, "none")
    refused = fault_of(chat, [{"role": "tool", "content": "x"}])
    assert refused.code == "template_error"
    assert refused.reason == "TemplateError: Conversation roles must alternate"
    chatml = make_encoder(make_folder(tmp_path / "chatml", chat_template=QWEN2))
    assert fault_of(chatml, [{"role": "user"}]).code == "template_error"
    assert fault_of(raw, "a\ud800").code == "bad_text"
    assert fault_of(raw, ()).code == "empty_prompt"
    empty = make_encoder(make_folder(tmp_path / "no-bos", adds_bos=False, chat_template="{#- -#}"))
    assert fault_of(empty, "x").code == "empty_prompt"
    for ids in ((0, 10), (-1,), (2**70,)):
        assert fault_of(raw, ids, vocab_size=10).code == "token_out_of_range"
    assert fault_of(raw, (0, 10), vocab_size=10).reason == "token 10 at position 1 is outside 0..9"


def test_a_long_prompt_is_rejected_or_loses_its_head(tmp_path: Path) -> None:
    encoder = make_encoder(make_folder(tmp_path))
    ids = ids_of(encoder, "hello there all")
    for value in ("hello there all", tuple(ids)):
        fault = fault_of(encoder, value, max_prompt_len=len(ids) - 1)
        assert fault.code == "prompt_too_long"
        assert fault.reason == f"{len(ids)} tokens, the limit is {len(ids) - 1}"
        for limit in (1, len(ids) - 1, len(ids)):
            cut = encoder.encode(
                prompt_of(value),
                vocab_size=VOCAB_SIZE,
                max_prompt_len=limit,
                on_long="truncate_left",
            )
            assert cut == Encoded(tuple(ids[-limit:]), num_dropped=len(ids) - limit)
    for limit, cut_to in ((len(ids) - 1, 2), (len(ids), 2)):
        cut = encoder.encode(
            prompt_of("hello there all"),
            vocab_size=VOCAB_SIZE,
            max_prompt_len=limit,
            cut_to=cut_to,
            on_long="truncate_left",
        )
        num_dropped = 0 if limit == len(ids) else len(ids) - cut_to
        assert cut == Encoded(tuple(ids[num_dropped:]), num_dropped)


def test_many_prompts_are_encoded_as_one_by_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template=QWEN3)
    prompts = [
        replace(prompt_of(value, tools=tools), key=Key(row_id, 0, 0))
        for row_id, (value, tools) in enumerate(
            [
                *CONVERSATIONS.values(),
                ((1, 2, 3), None),
                ((1, VOCAB_SIZE), None),
                ("x" * 60, None),
                ("y\ud800", None),
                ((), None),
                *((f"text {number}", None) for number in range(300)),
            ]
        )
    ]
    limits = {"vocab_size": VOCAB_SIZE, "max_prompt_len": 60, "on_long": "truncate_left"}
    cut_to = [row_id % 60 + 1 for row_id in range(len(prompts))]
    for template in ("auto", "none"):
        encoder = make_encoder(folder, template)
        taken = [
            prompt
            for prompt in prompts
            if template == "auto" or (prompt.messages_json, prompt.tools_json) == (None, None)
        ]
        cuts = [cut_to[prompt.key.row_id] for prompt in taken]
        many = encoder.encode_many(taken, **limits, cut_to=cuts)
        one_by_one = [
            encoder.encode(prompt, **limits, cut_to=cut)
            for prompt, cut in zip(taken, cuts, strict=True)
        ]
        assert many == one_by_one
        assert {row.code for row in many if isinstance(row, Rejected)} == {
            "bad_text",
            "empty_prompt",
            "token_out_of_range",
        }
    assert encoder.encode_many([], **limits) == []


def test_options_that_do_not_go_with_the_columns_are_refused_before_a_row(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template=QWEN2)
    chat, raw = make_encoder(folder, system_prompt="s"), make_encoder(folder, "none")
    for columns in (Columns("p", "text"), Columns("p", "messages", tools_column="t")):
        chat.check_columns(columns)
    raw.check_columns(Columns("p", "text"))
    raw.check_columns(Columns("p", "token_ids"))
    with pytest.raises(ValueError, match=r"data\.system_prompt=s: a prompt of token ids"):
        chat.check_columns(Columns("p", "token_ids"))
    with pytest.raises(ValueError, match=r"data\.template=none: the input has messages and there"):
        raw.check_columns(Columns("p", "messages"))
    with pytest.raises(ValueError, match=r"data\.template=none: the input has tools \(data\."):
        raw.check_columns(Columns("p", "text", tools_column="t"))
    with pytest.raises(ValueError, match=r"data\.template=none: the input has tools"):
        ids_of(raw, "x", tools=[])


def test_a_stop_token_of_a_row_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    encoder = make_encoder(make_folder(tmp_path))
    prompt = replace(prompt_of("x"), sampling=RowSampling(stop_token_ids=(0, 9)))
    limits = {"max_prompt_len": 9, "on_long": "reject"}
    assert isinstance(encoder.encode(prompt, vocab_size=VOCAB_SIZE, **limits), Encoded)
    rejected = encoder.encode(prompt, vocab_size=9, **limits)
    assert isinstance(rejected, Rejected)
    assert (rejected.code, rejected.reason) == (
        "bad_sampling",
        "stop_token_ids: 9 is outside 0..8",
    )


def test_the_conversation_is_what_the_model_saw(tmp_path: Path) -> None:
    encoder = make_encoder(make_folder(tmp_path, chat_template=QWEN2), system_prompt="S \u00e9")
    system, user = {"role": "system", "content": "S \u00e9"}, {"role": "user", "content": "u"}
    text = json.dumps([system, user], ensure_ascii=False)
    assert encoder.conversation_json(prompt_of("u")) == text
    assert encoder.conversation_json(prompt_of([user])) == text
    assert encoder.conversation_json(prompt_of((1, 2))) is None
    assert encoder.template_text == QWEN2
    assert make_encoder(tmp_path, "none").template_text is None


def test_decode_gives_back_the_text_and_tells_special_tokens(tmp_path: Path) -> None:
    encoder = make_encoder(make_folder(tmp_path))
    text = "hello w\u00f6rld \u4f60"
    ids = [*ids_of(encoder, text), make_tokenizer().token_to_id("</s>")]
    assert encoder.decode(ids, skip_special_tokens=True) == text
    assert encoder.decode(ids, skip_special_tokens=False) == f"<s>{text}</s>"
    assert encoder.decode(ids[:-2], skip_special_tokens=True).endswith("\ufffd")
    assert encoder.decode((), skip_special_tokens=True) == ""


def test_the_date_is_one_for_the_whole_run(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template="{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}")
    before = datetime.now()
    encoder = make_encoder(folder)
    first, second = (encoder.render(prompt_of(text)) for text in ("a", "b"))
    assert first == second
    assert str(before) <= str(first) <= str(datetime.now())


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    reach = "{{ messages.__class__.__mro__ }}"
    encoder = make_encoder(make_folder(tmp_path, chat_template=reach))
    assert fault_of(encoder, "x").reason.startswith("SecurityError")
    change = "{{ messages.append(1) }}"
    encoder = make_encoder(make_folder(tmp_path, chat_template=change))
    assert fault_of(encoder, "x").reason.startswith("SecurityError")


def test_the_data_room_imports_neither_torch_nor_transformers() -> None:
    rooms = ("batching.prompts", "batching.encoder", "schema", "sink", "export.merging")
    program = "; ".join(f"import ddbatch.data.{room}" for room in rooms)
    program += "; import sys; print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
