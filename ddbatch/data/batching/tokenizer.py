"""What a model's folder says about text: its tokenizer, special tokens and chat template.

Knows the files and where each of them may keep what. Knows nothing about prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, processors

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class ModelText:
    """A tokenizer without padding and truncation, and what its other files say.

    special: the special tokens' texts by their names (bos_token). template_text: the chat template;
    None where there is none.
    """

    tokenizer: Tokenizer
    special: Mapping[str, str]
    eos_token_id: int | None
    template_text: str | None


def read_model_text(model_dir: Path, template: str) -> ModelText:
    """Read a model folder; template is "auto" (the model's), "none" or a jinja file's path."""
    tokenizer = _read_tokenizer(model_dir)
    config = _read_object(model_dir, "tokenizer_config.json")
    special = _special_tokens(model_dir, config)
    _set_raw_text_tokens(model_dir, tokenizer, config, special)
    return ModelText(
        tokenizer=tokenizer,
        special=special,
        eos_token_id=_token_id(model_dir, tokenizer, "eos_token", special),
        template_text=_read_template(model_dir, config, template),
    )


def _bad_file(file: Path, problem: str) -> ValueError:
    return ValueError(
        f"model.path={file.parent}: {file.name} {problem}; "
        "allowed: a model folder with a tokenizer.json"
    )


def _read_tokenizer(model_dir: Path) -> Tokenizer:
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        raise _bad_file(file, "is missing")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise _bad_file(file, f"cannot be read ({error})") from error
    # Both would change ids silently: lengths are our matter.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_object(model_dir: Path, name: str) -> dict[str, object]:
    """A JSON object of the model folder; an absent file says nothing."""
    file = model_dir / name
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _bad_file(file, f"cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise _bad_file(file, "is no JSON object")
    return content


def _special_tokens(model_dir: Path, config: Mapping[str, object]) -> dict[str, str]:
    """The named special tokens as text, from a string or an AddedToken object."""
    older = _read_object(model_dir, "special_tokens_map.json")
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name, older.get(name))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _token_id(
    model_dir: Path, tokenizer: Tokenizer, name: str, special: Mapping[str, str]
) -> int | None:
    """The id of a named special token; one that the vocabulary lacks is a broken folder."""
    if name not in special:
        return None
    token_id = tokenizer.token_to_id(special[name])
    if token_id is None:
        file = model_dir / "tokenizer_config.json"
        raise _bad_file(file, f"names {name} {special[name]!r}, which tokenizer.json lacks")
    return int(token_id)


def _set_raw_text_tokens(
    model_dir: Path, tokenizer: Tokenizer, config: Mapping[str, object], special: Mapping[str, str]
) -> None:
    """Let add_bos_token and add_eos_token, where given, rule over what tokenizer.json adds."""
    wanted = {name: config.get(f"add_{name}") for name in ("bos_token", "eos_token")}
    if not any(isinstance(flag, bool) for flag in wanted.values()):
        return
    ids = {name: _token_id(model_dir, tokenizer, name, special) for name in wanted if wanted[name]}
    bos, eos = (
        [special[name]] if ids.get(name) is not None else [] for name in ("bos_token", "eos_token")
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        special_tokens=[(special[name], ids[name]) for name in ids if ids[name] is not None],
    )


def _read_template(model_dir: Path, config: Mapping[str, object], template: str) -> str | None:
    """The text of the chosen template; None where there is none."""
    if template == "none":
        return None
    if template != "auto":
        return _read_text("data.template", template, Path(template))
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return _read_text("model.path", str(model_dir), file)
    source = config.get("chat_template")
    if isinstance(source, list):
        by_name = {entry.get("name"): entry.get("template") for entry in source}
        source = by_name.get("default")
        if source is None:
            raise ValueError(
                f"data.template='auto': the model has the templates {sorted(map(str, by_name))} "
                "and no default; allowed: a template file"
            )
    return source if isinstance(source, str) else None


def _read_text(option: str, value: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{option}={value}: {file.name} cannot be read ({error}); "
            "allowed for data.template: auto, none or a jinja file"
        ) from error
