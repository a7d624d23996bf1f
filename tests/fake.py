"""An engine of known speed and lengths, without tensors: what a run does around an engine.

Completions are a pure function of prompt ids and sample, as greedy decoding's are. As a program,
`python tests/fake.py KEY=VALUE ...` is ddbatch with this engine; the variable FAKE holds
FakeOptions as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from made_logprobs import made_logprobs
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from ddbatch.core import Completion, EngineStats, Rejected, ShapePlan, StopFinder, TokenPrompt
from ddbatch.jobs.generating.trials import Trials

VOCAB = 97
EOS = 1
FAILURE = "the engine broke"
TEMPLATE = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Words w0.. w92, `<s>`, `</s>` and roles, one id each: text and ids say the same."""
    words = ["<s>", "</s>", "user", "assistant", *(f"w{number}" for number in range(VOCAB - 4))]
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A model folder for the fake engine: a tokenizer, a config, and weights that say nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, template)
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 80})
    )
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


@dataclass(frozen=True)
class FakeOptions:
    """step_seconds: of a round. nan_ids: a prompt that ends with one of them gets no finite score.
    fail_at_step: the engine breaks there. steps_file: gets a byte with every round. found: what it
    notes at its end."""

    rows: int = 4
    context: int = 80
    step_seconds: float = 0.0
    nan_words: tuple[int, ...] = ()
    fail_at_step: int | None = None
    steps_file: str | None = None
    dtype: str = "float32"
    found: dict[str, object] = field(default_factory=dict)


@dataclass
class _Sequence:
    prompt: TokenPrompt
    token_ids: list[int]
    stop_string: str | None = None
    num_done: int = 1
    accepted: list[int] = field(default_factory=list)


class FakeDecoder:
    """A static batch that finishes rows in an order of its own."""

    def __init__(
        self,
        options: FakeOptions,
        finder: StopFinder | None = None,
        top_logprobs: int | None = None,
    ) -> None:
        self._options, self._finder, self._top_logprobs = options, finder, top_logprobs
        self._live: list[_Sequence] = []
        self._ready: deque[_Sequence] = deque()
        self._results: list[Completion | Rejected] = []
        self._figures = [0, 0, 0, 0]
        self.about: dict[str, object] = {}
        self.found = dict(options.found)
        self.choice: str | None = None
        self.plan = ShapePlan(rows=options.rows, nodes=5, block=4, draft_depth=3, topk=4)
        self.max_len = 0
        self.notes: list[str] = []
        self.seconds_judged = 0.0
        self.grown: list[int] = []

    def grow(self, max_len: int) -> None:
        assert not self.is_busy
        assert max_len >= self.max_len
        self.max_len = max_len
        self.grown.append(max_len)

    def fill(self, prompts: Iterator[TokenPrompt]) -> None:
        if not self.max_len:
            return
        while len(self._live) + len(self._ready) < 2 * self._options.rows:
            prompt = next(prompts, None)
            if prompt is None:
                break
            assert len(prompt.token_ids) + prompt.max_new_tokens <= self.max_len, prompt
            self._ready.append(self._sequence(prompt))
            self._figures[3] += 1
        while self._ready and len(self._live) < self._options.rows:
            self._live.append(self._ready.popleft())

    @property
    def is_busy(self) -> bool:
        return bool(self._live or self._ready)

    def step(self) -> None:
        time.sleep(self._options.step_seconds)
        self._figures[0] += 1
        self._figures[1] += self._options.rows
        if self._figures[0] == self._options.fail_at_step:
            raise RuntimeError(FAILURE)
        if self._options.steps_file is not None:
            with open(self._options.steps_file, "a") as file:
                file.write(".")
        for sequence in list(self._live):
            left = len(sequence.token_ids) - sequence.num_done
            if left:
                emitted = min(left, 1 + (sequence.num_done + sequence.token_ids[0]) % 4)
                sequence.accepted.append(emitted - 1)
                sequence.num_done += emitted
                self._figures[2] += 1
                self._figures[3] += emitted
            if sequence.num_done == len(sequence.token_ids):
                self._live.remove(sequence)
                self._results.append(self._result(sequence))

    @property
    def rounds(self) -> dict[ShapePlan, int]:
        return {self.plan: self._figures[0]}

    def collect(self) -> Iterator[Completion | Rejected]:
        while self._results:
            yield self._results.pop()

    def finish(self) -> None:
        assert not self.is_busy

    @property
    def figures(self) -> EngineStats:
        return EngineStats(*self._figures)

    def _sequence(self, prompt: TokenPrompt) -> _Sequence:
        """What will be said up to the first stop: strings are looked for after every token."""
        stop, stop_ids = prompt.sampling.stop, prompt.sampling.stop_token_ids
        watch = self._finder.watch(stop) if self._finder and stop else None
        ids: list[int] = []
        for token_id in answer(prompt):
            ids.append(token_id)
            if token_id in stop_ids:
                break
            match = watch([token_id]) if watch else None
            if match is not None:
                return _Sequence(prompt, ids, match.string)
        return _Sequence(prompt, ids)

    def _result(self, sequence: _Sequence) -> Completion | Rejected:
        prompt = sequence.prompt
        if set(prompt.token_ids) & set(self._options.nan_words):
            return Rejected(prompt.key, "nan_logits", "a score is not finite")
        last = sequence.token_ids[-1]
        is_stop_id = last in prompt.sampling.stop_token_ids
        top = self._top_logprobs
        return Completion(
            key=prompt.key,
            token_ids=tuple(sequence.token_ids),
            finish_reason="stop" if is_stop_id or sequence.stop_string else "length",
            stop_token_id=last if is_stop_id else None,
            accepted=tuple(sequence.accepted),
            depth=(3,) * len(sequence.accepted),
            drafted=(4,) * len(sequence.accepted),
            seconds=0.5,
            slot=0,
            stop_string=sequence.stop_string,
            logprobs=None if top is None else made_logprobs(sequence.token_ids, top, VOCAB),
        )


