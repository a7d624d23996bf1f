"""Where the reasoning of a completion ends and its answer begins.

Knows the two tags, and that a template may have put the first one into the prompt. Knows nothing
about tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddbatch.data.batching.stop_strings import StopStrings

OPEN, CLOSE = "<think>", "</think>"


class Answer(NamedTuple):
    """A completion in two. reasoning: None where it has none, otherwise without its tags.

    is_opened: the completion itself begins with the opening tag. is_closed: it has the closing tag.
    """

    reasoning: str | None
    text: str
    is_opened: bool
    is_closed: bool


def split_reasoning(completion: str) -> Answer:
    """All before the first closing tag is reasoning; newlines around both halves go.

    A completion that opens a thought and never closes it is all reasoning and answers nothing.
    """
    thought, tag, answer = completion.partition(CLOSE)
    is_opened = thought.lstrip().startswith(OPEN)
    if not tag and not is_opened:
        return Answer(None, completion, False, False)
    if is_opened:
        thought = thought.lstrip().removeprefix(OPEN)
    return Answer(thought.strip("\r\n"), answer.lstrip("\r\n"), is_opened, bool(tag))


def reasoning_end(text: str, token_ids: Sequence[int], finder: StopStrings) -> int | None:
    """Output tokens up to and with the one that completes the first closing tag; None without one.

    text: what the tokens say, as far as it is kept. The tag may also be a special token, which is
    not in the text where finder skips those.
    """
    ends = []
    if CLOSE in text:
        match = finder.watch((CLOSE,))(token_ids)
        assert match is not None, f"{CLOSE} in the text and not in the tokens {token_ids}"
        ends.append(match.num_tokens)
    close_id = finder.hidden_id(CLOSE)
    if close_id is not None and close_id in token_ids:
        ends.append(token_ids.index(close_id) + 1)
    return min(ends, default=None)
