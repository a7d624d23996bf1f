"""The run's sampling from its options, and what of a row's own sampling does not go with it.

Knows how stop strings are given. Knows nothing about prompts, and not how a string is found.
"""

from __future__ import annotations

import re
from pathlib import Path

from ddbatch.checks import STOPS, is_stop, shown
from ddbatch.config import Config
from ddbatch.core import RowSampling, Sampling
from ddbatch.data.batching.stop_strings import StopStrings

_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.|$)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_ALLOWED = r"allowed: \n \t \r \\ \uXXXX"


def run_sampling(config: Config) -> Sampling:
    """The options of the run, with its stop strings in force."""
    sampling = config.sampling
    stop = tuple(sampling.stop)
    if sampling.stop_file is not None:
        stop = read_stop_file(Path(sampling.stop_file))
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop=stop,
        stop_token_ids=tuple(sampling.stop_token_ids),
    )


def read_stop_file(file: Path) -> tuple[str, ...]:
    r"""The stop strings of a text file: one a line, with \n \t \r \\ \uXXXX; empty lines are none.

    A line is taken as it is, spaces too; a byte order mark and a \r at its end are not of it.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"sampling.stop_file={file}: {error}; allowed: a UTF-8 text file"
        ) from error
    stop = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if line:
            stop.append(_unescaped(line, f"sampling.stop_file={file}: line {number}"))
    if not stop:
        raise ValueError(f"sampling.stop_file={file} holds no stop string: expected one a line")
    return tuple(stop)


def _unescaped(line: str, where: str) -> str:
    """A line with its escapes replaced; two \\u of a surrogate pair are one character."""

    def character(match: re.Match[str]) -> str:
        escape = match[1]
        if escape[:1] == "u" and len(escape) == 5:
            return chr(int(escape[1:], 16))
        if escape not in _ESCAPED:
            raise ValueError(f"{where}: {match[0]} is no escape; {_ALLOWED}")
        return _ESCAPED[escape]

    text = _ESCAPE.sub(character, line)
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if not is_stop(text):
        raise ValueError(f"{where}: expected {STOPS}")
    return text


def check_stops(config: Config, stop: tuple[str, ...], finder: StopStrings) -> None:
    """ValueError for a string that no text can hold."""
    key = "stop" if config.sampling.stop_file is None else "stop_file"
    value = shown(getattr(config.sampling, key))
    for string in stop:
        refusal = finder.refusal(string)
        if refusal is not None:
            raise ValueError(f"sampling.{key}={value}: {string!r} {refusal}")


def check_ids(config: Config, vocab: int) -> None:
    """ValueError for a stop token that the model cannot emit, or more log-probs than tokens."""
    token_ids, top = config.sampling.stop_token_ids, config.sampling.top_logprobs
    for token_id in token_ids:
        if token_id >= vocab:
            raise ValueError(
                f"sampling.stop_token_ids={token_ids}: {token_id} is outside the vocabulary; "
                f"allowed: 0..{vocab - 1}"
            )
    if top > vocab:
        raise ValueError(
            f"sampling.top_logprobs={top}: the vocabulary has {vocab} tokens; allowed: 0..{vocab}"
        )


def escape_note(config: Config) -> str | None:
    """What to say where a stop string seems to be meant with an escape; None = nothing."""
    stop = config.sampling.stop
    if not any(re.search(r"\\[ntr]", string) for string in stop):
        return None
    return (
        f"sampling.stop={shown(stop)}: a backslash is taken as it is; for a line end put the "
        "string into a file for sampling.stop_file, which knows \\n, \\t, \\r and \\uXXXX"
    )


def row_refusal(own: RowSampling, samples: int, finder: StopStrings) -> str | None:
    """Why a row's sampling does not go with the run; None if it does. samples: of each row."""
    if own.temperature == 0 and samples > 1:
        return (
            f"temperature=0 in a row of a run with sampling.n={samples}: all samples would be equal"
        )
    refusals = ((string, finder.refusal(string)) for string in own.stop or ())
    return next((f"stop: {string!r} {refusal}" for string, refusal in refusals if refusal), None)
