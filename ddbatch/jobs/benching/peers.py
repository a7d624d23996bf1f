"""Other libraries decoding the same prompts with the same target, to stand beside our arms.

Knows how transformers and vLLM are called; neither is a dependency, and each is imported once it is
asked for. Knows nothing about engines of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddbatch.core import TokenPrompt
from ddbatch.jobs.benching.calls import Outputs, Pass
from ddbatch.jobs.benching.steady import finish

PeerRun = Callable[[Sequence[TokenPrompt]], Pass]
# Of the device's free memory; what engines of ours hold by then is not free.
VLLM_SHARE = 0.8


class Peers:
    """The libraries that were asked for, their models loaded once; rows are chosen later.

    max_len: prompt and output tokens of the longest sequence.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
    ) -> None:
        self._names, self._folder, self._max_len = names, folder, max_len
        self._dtype, self._device = dtype, device
        has_model = "transformers" in names
        self._model = load_transformers(folder, dtype, device) if has_model else None

    @property
    def num_arms(self) -> int:
        """At each number of rows."""
        ways = 0 if self._model is None else len(transformers_ways(self._device))
        return ways + ("vllm" in self._names)

    def arms(self, rows: int) -> dict[str, PeerRun]:
        """Ways to decode with so many rows at a time, by name."""
        found: dict[str, PeerRun] = {}
        if self._model is not None:
            for name, cache in transformers_ways(self._device).items():
                found[name] = partial(run_transformers, self._model, rows=rows, cache=cache)
        if "vllm" in self._names:
            model = load_vllm(self._folder, self._dtype, self._device, rows, self._max_len)
            found["vllm"] = partial(run_vllm, model)
        return found


def transformers_ways(device: torch.device) -> dict[str, str | None]:
    """Names of its arms and the caches that they use; for a static one it compiles on CUDA."""
    static = "transformers static" + (", compiled" if device.type == "cuda" else "")
    return {"transformers": None, static: "static"}


def load_transformers(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The same target in Hugging Face transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    return model.to(device).eval()


@torch.inference_mode()
def run_transformers(model: Any, work: Sequence[TokenPrompt], rows: int, cache: str | None) -> Pass:
    """One pass of `generate` over full batches, padded on the left to one width; cache: which."""
    from transformers import GenerationConfig

    configure: Any = GenerationConfig  # its constructor has no hints
    stop, cap = work[0].sampling.stop_token_ids, work[0].max_new_tokens
    # Given to the model, not to the call: a call's None would mean the model's own stop token.
    model.generation_config = configure(
        do_sample=False,
        max_new_tokens=cap,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
        cache_implementation=cache,
    )
    width = max(len(prompt.token_ids) for prompt in work)
    outputs: Outputs = []
    started = time.perf_counter()
    for first in range(0, len(work), rows):
        batch = [prompt.token_ids for prompt in work[first : first + rows]]
        ids = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in batch])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch])
        made = model.generate(ids.to(model.device), attention_mask=mask.to(model.device))
        outputs += [cut(tuple(line), stop) for line in made[:, width:].tolist()]
    finish(model.device)
    return _pass(outputs, time.perf_counter() - started)


def cut(token_ids: tuple[int, ...], stop: tuple[int, ...]) -> tuple[int, ...]:
    """What stands up to the first stop token, that one included."""
    end = next((place for place, token in enumerate(token_ids) if token in stop), len(token_ids))
    return token_ids[: end + 1]


def load_vllm(
    folder: Path, dtype: torch.dtype, device: torch.device, rows: int, max_len: int
) -> Any:
    """The same target in vLLM with as many sequences at a time, no prefix shared between them."""
    import vllm

    make: Any = vllm.LLM
    options: dict[str, object] = {}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info(device)
        options["gpu_memory_utilization"] = VLLM_SHARE * free / whole
    return make(
        model=str(folder),
        dtype=str(dtype).removeprefix("torch."),
        max_num_seqs=rows,
        max_model_len=max_len,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **options,
    )


def run_vllm(model: Any, work: Sequence[TokenPrompt]) -> Pass:
    """One pass of `generate` over all prompts, greedy and to the cap."""
    import vllm

    configure: Any = vllm.SamplingParams
    sampling = configure(
        temperature=0.0,
        max_tokens=work[0].max_new_tokens,
        stop_token_ids=list(work[0].sampling.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in work]
    started = time.perf_counter()
    made = model.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    return _pass([tuple(line.outputs[0].token_ids) for line in made], seconds)


def _pass(outputs: Outputs, seconds: float) -> Pass:
    return Pass(sum(map(len, outputs)) / seconds, seconds, None, None, None, None, outputs)
