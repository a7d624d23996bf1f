"""The demo's tokenizer: byte-level BPE with the turns of ChatML, learned from the texts.

Knows nothing about models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, START, MASK = "<|im_end|>", "<|im_start|>", "<|mask|>"
SPECIAL_TOKENS = (END, START, MASK)  # their ids are their places

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def as_chat(prompt: str) -> str:
    """What TEMPLATE makes of one user turn, up to where the assistant begins."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Merges of the most frequent pairs; every byte has an id, so any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_positions: int) -> None:
    """tokenizer.json and tokenizer_config.json, with the chat template in the second."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
