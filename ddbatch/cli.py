"""Reads the command line before Hydra does, and says in plain words what Hydra would refuse.

In: the arguments as typed. Out: arguments as Hydra takes them, or a UsageError whose hint says what
to write instead. Knows the names and types of the options; composes nothing and runs nothing.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

from ddbatch.checks import BUILT_JOBS, FREE_DICTS, JOBS, REQUIRED, REQUIRED_BY_JOB, RULES, check_job
from ddbatch.config import option_types
from ddbatch.demo import OUTPUT_DIR

OPTION_TYPES = option_types()
GROUPS = {key.split(".")[0] for key in OPTION_TYPES if "." in key}
SEE_ALL = "python -m ddbatch --cfg job shows every option, --help some examples"

LISTS = {
    key: "[1,2]" if kind == list[int] else "[a,b]"
    for key, kind in OPTION_TYPES.items()
    if kind in (list[int], list[str])
}
TEXTS = [key for key, kind in OPTION_TYPES.items() if kind in (str, str | None)]
TYPE_TEXTS: dict[object, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    str | None: "text or null",
}


class UsageError(ValueError):
    """A refused command line: what is wrong in one line, and what to write instead."""

    def __init__(self, message: str, hint: str = SEE_ALL) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Override:
    """One KEY=VALUE argument: as it was typed, and as it is sent to Hydra."""

    key: str
    typed: str
    sent: str


@dataclass(frozen=True)
class CommandLine:
    """An understood command line. flags go to Hydra; without is_run they only show something.
    is_multirun: every combination of the values with commas is a run."""

    overrides: tuple[Override, ...]
    flags: tuple[str, ...]
    is_run: bool
    is_multirun: bool


def read(arguments: Sequence[str]) -> CommandLine:
    """Sort flags from KEY=VALUE arguments and refuse what cannot be meant."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    try:
        known, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    for word in rest:
        if word.startswith("-"):
            key = word.lstrip("-").partition("=")[0]
            near = closest(key)
            hint = f"options have no dashes: did you mean {near}=VALUE?" if near else SEE_ALL
            raise UsageError(f"{word}: no such flag", hint)
    if known.package is not None and known.package not in GROUPS:
        raise UsageError(
            f"-p {known.package}: no such group", f"groups: {', '.join(sorted(GROUPS))}"
        )
    flags = [f"--{name}={value}" for name, value in _hydra_flags(known) if value is not None]
    if known.resolve:
        flags.append("--resolve")
    # The user's own folder brings groups that are unknown here, chosen with +GROUP=NAME.
    is_extended = known.config_dir is not None
    overrides = tuple(_read_override(word, is_extended) for word in _whole_words(rest))
    _refuse_repeats(overrides)
    is_run = known.cfg is None
    return CommandLine(overrides, tuple(flags), is_run, known.multirun and is_run)


def closest(key: str) -> str | None:
    """The declared option that was probably meant, also when the group is wrong or missing."""
    group, _, name = key.rpartition(".")
    scores: dict[str, float] = {}
    for option in OPTION_TYPES:
        option_group, _, option_name = option.rpartition(".")
        scores[option] = _ratio(name, option_name) + 0.1 * _ratio(group, option_group)
    best = max(scores.values())
    if best < 0.7:
        return None
    return " or ".join(option for option, score in scores.items() if score == best)


def explain(error: Exception, overrides: Sequence[Override]) -> UsageError:
    """Hydra's refusal to compose, in terms of the argument that caused it."""
    text = str(error)
    cause = str(getattr(error, "override", None) or text)
    found = [override for override in overrides if override.sent in cause]
    if not found:
        line = " ".join(re.split("full_key|Config search path", text)[0].split())
        bad_key = re.search(r"full_key: (\S+)", text)
        near = closest(bad_key[1]) if bad_key and bad_key[1] not in OPTION_TYPES else None
        return UsageError(line, f"did you mean {near}?" if near else SEE_ALL)
    override = max(found, key=lambda item: len(item.sent))
    typed = _short(override.typed)
    if "Ambiguous value" in text:
        return UsageError(f"{typed}: one value is expected, not several", _commas_hint(override))
    if getattr(error.__cause__, "full_key", None) is None:
        return UsageError(f"{typed}: Hydra cannot read this value", quoting_hint(override))
    is_text = override.key in TEXTS and not typed.endswith("=null")
    hint = quoting_hint(override) if is_text else SEE_ALL
    return UsageError(f"{typed}: expected {_expected(override.key)}", hint)


