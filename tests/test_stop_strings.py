"""Stop strings against their slow twin, which decodes everything after each token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from ddbatch.core import StopMatch
from ddbatch.data.batching.stop_strings import StopStrings

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n\nUser: hello!\nAssistant: hi there.",
    "Gr\u00f6\u00dfe, na\u00efve caf\u00e9 \u2014 \u00ab\u00e7a va?\u00bb",
    "\u6771\u4eac\u90fd\u306f\u65e5\u672c\u306e\u9996\u90fd\u3002\u4f60\u597d\uff0c\u4e16\u754c",
    "emoji \U0001f600\U0001f44d\U0001f3fd family \U0001f468\u200d\U0001f469\u200d\U0001f467 end",
    "def f(x):\n    return x + 1\n\n\n```python\nprint('a  b')\n```\n",
    "don't stop , won't it ? ab abab ababab aaaa",
]
ADDED = [
    AddedToken("<s>", special=True),
    AddedToken("<|end|>", special=True),
    AddedToken("</think>", special=False, normalized=False),
    AddedToken("two words", special=False, normalized=False),
    AddedToken("\u65e5 x", special=False, normalized=False),
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_fallback(strip: int) -> Tokenizer:
    """Llama 2's with strip=1, Gemma's with 0."""
    words = ["\u2581", "\u2581hello", "\u2581the", "a", "b", "ab", "aba", "\u2581\u2581", "\u00e4"]
    words += [
        "\u2581a",
        "b\u2581",
        "x",
        ".",
        "\u2581.",
        "lo\u2581wor",
        "\u4f60",
        "\u2581\U0001f600",
    ]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in words:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_piece(cleanup: bool) -> Tokenizer:
    words = [
        "[UNK]",
        "don",
        "##'",
        "'",
        "##t",
        "t",
        ".",
        ",",
        "!",
        "?",
        "##?",
        "n't",
        "##s",
        "##ab",
    ]
    words += ["ab", "a", "##a", "##", "#ab", "do", "not", "'s"]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return tokenizer


def word_level() -> Tokenizer:
    words = ["w0", "w1", "w12", "a", "b", "ab", "\u4f60\u597d", "\U0001f600", "end."]
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def unknown_decoder() -> Tokenizer:
    """GPT-1's: the space of a word comes with the next one."""
    words = ["a</w>", "b</w>", "a", "b", "ab</w>", ".</w>"]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


KINDS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(strip=1),
    "byte fallback, no strip": byte_fallback(strip=0),
    "metaspace": metaspace(),
    "word piece": word_piece(cleanup=False),
    "word piece, cleanup": word_piece(cleanup=True),
    "word level": word_level(),
    "unknown": unknown_decoder(),
}
for _tokenizer in KINDS.values():
    _tokenizer.add_tokens(ADDED)
FINDERS = {
    (name, skips): StopStrings(tokenizer, skip_special_tokens=skips)
    for name, tokenizer in KINDS.items()
    for skips in (False, True)
}
FAST = [name for name in KINDS if name != "unknown"]


