"""What programs and host tell each other about rows and pieces of prompts, as small integers.

Knows nothing about tensors.
"""

from __future__ import annotations

from enum import IntEnum

CHECK_PRIME = 1_000_003


class Finish(IntEnum):
    """Why a slot stopped; 0 while it is live. CANCELLED: the host asked for it."""

    LIVE = 0
    STOP = 1
    LENGTH = 2
    NAN_LOGITS = 3
    CANCELLED = 4


class Fact(IntEnum):
    """Columns of what a program tells of a row or of a piece of a prompt, before its tokens.

    CHECK: of a row the tokens that were committed before the round, of a piece the sum of its
    tokens times their places (from 1), modulo CHECK_PRIME. EMITTED: tokens that follow.
    ACCEPTED: drafted ones among them. DEPTH: the deepest node offered. MAY_END: tokens up to the
    last that may end a stop string, 0 = none. ERROR: Error bits. Below the rows one more row holds
    the number of the round or call in its first column.
    """

    SLOT = 0  # nobody: the row is inert
    GENERATION = 1
    CHECK = 2
    EMITTED = 3
    ACCEPTED = 4
    DEPTH = 5
    FINISH = 6
    MAY_END = 7
    ERROR = 8


class TokenFlag:
    """Bits of what a token means to a slot."""

    STOP_ID = 1  # it ends the sequence
    MAY_END_STRING = 2  # it could complete a stop string: the host must look at the text


class ChunkFact(IntEnum):
    """Columns of a piece of a prompt, before its tokens. Padding is nobody's piece of size 0."""

    SLOT = 0
    START = 1
    SIZE = 2
    IS_LAST = 3


class Error:
    """Bits of the error word. What they mean is in ERRORS."""

    TOKEN = 1
    PARENT = 2
    EMITTED = 4
    LENGTH = 8


ERRORS = {
    Error.TOKEN: "a token outside the vocabulary",
    Error.PARENT: "a tree node before its parent, or not one below it",
    Error.EMITTED: "a round that emitted no token, or more than a path can hold",
    Error.LENGTH: "a sequence longer than its pages",
}