def hint_for(message: str, overrides: Sequence[Override]) -> str:
    """A hint for a value that the configuration refused."""
    for override in overrides:
        if "${" in override.typed and override.key in message:
            return quoting_hint(override)
    if message.startswith("required"):
        job = next((item.typed for item in overrides if item.key == "job"), "job=generate")
        required = REQUIRED_BY_JOB.get(job.partition("=")[2], REQUIRED)
        start = ["python -m ddbatch", *([job] if job != "job=generate" else [])]
        places = {"data.path": "DATA"}  # what an option names, where it is no folder
        if job != "job=generate" and Path(OUTPUT_DIR, "manifest.json").is_file():
            places["output_dir"] = OUTPUT_DIR  # of the demo's run, which was given no name
        return " ".join([*start, *(f"{key}={places.get(key, 'DIR')}" for key in required)])
    return SEE_ALL


def as_typed(key: str, value: str) -> str:
    """KEY=VALUE of a text, so that neither the shell nor Hydra reads syntax in it."""
    return shlex.quote(f"{key}={value if _is_plain(value) else _hydra_quoted(value)}")


def quoting_hint(override: Override) -> str:
    """How to write a value so that neither the shell nor Hydra reads it as syntax."""
    key, _, value = override.typed.lstrip("+").partition("=")
    if key in FREE_DICTS:
        return f"quote it for the shell, not its names: '{key}={{enable_thinking: false}}'"
    if key in LISTS:
        items = LISTS[key] if OPTION_TYPES[key] == list[int] else '["a","b"]'
        return f"quote the whole list for the shell, and texts in it: '{key}={items}'"
    value = value.replace("\\${", "${")
    if len(value) > 60 or "\n" in value:
        return f"quote the value for the shell and for Hydra: '{key}=\"VALUE\"'"
    quoted = f"{key}={_hydra_quoted(value)}"
    if '"' in value and not any(mark in value for mark in ("'", "${")):
        quoted = f"{key}='{value}'"  # easier to read
    return f"quote the value for the shell and for Hydra: {_shell_quoted(quoted)}"


def _hydra_flags(known: argparse.Namespace) -> list[tuple[str, str | None]]:
    names = ("cfg", "package", "config-dir")
    return [(name, getattr(known, name.replace("-", "_"))) for name in names]


def _whole_words(words: Sequence[str]) -> Sequence[str]:
    """Refuse an argument that is no KEY=VALUE, with the most likely reason."""
    is_split = False
    for word in words:
        if "=" in word or re.match(r"~\w", word):
            is_split = is_split or sum(map(word.count, "{[(")) > sum(map(word.count, "}])"))
        elif is_split:
            hint = "the shell has split a value at its spaces: put the argument in quotes"
            raise UsageError(f"{word}: not of the form KEY=VALUE", hint + ", 'KEY={a: 1, b: 2}'")
        elif word in OPTION_TYPES:
            hint = f"write {word}=VALUE, without spaces around ="
            raise UsageError(f"{word}: not of the form KEY=VALUE", hint)
        elif word in ("help", "version"):
            raise UsageError(f"{word}: not of the form KEY=VALUE", f"write --{word}")
        elif word in JOBS:
            raise UsageError(f"{word}: not of the form KEY=VALUE", f"write job={word}")
        else:
            near = get_close_matches(word, JOBS, n=1)
            guess = f"job={near[0]}" if near else f"data.path={word}"
            raise UsageError(f"{word}: not of the form KEY=VALUE", f"did you mean {guess}?")
    return words


