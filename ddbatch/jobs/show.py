"""How figures are shown to people: aligned columns, units, ranges, spans of time; and what is
written on stdout and stderr.

Knows nothing about what they mean.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """A number that is known to lie somewhere between two."""

    low: float
    high: float


_WIDTH = 100
_LEAST_WIDTH = 40
_SHOWN_LINES = 10  # of a long text, at its head and at its tail
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


class UnheardError(Exception):
    """stdout is closed (`| head`) or full; the message says which."""


def tell(text: str) -> None:
    """A text on stdout, for what a job was asked; UnheardError where it cannot be written."""
    try:
        print(text)
    except OSError as error:
        raise UnheardError(error.strerror) from error


def say(text: str) -> None:
    """A line on stderr. Where it cannot be written (`| tail` was killed, the terminal is gone, a
    disk is full), this and all that follows goes nowhere: a run must not end for it.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def width() -> int:
    """Columns for people: 100, or fewer on a terminal that has fewer."""
    if sys.stdout is None or not sys.stdout.isatty():  # None: it was closed before the start
        return _WIDTH
    return max(_LEAST_WIDTH, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))


def aligned(table: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Lines with their columns one below the other; the columns of `right` end together."""
    widths = [max(len(line[at]) for line in table) for at in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(widths[at]) if at in right else cell.ljust(widths[at])
            for at, cell in enumerate(line)
        ).rstrip()
        for line in table
    )


def facts(lines: Sequence[tuple[str, str]]) -> str:
    """A name and what is said of it a line; what is long goes on below itself."""
    indent = max(len(name) for name, _ in lines) + 2
    return "\n".join(
        line
        for name, said in lines
        for line in textwrap.wrap(
            said,
            width(),
            initial_indent=name.ljust(indent),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def plural(count: int, thing: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def counted(counts: Mapping[str, int]) -> str:
    """ "6 length, 2 stop": the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {name}" for name, count in ordered) or "none"


def share(part: float, whole: float) -> str:
    """A part in per cent; neither 0% nor 100% is said of what only rounds to it."""
    if not whole:
        return "0%"
    per_cent = 100 * part / whole
    if 0 < per_cent < 0.1:
        return "<0.1%"
    if 99.9 < per_cent < 100:
        return ">99.9%"
    return f"{per_cent:.1f}%"


def number(value: float) -> str:
    """A quantity with three digits that count, and thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(num_bytes: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    unit = 0
    while num_bytes >= 999.5 and unit < len(_BYTES) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.0f} {_BYTES[unit]}" if not unit else f"{num_bytes:.3g} {_BYTES[unit]}"


def duration(seconds: float) -> str:
    """A span of time in its two largest units."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} d {hours % 24} h"


def ranged(low: str, high: str) -> str:
    """ "3 to 5", or one of them where they are shown alike."""
    return low if low == high else f"{low} to {high}"


def one_line(text: str, limit: int) -> str:
    """A text on one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def excerpt(text: str, name: str, *, lines: int, indent: int) -> str:
    """A text under its name as people read it: whole words, no blank lines; its beginning, and a
    trailing "..." where it is longer. What would steer a terminal becomes spaces."""
    room = width() - indent
    pieces = [
        "".join(letter if letter.isprintable() else " " for letter in line)
        for line in text.splitlines()
    ]
    shown = [part for piece in pieces for part in textwrap.wrap(piece, room)]
    if len(shown) > lines:
        last = textwrap.shorten(" ".join(shown[lines - 1 :]), room, placeholder=" ...")
        shown[lines - 1 :] = [last]
    return name.ljust(indent) + ("\n" + " " * indent).join(shown or ["(empty)"])


def clipped(text: str, indent: int) -> str:
    """A text line by line as Python would write it, so that spaces and newlines show; without its
    middle where it is long."""
    width = _WIDTH - indent - 4
    pieces = [
        line[first : first + width]
        for line in text.splitlines(keepends=True)
        for first in range(0, len(line), width)
    ]
    shown = [repr(piece) for piece in pieces]
    if len(pieces) > 2 * _SHOWN_LINES + 1:
        hidden = sum(map(len, pieces[_SHOWN_LINES:-_SHOWN_LINES]))
        shown[_SHOWN_LINES:-_SHOWN_LINES] = [f"... {hidden:,} characters ..."]
    return ("\n" + " " * indent).join(shown)


def clipped_ids(ids: Sequence[int], *, head: int = 16, tail: int = 32) -> str:
    """Token ids, without those in the middle where there are many."""
    if len(ids) <= head + tail:
        return " ".join(map(str, ids))
    hidden = len(ids) - head - tail
    first, last = (" ".join(map(str, part)) for part in (ids[:head], ids[-tail:]))
    return f"{first} ... {hidden:,} ids ... {last}"
