"""From the teacher's completions to texts that a very small model can learn: short, clean, plain.

Knows nothing about tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_MIN_WORDS, _MAX_WORDS = 20, 110
_PLAIN = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": ", "})
# A teacher of this size falls into loops: no three words may come more often than this.
_MAX_REPEATS = 2


class Text(NamedTuple):
    """A prompt and the text that answers it."""

    prompt: str
    text: str


def clean_texts(raw: Iterable[Text]) -> Iterator[Text]:
    """The texts worth learning, each once, cut to their first paragraph and to whole sentences."""
    seen: set[Text] = set()
    for prompt, text in raw:
        cleaned = Text(prompt, _whole_sentences(text.split("\n\n")[0]))
        if _is_good(cleaned.text) and cleaned not in seen:
            seen.add(cleaned)
            yield cleaned


def _whole_sentences(text: str) -> str:
    line = " ".join(text.translate(_PLAIN).split()).replace(" , ", ", ")
    ends = [found.end() for found in re.finditer(r'[.!?]"?(?=\s|$)', line)]
    ends = [end for end in ends if len(line[:end].split()) <= _MAX_WORDS]
    return line[: ends[-1]] if ends else ""


def _is_good(text: str) -> bool:
    words = re.findall(r"[a-z']+", text.lower())
    if len(words) < _MIN_WORDS or not text.isascii() or text.count('"') % 2:
        return False
    if not text[0].isupper() and text[0] != '"':
        return False
    if re.search(r"[*#\[\]{}<>|_\\=@:;`()]|\b(AI|SmolLM|sorry)\b", text):
        return False
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return max(map(triples.count, triples)) <= _MAX_REPEATS