def slow_match(
    tokenizer: Tokenizer, skips: bool, ids: Sequence[int], stop: Sequence[str]
) -> StopMatch | None:
    for num in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[:num]), skip_special_tokens=skips)
        found = [(text.find(string), at) for at, string in enumerate(stop) if string in text]
        if found:
            return StopMatch(stop[min(found)[1]], num)
    return None


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens, tokens of a text, unknown ids, and runs of bytes (broken characters too)."""
    size = tokenizer.get_vocab_size()
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    slices = [ids[at : at + 9] for ids in encoded for at in range(len(ids))]
    added = [tokenizer.token_to_id(token.content) for token in ADDED]
    byte_ids = [
        tokenizer.token_to_id(f"<0x{byte:02X}>")
        for byte in (0x20, 0x61, 0x0A, *"\u00e4\u4f60\U0001f600".encode(), 0xFF, 0xE4)
    ]
    some = [number for number in byte_ids if number is not None] or added
    chunk = st.one_of(
        st.lists(st.integers(0, size - 1), min_size=1, max_size=6),
        st.sampled_from(slices or [added]),
        st.sampled_from([[token_id] for token_id in (*added, size + 3)]),
        st.lists(st.sampled_from(some), max_size=8),
        st.lists(st.sampled_from([*some, size - 6, size - 7, size - 8]), max_size=8),
    )
    return st.lists(chunk, max_size=5).map(lambda parts: [token for ids in parts for token in ids])


IDS = {name: ids_of(tokenizer) for name, tokenizer in KINDS.items()}


FREE = st.text(st.sampled_from("ab \n.\u00e4\u4f60\U0001f600</think>"), max_size=3)


@st.composite
def cases(draw: st.DrawFn, name: str) -> tuple[list[int], tuple[str, ...], bool]:
    """Ids, and strings of which most are cut from what some prefix of them says."""
    tokenizer, skips = KINDS[name], draw(st.booleans())
    ids = draw(IDS[name])
    prefix = draw(st.integers(0, len(ids)))
    text = tokenizer.decode(ids[:prefix] or ids, skip_special_tokens=skips)
    # Strings may seem to go on across bytes that are no character, and across skipped tokens.
    text = draw(st.sampled_from([text, text.replace("\ufffd", "")]))
    begins = [draw(st.integers(0, max(0, len(text) - 1))) for _ in range(2)]
    cuts = [text[at : at + draw(st.integers(1, 6))] for at in begins]
    strings = draw(st.permutations([*cuts, draw(FREE)]))
    stop = tuple(string for string in strings if string and "\ufffd" not in string)
    return ids, stop, skips


@pytest.mark.parametrize("name", KINDS)
def test_a_match_is_the_slow_twins_whatever_the_chunks(name: str) -> None:
    @settings(max_examples=300)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        ids, stop, skips = data.draw(cases(name))
        finder = FINDERS[name, skips]
        expected = slow_match(KINDS[name], skips, ids, stop)
        watch, at = finder.watch(stop), 0
        while at < len(ids):
            size = data.draw(st.integers(1, 5))
            seen = watch(ids[at : at + size])
            at += size
            is_there = expected is not None and expected.num_tokens <= at
            assert seen == (expected if is_there else None), (ids, stop, skips)
        assert watch([]) == expected
        if expected is not None:
            # The engine looks only when such a token was emitted.
            assert ids[expected.num_tokens - 1] in finder.flagged(stop), (ids, stop, skips)

    check()


@pytest.mark.parametrize("name", ["byte fallback", "byte fallback, no strip"])
def test_a_run_of_bytes_is_text_only_as_a_whole(name: str) -> None:
    tokenizer, finder = KINDS[name], FINDERS[name, True]
    tokens = ("a", "<s>", "<0x61>", "<0x20>", "<0xFF>", "<0xE4>", "<0xBD>", "<0xA0>")
    token_ids = [tokenizer.token_to_id(token) for token in tokens]
    for stop in (("a",), ("aa",), ("\u4f60",), ("a\u4f60", "\u4f60a"), (" a", " ")):
        for ids in product(token_ids, repeat=4):
            assert finder.watch(stop)(ids) == slow_match(tokenizer, True, ids, stop), (ids, stop)


@pytest.mark.parametrize("name", FAST)
def test_a_string_is_found_anywhere_in_a_longer_text(name: str) -> None:
    tokenizer, finder = KINDS[name], FINDERS[name, False]
    size = tokenizer.get_vocab_size()
    ids = [number * 7919 % size for number in range(120)]
    ends = [tokenizer.decode(ids[:count]) for count in range(10, 120, 5)]
    for end in ends:
        stop = (end.rpartition("\ufffd")[2][-9:] or "x", "\n\n\n\n")
        assert finder.watch(stop)(ids) == slow_match(tokenizer, False, ids, stop), stop


def test_every_byte_of_a_byte_level_vocabulary_is_known() -> None:
    tokenizer, finder = KINDS["byte level"], FINDERS["byte level", True]
    codes = [*range(0x800), *range(0x800, 0xD800, 0x700), *range(0x10000, 0x110000, 0x8000)]
    for code in codes:
        ids = tokenizer.encode(chr(code), add_special_tokens=False).ids
        assert finder.watch((chr(code),))(ids) == StopMatch(chr(code), len(ids)), hex(code)


@pytest.mark.parametrize("name", FAST)
def test_long_outputs_are_watched_in_linear_time(name: str) -> None:
    tokenizer, finder = KINDS[name], FINDERS[name, True]
    ids = [number % tokenizer.get_vocab_size() for number in range(0, 700_000, 7)]
    watch = finder.watch(("never, ever", "\n\n\n never"))
    started = time.process_time()
    assert watch(ids) is None
    assert time.process_time() - started < 5  # a quadratic one takes minutes


def test_few_tokens_are_flagged_where_few_can_complete() -> None:
    tokenizer, finder = KINDS["byte level"], FINDERS["byte level", True]
    texts = {number: tokenizer.decode([number]) for number in finder.flagged(("\n\n",))}
    assert texts
    assert all("\n" in text for text in texts.values())
    cjk = finder.flagged(("\u4f60",))  # E4 BD A0: no first byte ends it, nor does ASCII
    names = {tokenizer.id_to_token(number) for number in cjk}
    assert tokenizer.token_to_id("a") not in cjk
    assert "\u0142" in names  # how A0 is written
    assert "\u00e4" not in names  # E4
    assert finder.flagged(()) == ()
    assert len(FINDERS["unknown", True].flagged(("x",))) == KINDS["unknown"].get_vocab_size()


def test_a_string_that_only_a_skipped_token_says_is_refused_with_its_id() -> None:
    token_id = KINDS["byte level"].token_to_id("<|end|>")
    said = FINDERS["byte level", True].refusal("<|end|>")
    assert said is not None
    assert f"sampling.stop_token_ids=[{token_id}]" in said
    for string in ("</think>", "<|end|> ", "end"):
        assert FINDERS["byte level", True].refusal(string) is None
    assert FINDERS["byte level", False].refusal("<|end|>") is None


def test_the_first_string_of_the_text_wins_then_of_the_list() -> None:
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode("x aba", add_special_tokens=False).ids
    finder = FINDERS["byte level", True]
    whole = [*ids, tokenizer.token_to_id("two words")]
    assert finder.watch(("words", "wo", "two", "two w"))(whole) == StopMatch("two", len(whole))
    assert finder.watch(("words", "two w", "two"))(whole) == StopMatch("two w", len(whole))