def answer(prompt: TokenPrompt) -> list[int]:
    """The ids that the fake target says after a prompt: a few, or up to the cap where the model's
    own stop token is ignored."""
    chance = random.Random(repr((prompt.token_ids, prompt.key.sample, prompt.key.turn)))
    length = min(1 + int(chance.expovariate(1 / 6)), prompt.max_new_tokens)
    ids = [chance.randrange(4, VOCAB) for _ in range(length)]
    if length < prompt.max_new_tokens:
        ids[-1] = EOS
        ids += [chance.randrange(4, VOCAB) for _ in range(prompt.max_new_tokens - length)]
    return ids


@dataclass(frozen=True)
class FakePair:
    """The protocol Pair. top_logprobs: None = no log-probabilities."""

    options: FakeOptions
    top_logprobs: int | None = None
    vocab: int = VOCAB
    eos_token_ids: tuple[int, ...] = (EOS,)
    recommended: tuple[str, ...] = ()

    @property
    def context(self) -> int:
        return self.options.context

    @property
    def dtype(self) -> str:
        return self.options.dtype

    @property
    def about(self) -> dict[str, object]:
        return {"device": "fake", "dtype": self.dtype, "rows": self.options.rows}

    def load(self, num_rows: int, finder: StopFinder, trials: Trials) -> FakeDecoder:
        return FakeDecoder(self.options, finder, self.top_logprobs)


def run(config: Any, options: FakeOptions | None = None) -> int:
    """The job of a configuration; generate with the fake engine."""
    import importlib

    from ddbatch.jobs import generate

    chosen = options or FakeOptions()
    if config.job == "generate":
        top = config.sampling.top_logprobs if config.sampling.logprobs else None
        return generate.generate(config, lambda config, eos: FakePair(chosen, top))
    code: int = importlib.import_module(f"ddbatch.jobs.{config.job}").run(config)
    return code


if __name__ == "__main__":
    from ddbatch.__main__ import main

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup, and send it
    given = json.loads(os.environ.get("FAKE", "{}"))
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    code = main(sys.argv[1:], lambda config: run(config, FakeOptions(**given)))
    assert "torch" not in sys.modules, "a run with the fake engine must not import torch"
    sys.exit(code)
