"""Turn prompts into token ids, and token ids back into text: PromptEncoder.

Knows the tokenizer's files, its special tokens and the choice of chat template. Knows nothing about
input files, and of the model only its vocabulary size and the longest prompt it can take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import jinja2
from tokenizers import Tokenizer, processors

from ddbatch.core import Prompt, Rejected
from ddbatch.data.columns import Fault, has_surrogates
from ddbatch.data.template import ChatTemplate, Message

OnLong = Literal["reject", "truncate_left"]

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Names that a render call sets itself.
_RESERVED = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True)
class PromptEncoder:
    """A tokenizer with its chat template. Build with from_folder.

    template_option: data.template as given, for messages. bos_token: the text of the token, if the
    tokenizer has one. eos_token_id: the tokenizer's own; a model may stop on others too.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    template_option: str
    system_prompt: str | None
    bos_token: str | None
    eos_token_id: int | None

    @classmethod
    def from_folder(
        cls,
        model_dir: Path,
        *,
        template: str = "auto",
        chat_template_kwargs: dict[str, object] | None,
        system_prompt: str | None,
    ) -> PromptEncoder:
        """Read a model folder; template is "auto" (the model's), "none" or a jinja file's path."""
        tokenizer = _read_tokenizer(model_dir)
        config = _read_object(model_dir, "tokenizer_config.json")
        special = _special_tokens(model_dir, config)
        _set_raw_text_tokens(model_dir, tokenizer, config, special)
        source = _read_template(model_dir, config, template)
        kwargs = chat_template_kwargs or {}
        for name in _RESERVED:
            if name in kwargs:
                raise ValueError(
                    f"data.chat_template_kwargs={kwargs}: {name} is set by ddbatch; "
                    "allowed: the template's other variables"
                )
        unused = {"system_prompt": system_prompt, "chat_template_kwargs": kwargs or None}
        for option, value in unused.items():
            if source is None and value is not None:
                raise ValueError(
                    f"data.{option}={value}: there is no chat template to use it "
                    f"(data.template={template}); allowed: null, or set a template"
                )
        variables = {**special, **kwargs}
        return cls(
            tokenizer=tokenizer,
            template=None if source is None else _compile(model_dir, template, source, variables),
            template_option=template,
            system_prompt=system_prompt,
            bos_token=special.get("bos_token"),
            eos_token_id=_token_id(model_dir, tokenizer, "eos_token", special),
        )

    def encode(
        self,
        prompt: Prompt,
        *,
        vocab_size: int,
        max_prompt_len: int,
        on_long: OnLong,
        cut_to: int | None = None,
    ) -> tuple[int, ...] | Rejected:
        """The ids of one prompt. Of one above max_prompt_len truncate_left keeps the last cut_to
        (None = max_prompt_len) ids."""
        cut_to = max_prompt_len if cut_to is None else cut_to
        assert 0 < cut_to <= max_prompt_len, f"cut_to={cut_to}, max_prompt_len={max_prompt_len}"
        ids = self._ids(prompt)
        if not isinstance(ids, Fault):
            ids = _checked(ids, vocab_size, max_prompt_len, cut_to, on_long)
        if isinstance(ids, Fault):
            return Rejected(prompt.key, ids.code, ids.reason, prompt.user_id, prompt.raw_json)
        return ids

    def render(self, prompt: Prompt) -> str | Fault:
        """The text that a prompt of text or messages becomes, template included."""
        if prompt.messages_json is None:
            assert prompt.text is not None, f"{prompt.key}: a prompt without text or messages"
            if self.template is None:
                return prompt.text
        elif self.template is None:
            raise ValueError(
                f"data.template={self.template_option}: the input has messages and there is "
                "no chat template; allowed: a template file, or auto where the model has one"
            )
        tools = None if prompt.tools_json is None else json.loads(prompt.tools_json)
        return self.template.render(self.conversation(prompt), tools)

    def conversation(self, prompt: Prompt) -> list[Message]:
        """The messages that the model sees: a text is one user turn, data.system_prompt comes
        first where the row has no system turn of its own."""
        if prompt.messages_json is None:
            messages: list[Message] = [{"role": "user", "content": prompt.text}]
        else:
            messages = json.loads(prompt.messages_json)
        if self.system_prompt is not None and all(
            turn.get("role") != "system" for turn in messages
        ):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids; bytes that are no whole character become U+FFFD."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def _ids(self, prompt: Prompt) -> tuple[int, ...] | Fault:
        if prompt.token_ids is not None:
            if self.system_prompt is not None:
                raise ValueError(
                    f"data.system_prompt={self.system_prompt}: a prompt of token ids is taken as "
                    "it is; allowed: null"
                )
            return prompt.token_ids
        text = self.render(prompt)
        if isinstance(text, Fault):
            return text
        if has_surrogates(text):
            return Fault("bad_text", "the prompt holds a lone surrogate")
        # A template writes its own BOS; raw text gets the tokenizer's, unless it starts with one.
        has_template = self.template is not None
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=not has_template).ids)
        if not has_template and self.bos_token and text.startswith(self.bos_token):
            ids = ids[1:] if ids[:1] == ids[1:2] else ids
        return ids


def _checked(
    ids: tuple[int, ...], vocab_size: int, max_prompt_len: int, cut_to: int, on_long: OnLong
) -> tuple[int, ...] | Fault:
    """The ids when the model can take them."""
    if not ids:
        return Fault("empty_prompt", "the prompt has no tokens")
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            where = f"token {token_id} at position {position}"
            return Fault("token_out_of_range", f"{where} is outside 0..{vocab_size - 1}")
    if len(ids) <= max_prompt_len:
        return ids
    if on_long == "reject":
        return Fault("prompt_too_long", f"{len(ids)} tokens, the limit is {max_prompt_len}")
    return ids[-cut_to:]


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


def _compile(
    model_dir: Path, template: str, source: str, variables: Mapping[str, object]
) -> ChatTemplate:
    try:
        return ChatTemplate(source, variables=variables, now=datetime.now())
    except jinja2.TemplateError as error:
        origin = f"model.path={model_dir}, " if template == "auto" else ""
        raise ValueError(
            f"{origin}data.template={template}: the chat template does not compile ({error}); "
            "allowed: auto, none or a jinja file"
        ) from error
