"""Prompts to ids: equal to transformers' apply_chat_template, BOS once, every refusal named."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ddbatch.core import Key, Prompt, Rejected
from ddbatch.data.batching import OnLong, PromptEncoder

SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>", "[INST]", "[/INST]"]
VOCAB_SIZE = 1000
REAL = Path(__file__).parents[2] / "shared" / "models" / "smollm2-135m-instruct"

CHATML = """{% for m in messages %}
{{ '<|user|>' + m['role'] + '\n' + m.content + '<|end|>\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|user|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>' }}{% endif %}
{% endif %}"""
LLAMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|user|>system\n\n' + system + '<|end|>' }}
{%- for m in messages %}{{- '<|user|>' + m.role + '\n\n' + (m.content | trim) + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|user|>assistant\n\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}
{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}{% endif %}
{{ '<|user|>' + m['role'] + '\n' + m['content'] | trim + '<|end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<|user|>model\n'}}{% endif %}"""
TOOLS = """{% if tools is not none and tools %}{{ '<|user|>tools\n' }}
{% for tool in tools %}{{ tool | tojson(indent=2) }}{{ tool | tojson }}{% endfor %}{% endif %}
{% for m in messages %}{{ '<|user|>' + m.role + '\n' }}
{% if m.content is defined %}{{ m.content }}{% endif %}
{% if m.tool_calls is defined %}{% for call in m.tool_calls %}
{{ call.function | tojson }}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"""
DATE = """{{ bos_token }}{{ 'Today is ' + strftime_now('%Y-%m') }}
{% if not date_string is defined %}{% set date_string = strftime_now('%b %Y') %}{% endif %}
{{ date_string }}{% for m in messages %}{{ m.content }}{% endfor %}"""
GENERATION = """{% for m in messages %}{% set mark = m.role %}{% if m.role == 'assistant' %}
{% generation %}{% set mark = 'inner' %}{{ m.content }}<|end|>
{% endgeneration %}{% else %}
{{ m.content }}{% endif %}{{ mark }}{% endfor %}"""
LOOPS = """{% set ns = namespace(last=-1, n=0) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{% endfor %}
{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{% if loop.index0 > ns.last %}{% break %}{% endif %}
{{ m.role }}: {{ m.content }}
{% endfor %}{{ ns.last }}"""
# No system message: the gemma shape has none.
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "tools": TOOLS,
    "date": DATE,
    "generation": GENERATION,
    "loops": LOOPS,
}
TURNS = [
    {"role": "user", "content": "  hello <b>w\u00f6rld</b> & '\u4f60' \n"},
    {"role": "assistant", "content": "lo and behold", "name": None},
    {"role": "user", "content": "again <|end|> then\n\n  more"},
]
CALL = {"type": "function", "function": {"name": "f\u00e9", "arguments": {"x": "<1>", "y": None}}}
TOOL_TURNS = [
    TURNS[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    TURNS[2],
]
TOOL = {"type": "function", "function": {"name": "f\u00e9", "parameters": {"type": "object"}}}


def make_tokenizer(*, adds_bos: bool = True) -> Tokenizer:
    """Byte-level BPE with a few merges, so that ids depend on where text is split."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("l", "o"),
        ("he", "ll"),
        ("\u0120", "a"),
        ("\u010a", "\u010a"),
    ]
    tokens = [*symbols, *("".join(pair) for pair in merges)]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


def make_folder(
    folder: Path,
    *,
    chat_template: object = None,
    adds_bos: bool = True,
    **config: object,
) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    # What a saved tokenizer may carry and an encoder must not obey.
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    entries = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, **config}
    if chat_template is not None:
        entries["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))
    return folder


def make_encoder(folder: Path, template: str = "auto", **options: object) -> PromptEncoder:
    chat_template_kwargs = options.get("chat_template_kwargs")
    system_prompt = options.get("system_prompt")
    assert chat_template_kwargs is None or isinstance(chat_template_kwargs, dict)
    assert system_prompt is None or isinstance(system_prompt, str)
    return PromptEncoder.from_folder(
        folder,
        template=template,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
    )


def prompt_of(value: object, *, tools: object = None) -> Prompt:
    key = Key(5, 0, 0)
    tools_json = None if tools is None else json.dumps(tools)
    if isinstance(value, str):
        return Prompt(key, text=value, tools_json=tools_json, user_id="u", raw_json="{}")
    if isinstance(value, tuple):
        return Prompt(key, token_ids=value, user_id="u", raw_json="{}")
    messages_json = json.dumps(value, ensure_ascii=False)
    return Prompt(key, messages_json=messages_json, tools_json=tools_json, user_id="u")


def ids_of(encoder: PromptEncoder, value: object, *, tools: object = None) -> list[int]:
    ids = encoder.encode(
        prompt_of(value, tools=tools), vocab_size=VOCAB_SIZE, max_prompt_len=4096, on_long="reject"
    )
    assert isinstance(ids, tuple), ids
    return list(ids)


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


def slow_twin(folder: Path, template: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "twin.json"))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "twin.json"),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


@pytest.mark.parametrize("shape", TEMPLATES)
def test_ids_equal_those_of_apply_chat_template(shape: str, tmp_path: Path) -> None:
    encoder = make_encoder(make_folder(tmp_path, chat_template=TEMPLATES[shape]))
    twin = slow_twin(tmp_path, TEMPLATES[shape])
    conversations: list[tuple[list[dict[str, object]], object]] = [(TURNS[:1], None), (TURNS, None)]
    if shape in ("tools", "loops"):
        conversations.append((TOOL_TURNS, [TOOL]))
    for messages, tools in conversations:
        expected = twin.apply_chat_template(
            messages, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert ids_of(encoder, messages, tools=tools) == expected
        text = twin.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert encoder.render(prompt_of(messages, tools=tools)) == text


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_any_text_renders_to_the_ids_of_apply_chat_template(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-text"
    encoder = make_encoder(make_folder(folder, chat_template=LLAMA))
    messages = [{"role": "user", "content": content} for content in contents]
    expected = slow_twin(folder, LLAMA).apply_chat_template(
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
        assert list(ids) == expected
    assert encoder.eos_token_id == twin.eos_token_id


def test_the_bos_token_appears_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template=LLAMA)
    bos = make_tokenizer().token_to_id("<s>")
    for template, value in (("auto", "hello"), ("none", "hello"), ("none", "<s>hello")):
        ids = ids_of(make_encoder(folder, template), value)
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_raw_text_follows_add_bos_token_as_transformers_does(tmp_path: Path) -> None:
    for number, (adds_bos, flag) in enumerate(((False, True), (True, False), (False, None))):
        config = {} if flag is None else {"add_bos_token": flag}
        folder = make_folder(tmp_path / str(number), adds_bos=adds_bos, **config)
        make_tokenizer(adds_bos=adds_bos).save(str(folder / "twin.json"))
        twin = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "twin.json"), bos_token="<s>", eos_token="</s>", **config
        )
        assert ids_of(make_encoder(folder), "hello all") == twin.encode("hello all")


def test_a_text_prompt_is_one_user_turn_and_the_system_prompt_comes_first(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template=CHATML)
    plain, system = make_encoder(folder), make_encoder(folder, system_prompt="Be brief.")
    user = {"role": "user", "content": "hello"}
    brief, own = ({"role": "system", "content": text} for text in ("Be brief.", "Own."))
    assert ids_of(plain, "hello") == ids_of(plain, [user])
    assert ids_of(system, "hello") == ids_of(plain, [brief, user])
    assert ids_of(system, [own, user]) == ids_of(plain, [own, user])
    with pytest.raises(ValueError, match=r"data.system_prompt=.*token ids"):
        ids_of(system, (1, 2))


def test_template_variables_come_from_chat_template_kwargs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template=CHATML)
    encoder = make_encoder(folder, chat_template_kwargs={"enable_thinking": False})
    text = encoder.render(prompt_of("hi"))
    assert isinstance(text, str)
    assert text.endswith("hi<|end|>\n\n<|user|>assistant\n<think>\n\n</think>")
    assert make_encoder(folder).render(prompt_of("hi")) == text.removesuffix("<think>\n\n</think>")
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(ValueError, match=rf"data.chat_template_kwargs=.*{name} is set"):
            make_encoder(folder, chat_template_kwargs={name: 1})


def test_the_template_is_found_in_each_place_transformers_keeps_it(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "list"}]
    other = tmp_path / "other.jinja"
    other.write_text("mine")
    plain = make_folder(tmp_path / "a", chat_template="string")
    listed = make_folder(tmp_path / "b", chat_template=named)
    both = make_folder(tmp_path / "c", chat_template="string")
    (both / "chat_template.jinja").write_text("file")
    bare = make_folder(tmp_path / "d")
    for folder, template, text in (
        (plain, "auto", "string"),
        (listed, "auto", "list"),
        (both, "auto", "file"),
        (both, "none", "prompt"),
        (both, str(other), "mine"),
        (bare, "auto", "prompt"),
    ):
        assert make_encoder(folder, template).render(prompt_of("prompt")) == text
    for template in ("auto", "none"):
        with pytest.raises(ValueError, match=rf"data.template={template}: .*messages"):
            ids_of(make_encoder(bare, template), TURNS)
    shutil.rmtree(bare)
    with pytest.raises(ValueError, match=r"the templates \['rag'\] and no default"):
        make_encoder(make_folder(bare, chat_template=named[:1]))


def test_a_row_that_cannot_be_encoded_is_rejected_with_its_code(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat_template=GEMMA)
    chat, raw = make_encoder(folder), make_encoder(folder, "none")
    refused = fault_of(chat, [{"role": "system", "content": "x"}])
    assert refused.code == "template_error"
    assert refused.reason == "TemplateError: System role not supported"
    chatml = make_encoder(make_folder(tmp_path / "chatml", chat_template=CHATML))
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
            assert cut == tuple(ids[-limit:])


def test_decode_gives_back_the_text_and_tells_special_tokens(tmp_path: Path) -> None:
    encoder = make_encoder(make_folder(tmp_path))
    text = "hello w\u00f6rld \u4f60"
    ids = [*ids_of(encoder, text), make_tokenizer().token_to_id("</s>")]
    assert encoder.decode(ids, skip_special_tokens=True) == text
    assert encoder.decode(ids, skip_special_tokens=False) == f"<s>{text}</s>"
    assert encoder.decode(ids[:-2], skip_special_tokens=True).endswith("\ufffd")
    assert encoder.decode((), skip_special_tokens=True) == ""


def test_the_eos_token_is_read_from_either_form(tmp_path: Path) -> None:
    eos = make_tokenizer().token_to_id("</s>")
    assert make_encoder(make_folder(tmp_path / "a")).eos_token_id == eos
    assert make_encoder(make_folder(tmp_path / "b", eos_token="</s>")).eos_token_id == eos
    assert make_encoder(make_folder(tmp_path / "c", eos_token=None)).eos_token_id is None
    older = make_folder(tmp_path / "d", eos_token=None)
    (older / "tokenizer_config.json").unlink()
    (older / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert make_encoder(older).eos_token_id == eos


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


def test_a_broken_model_folder_is_refused_by_file_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path=.*tokenizer\.json is missing"):
        make_encoder(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        for content in ("{", "[]"):
            folder = make_folder(tmp_path / "model")
            (folder / name).write_text(content)
            with pytest.raises(ValueError, match=rf"model\.path=.*model:.*{name}"):
                make_encoder(folder)
            shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json names eos_token '<none>'"):
        make_encoder(make_folder(tmp_path / "eos", eos_token="<none>"))
    folder = make_folder(tmp_path / "template", chat_template="{% if %}")
    with pytest.raises(ValueError, match=r"model.path=.*data.template=auto.*not compile"):
        make_encoder(folder)
    with pytest.raises(ValueError, match=r"data\.template=gone.*cannot be read"):
        make_encoder(folder, "gone")
    for option, value in (("system_prompt", "x"), ("chat_template_kwargs", {"a": 1})):
        with pytest.raises(ValueError, match=rf"data.{option}=.*no chat template"):
            make_encoder(folder, "none", **{option: value})
