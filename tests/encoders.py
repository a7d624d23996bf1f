"""A small tokenizer in a model folder, an encoder made of it, and transformers as its slow twin."""

from __future__ import annotations

import json
from pathlib import Path

from chat_templates import SPECIAL
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ddbatch.core import Key, Prompt
from ddbatch.data.batching.encoder import Encoded, PromptEncoder

VOCAB_SIZE = 1000


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
    """A model folder without a model."""
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


def make_encoder(
    folder: Path,
    template: str = "auto",
    *,
    chat_template_kwargs: dict[str, object] | None = None,
    system_prompt: str | None = None,
    **options: object,
) -> PromptEncoder:
    return PromptEncoder.from_folder(
        folder,
        template=template,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
        **options,
    )


def slow_twin(folder: Path, template: str) -> PreTrainedTokenizerFast:
    """The same tokenizer and template in transformers."""
    make_tokenizer().save(str(folder / "twin.json"))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "twin.json"),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def prompt_of(value: object, *, tools: object = None, is_continued: bool = False) -> Prompt:
    """A Prompt of a text, of token ids or of messages."""
    key = Key(5, 0, 0)
    tools_json = None if tools is None else json.dumps(tools)
    if isinstance(value, str):
        return Prompt(key, text=value, tools_json=tools_json, user_id="u", raw_json="{}")
    if isinstance(value, tuple):
        return Prompt(key, token_ids=value, user_id="u", raw_json="{}")
    return Prompt(
        key,
        messages_json=json.dumps(value, ensure_ascii=False),
        tools_json=tools_json,
        user_id="u",
        is_continued=is_continued,
    )


def ids_of(encoder: PromptEncoder, value: object, **options: object) -> list[int]:
    """The ids of a prompt that can be encoded."""
    prompt = value if isinstance(value, Prompt) else prompt_of(value, **options)
    encoded = encoder.encode(prompt, vocab_size=VOCAB_SIZE, max_prompt_len=4096, on_long="reject")
    assert isinstance(encoded, Encoded), encoded
    assert encoded.num_dropped == 0
    return list(encoded.token_ids)
