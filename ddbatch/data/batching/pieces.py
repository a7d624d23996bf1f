"""What each token of a tokenizer adds to the text, as UTF-8 bytes.

Knows the decoders under which a token adds the same bytes wherever it stands, but for the first
one. Knows nothing about stop strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer

# A token of one byte (ByteFallback); the library reads these two digits as a number.
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")


@dataclass(frozen=True)
class Pieces:
    """Bytes by token id; an id that is absent adds nothing and counts as not there.

    first: where the first token of a text adds something else. run_ids: tokens of one byte, a run
    of which is text only where all its bytes together are; otherwise each is a U+FFFD. Of other
    bytes that are no character each broken one is a U+FFFD.
    """

    rest: Mapping[int, bytes]
    first: Mapping[int, bytes] = field(default_factory=dict)
    run_ids: frozenset[int] = frozenset()


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokens that skip_special_tokens removes, by their text."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special}


def token_ids(tokenizer: Tokenizer) -> range:
    """All ids that a tokenizer may have."""
    return range(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)


def read_pieces(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Pieces | None:
    """The table of a tokenizer; None where its decoder is not one of those that this file knows."""
    skipped = special_ids(tokenizer) if skip_special_tokens else {}
    tokens: dict[int, str] = {}
    for token_id in token_ids(tokenizer):
        token = tokenizer.id_to_token(token_id)
        if token is not None and token not in skipped:
            tokens[token_id] = token
    steps = list(_steps(tokenizer))
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        alphabet = _byte_alphabet()
        return Pieces({at: _bytes_of(token, alphabet) for at, token in tokens.items()})
    if names in (["Metaspace"], ["WordPiece"]):
        decode = tokenizer.decoder.decode
        rest = {at: decode(["a", token])[1:].encode() for at, token in tokens.items()}
        return Pieces(rest, {at: decode([token]).encode() for at, token in tokens.items()})
    if not names:  # the library joins the tokens by spaces
        first = {at: token.encode() for at, token in tokens.items()}
        return Pieces({at: b" " + piece for at, piece in first.items()}, first)
    if names[:3] == ["Replace", "ByteFallback", "Fuse"]:
        return _fallback_pieces(tokens, steps)
    return None


def _steps(tokenizer: Tokenizer) -> Iterator[dict[str, object]]:
    """The decoder's steps in order; none where there is no decoder."""
    left = [] if tokenizer.decoder is None else [json.loads(tokenizer.decoder.__getstate__())]
    while left:
        step = left.pop(0)
        if step["type"] == "Sequence":
            left = [*step["decoders"], *left]
        else:
            yield step


def _fallback_pieces(tokens: Mapping[int, str], steps: list[dict[str, object]]) -> Pieces | None:
    """SentencePiece with bytes for what has no token, as Llama 2 and Gemma have it."""
    replace, strip = steps[0], steps[3:]
    spaces = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    pattern, content = replace["pattern"], replace["content"]
    if strip not in ([], [spaces]) or not isinstance(pattern, dict) or "String" not in pattern:
        return None
    texts = {at: token.replace(pattern["String"], str(content)) for at, token in tokens.items()}
    found = {at: _BYTE_TOKEN.fullmatch(text) for at, text in texts.items()}
    runs = {at: bytes([int(match[1], 16)]) for at, match in found.items() if match}
    # An empty token is no text that could be the first.
    rest = {at: text.encode() for at, text in texts.items() if text} | runs
    first = {at: piece[1:] for at, piece in rest.items() if strip and piece[:1] == b" "}
    return Pieces(rest, first, frozenset(runs))


def _byte_alphabet() -> dict[str, int]:
    """The bytes that characters stand for in a byte-level vocabulary (GPT-2's): printable ones for
    themselves, the others in their order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + at): byte for at, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _bytes_of(token: str, alphabet: Mapping[str, int]) -> bytes:
    """A token that has a character of no byte (an added one) is plain text."""
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()