def _read_override(typed: str, is_extended: bool) -> Override:
    body = typed.lstrip("+~")
    prefix = typed[: len(typed) - len(body)]
    key, _, value = body.partition("=")
    group = key.split(".")[0]
    if key == "job" and value not in JOBS and prefix != "~":
        check_job(value)
    if group.split("/")[0] == "hydra":
        hint = "--config-dir=DIR adds a folder of your own YAML files"
        raise UsageError(f"{key}: the settings of Hydra itself are fixed", hint)
    if key in REQUIRED and value == "null" and not prefix:
        return Override(key, typed, f"{key}=???")  # their types have no null, which says: not set
    is_free = any(key == free or key.startswith(free + ".") for free in FREE_DICTS)
    if is_free and prefix != "~":
        return Override(key, typed, f"++{key}={value}")
    if key in OPTION_TYPES or is_free:
        _refuse_prefix(prefix, key, value)
        if key in TEXTS and key != "job" and _is_plain(value):
            return Override(key, typed, f'{key}="{value}"')
    elif not (is_extended and prefix and "." not in key):
        _refuse_unknown(key, value, group)
    return Override(key, typed, typed)


def _is_plain(value: str) -> bool:
    """Whether a text may be put in quotes: Hydra would read 2024_06 as a number, and refuse ~ or !.

    Brackets, quotes, commas and = are left to Hydra's grammar, which the user may have meant.
    """
    is_syntax = re.search(r"[\"'\\{}\[\](),=]|^\s|\s$", value) is not None
    return value != "" and value.lower() != "null" and not is_syntax


def _hydra_quoted(value: str) -> str:
    """A text in Hydra's quotes; backslashes count only where they precede a quote or ${."""
    escaped = re.sub(r"(\\*)(\$\{)", r"\1\1\\\2", value)
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', escaped)
    return '"' + re.sub(r"(\\+)$", r"\1\1", escaped) + '"'


def _refuse_prefix(prefix: str, key: str, value: str) -> None:
    if prefix == "~":
        raise UsageError(f"~{key}: an option cannot be removed", "leave it out to get its default")
    if prefix:
        hint = f"write {_shell_quoted(f'{key}={value}')} without {prefix}"
        raise UsageError(f"{prefix}{key}: {key} is an option already", hint)


def _refuse_unknown(key: str, value: str, group: str) -> None:
    if key in GROUPS:
        hint = f"write {key}.NAME=VALUE; python -m ddbatch --cfg job -p {key} lists the names"
        if f"{key}.path" in OPTION_TYPES:
            hint = f"write {_shell_quoted(f'{key}.path={value}')}"
        raise UsageError(f"{key}={_short(value)}: {key} is a group of options", hint)
    if group in JOBS and group not in BUILT_JOBS:
        built = ", ".join(BUILT_JOBS)
        raise UsageError(f"{key}: job={group} is not built yet; built: {built}")
    near = closest(key)
    raise UsageError(f"{key}: no such option", f"did you mean {near}?" if near else SEE_ALL)


def _refuse_repeats(overrides: Sequence[Override]) -> None:
    first: dict[str, str] = {}
    for override in overrides:
        if override.key in first:
            pair = f"{_short(first[override.key])} and {_short(override.typed)}"
            hint = "keep one of them"
            if override.key in FREE_DICTS:
                hint += f"; if the shell made two of one, quote it: '{override.key}={{a: 1, b: 2}}'"
            raise UsageError(f"{override.key} is given twice: {pair}", hint)
        first[override.key] = override.typed


def _commas_hint(override: Override) -> str:
    if override.key in LISTS:
        value = override.typed.partition("=")[2]
        return f"write a list: '{override.key}=[{value}]'"
    if override.key in TEXTS:
        return quoting_hint(override)
    return "-m runs once per value, with an output_dir for each"


def _expected(key: str) -> str:
    if key in LISTS:
        return f"a list like {LISTS[key]}" + (f" of {RULES[key]}" if key in RULES else "")
    kind = OPTION_TYPES.get(key)
    null = " or null" if kind == int | None else ""
    return (str(RULES[key]) if key in RULES else TYPE_TEXTS.get(kind, "another type")) + null


def _ratio(typed: str, declared: str) -> float:
    return SequenceMatcher(None, typed.lower(), declared).ratio()


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."


def _shell_quoted(text: str) -> str:
    if re.fullmatch(r"[\w./:=+%@,-]+", text):
        return text
    return f"'{text}'" if "'" not in text else '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
