"""Turn prompts into token ids, and token ids back into text: PromptEncoder.

Knows the choice of chat template and what a prompt of each kind becomes. Knows nothing about input
files, and of the model only its vocabulary size and the longest prompt it can take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Literal

import jinja2
from tokenizers import Tokenizer

from ddbatch.core import Prompt, Rejected
from ddbatch.data.batching.columns import Columns, Fault, PromptKind, dump_json, has_surrogates
from ddbatch.data.batching.messages import Message
from ddbatch.data.batching.template import ChatTemplate
from ddbatch.data.batching.tokenizer import read_model_text

OnLong = Literal["reject", "truncate_left"]

# Names that a render call sets itself.
_RESERVED = ("messages", "tools", "add_generation_prompt")
# Texts tokenised at a time: some for every core, and not too many of the library's bulky results.
_BATCH_TEXTS = 128


@dataclass(frozen=True)
class Encoded:
    """The ids of a prompt. num_dropped: ids that truncate_left cut off at its head."""

    token_ids: tuple[int, ...]
    num_dropped: int = 0


@dataclass(frozen=True)
class PromptEncoder:
    """A tokenizer with its chat template. Build with from_folder.

    template_text: the chat template as it was read. template_option: data.template as given, for
    messages. bos_token: the text of the token, if the tokenizer has one. eos_token_id: the
    tokenizer's own; a model may stop on others too.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    template_text: str | None
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
        template_date: datetime | None = None,
        chat_template_kwargs: dict[str, object] | None,
        system_prompt: str | None,
    ) -> PromptEncoder:
        """Read a model folder; template is "auto" (the model's), "none" or a jinja file's path.

        template_date: the moment that a template is told as now; None = this one.
        """
        text = read_model_text(model_dir, template)
        kwargs = chat_template_kwargs or {}
        for name in _RESERVED:
            if name in kwargs:
                raise ValueError(
                    f"data.chat_template_kwargs={kwargs}: {name} is set by ddbatch; "
                    "allowed: the template's other variables"
                )
        unused = {"system_prompt": system_prompt, "chat_template_kwargs": kwargs or None}
        for option, value in unused.items():
            if text.template_text is None and value is not None:
                raise ValueError(
                    f"data.{option}={value}: there is no chat template to use it "
                    f"(data.template={template}); allowed: null, or set a template"
                )
        compiled = None
        if text.template_text is not None:
            now = template_date or datetime.now()
            variables = {**text.special, **kwargs}
            compiled = _compile(model_dir, template, text.template_text, variables, now)
        return cls(
            tokenizer=text.tokenizer,
            template=compiled,
            template_text=text.template_text,
            template_option=template,
            system_prompt=system_prompt,
            bos_token=text.special.get("bos_token"),
            eos_token_id=text.eos_token_id,
        )

    def check_columns(self, columns: Columns) -> None:
        """Refuse, before the first row is read, columns that the options do not go with."""
        self._check(columns.kind, columns.tools_column is not None)

    def encode(
        self,
        prompt: Prompt,
        *,
        vocab_size: int,
        max_prompt_len: int,
        on_long: OnLong,
        cut_to: int | None = None,
    ) -> Encoded | Rejected:
        """The ids of one prompt. Of one above max_prompt_len truncate_left keeps the last cut_to
        (None = max_prompt_len) ids."""
        (encoded,) = self.encode_many(
            [prompt],
            vocab_size=vocab_size,
            max_prompt_len=max_prompt_len,
            on_long=on_long,
            cut_to=None if cut_to is None else [cut_to],
        )
        return encoded

    def encode_many(
        self,
        prompts: Sequence[Prompt],
        *,
        vocab_size: int,
        max_prompt_len: int,
        on_long: OnLong,
        cut_to: Sequence[int] | None = None,
    ) -> list[Encoded | Rejected]:
        """What encode makes of each prompt, tokenised on all cores; cut_to: one a prompt."""
        cut_to = [max_prompt_len] * len(prompts) if cut_to is None else cut_to
        assert all(0 < cut <= max_prompt_len for cut in cut_to), f"{cut_to} of {max_prompt_len}"
        found: list[Encoded | Rejected] = []
        for prompt, ids, cut in zip(prompts, self._ids(prompts), cut_to, strict=True):
            result: Encoded | Fault
            if isinstance(ids, Fault):
                result = ids
            else:
                result = _fault_of_stop_ids(prompt, vocab_size) or _checked(
                    ids, vocab_size, max_prompt_len, cut, on_long
                )
            if isinstance(result, Fault):
                code, reason = result
                found.append(Rejected(prompt.key, code, reason, prompt.user_id, prompt.raw_json))
            else:
                found.append(result)
        return found

    def render(self, prompt: Prompt) -> str | Fault:
        """The text that a prompt of text or messages becomes, template included."""
        kind: PromptKind = "text" if prompt.messages_json is None else "messages"
        self._check(kind, prompt.tools_json is not None)
        if self.template is None:
            assert prompt.text is not None, f"{prompt.key}: a prompt without text or messages"
            return prompt.text
        tools = None if prompt.tools_json is None else json.loads(prompt.tools_json)
        messages = self.conversation(prompt)
        return self.template.render(messages, tools, is_continued=prompt.is_continued)

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

    def conversation_json(self, prompt: Prompt) -> str | None:
        """The messages that the model sees as JSON; a prompt of token ids has none."""
        return None if prompt.token_ids is not None else dump_json(self.conversation(prompt))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids; bytes that are no whole character become U+FFFD."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def _check(self, kind: PromptKind, has_tools: bool) -> None:
        """Refuse a kind of prompt that the options do not go with."""
        if kind == "token_ids" and self.system_prompt is not None:
            raise ValueError(
                f"data.system_prompt={self.system_prompt}: a prompt of token ids is taken as it "
                "is; allowed: null"
            )
        needs = {"messages": kind == "messages", "tools (data.tools_column)": has_tools}
        for what, is_needed in needs.items():
            if is_needed and self.template is None:
                raise ValueError(
                    f"data.template={self.template_option}: the input has {what} and there is no "
                    "chat template; allowed: a template file, or auto where the model has one"
                )

    def _ids(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...] | Fault]:
        """Ids of every prompt, before they are checked."""
        parts = [self._ids_or_text(prompt) for prompt in prompts]
        texts = [part for part in parts if isinstance(part, str)]
        batches = (
            self._tokenise(texts[first : first + _BATCH_TEXTS])
            for first in range(0, len(texts), _BATCH_TEXTS)
        )
        ids = chain.from_iterable(batches)
        return [next(ids) if isinstance(part, str) else part for part in parts]

    def _ids_or_text(self, prompt: Prompt) -> tuple[int, ...] | str | Fault:
        if prompt.token_ids is not None:
            self._check("token_ids", prompt.tools_json is not None)
            return prompt.token_ids
        text = self.render(prompt)
        if isinstance(text, str) and has_surrogates(text):
            return Fault("bad_text", "the prompt holds a lone surrogate")
        return text

    def _tokenise(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids with one BOS: a template writes its own, raw text that has none gets one."""
        is_raw = self.template is None
        found = []
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=is_raw)
        for text, encoding in zip(texts, encodings, strict=True):
            ids = tuple(encoding.ids)
            if is_raw and self.bos_token and text.startswith(self.bos_token):
                ids = ids[1:] if ids[:1] == ids[1:2] else ids
            found.append(ids)
        return found


def _fault_of_stop_ids(prompt: Prompt, vocab_size: int) -> Fault | None:
    """A row's own stop token must be one that the model can emit."""
    for token_id in prompt.sampling.stop_token_ids or ():
        if token_id >= vocab_size:
            reason = f"stop_token_ids: {token_id} is outside 0..{vocab_size - 1}"
            return Fault("bad_sampling", reason)
    return None


def _checked(
    ids: tuple[int, ...], vocab_size: int, max_prompt_len: int, cut_to: int, on_long: OnLong
) -> Encoded | Fault:
    """The ids when the model can take them."""
    if not ids:
        return Fault("empty_prompt", "the prompt has no tokens")
    if min(ids) < 0 or max(ids) >= vocab_size:
        position = next(at for at, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        where = f"token {ids[position]} at position {position}"
        return Fault("token_out_of_range", f"{where} is outside 0..{vocab_size - 1}")
    if len(ids) <= max_prompt_len:
        return Encoded(ids)
    if on_long == "reject":
        return Fault("prompt_too_long", f"{len(ids)} tokens, the limit is {max_prompt_len}")
    return Encoded(ids[-cut_to:], num_dropped=len(ids) - cut_to)


def _compile(
    model_dir: Path, template: str, source: str, variables: Mapping[str, object], now: datetime
) -> ChatTemplate:
    try:
        return ChatTemplate(source, variables=variables, now=now)
    except jinja2.TemplateError as error:
        origin = f"model.path={model_dir}, " if template == "auto" else ""
        raise ValueError(
            f"{origin}data.template={template}: the chat template does not compile ({error}); "
            "allowed: auto, none or a jinja file"
        ) from error
