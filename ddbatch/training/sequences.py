"""Sequences to learn from: a prompt, which is only seen, and a response, which is learned.

They come from the completions of a run, so that a drafter learns what its target says. Knows
nothing about models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import torch
from torch import Tensor

_WINDOW = 32  # batches whose sequences are sorted by length together


class Example(NamedTuple):
    """Token ids of a prompt and of the response to it, with the token that ended it."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """B sequences, padded behind with token 0.

    token_BT: int64. start_B, length_B: int64; the response of a row is start..length - 1.
    """

    token_BT: Tensor
    start_B: Tensor
    length_B: Tensor

    def response(self) -> Tensor:
        """bool [B, T]: which places hold a token that is learned."""
        pos_T = torch.arange(self.token_BT.shape[1], device=self.token_BT.device)
        return (pos_T >= self.start_B[:, None]) & (pos_T < self.length_B[:, None])


def read_completions(output_dir: Path) -> Iterator[Example]:
    """What a run has committed; ValueError where it kept no prompt_token_ids."""
    files = sorted((output_dir / "completions").glob("*.parquet"))
    if not files:
        raise ValueError(f"{output_dir}: no completions there; the output_dir of a run is expected")
    columns = ["prompt_token_ids", "output_token_ids"]
    for file in files:
        table = pq.ParquetFile(file)
        missing = set(columns) - set(table.schema_arrow.names)
        if missing:
            raise ValueError(
                f"{file.name}: no column {', '.join(sorted(missing))}; a run with "
                "output.store=[prompt_ids,...] is expected"
            )
        for row in table.read(columns).to_pylist():
            yield Example(row["prompt_token_ids"], row["output_token_ids"])


class Sequences:
    """Examples in one flat list of ids, dealt out as batches of similar lengths."""

    def __init__(self, examples: Iterable[Example], *, max_len: int) -> None:
        """Keep the first max_len tokens of each; what has no response within them is left out.

        ValueError where nothing is left.
        """
        flat: list[int] = []
        starts, ends = [], [0]
        for prompt_ids, response_ids in examples:
            ids = [*prompt_ids, *response_ids][:max_len]
            if len(ids) > len(prompt_ids):
                flat += ids
                starts.append(len(prompt_ids))
                ends.append(len(flat))
        if not starts:
            raise ValueError(f"no example has a response within its first {max_len} tokens")
        self._token_X = torch.tensor(flat, dtype=torch.int32)
        self._start_N = torch.tensor(starts, dtype=torch.int64)
        self._end_N = torch.tensor(ends, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._start_N)

    @property
    def num_learned(self) -> int:
        """Response tokens in all."""
        return len(self._token_X) - int(self._start_N.sum())

    def num_batches(self, rows: int) -> int:
        """Batches of one pass; the last may have fewer rows."""
        return -(-len(self) // rows)

    def batches(
        self, rows: int, generator: torch.Generator, device: torch.device
    ) -> Iterator[Batch]:
        """One pass in random order. Neighbours are sorted by length, so that little is padding."""
        order = torch.randperm(len(self), generator=generator)
        length_N = self._end_N.diff()
        groups = []
        for window in order.split(rows * _WINDOW):
            groups += window[length_N[window].argsort()].split(rows)
        for number in torch.randperm(len(groups), generator=generator).tolist():
            yield self._batch(groups[number], device)

    def _batch(self, chosen_B: Tensor, device: torch.device) -> Batch:
        first_B, end_B = self._end_N[chosen_B], self._end_N[chosen_B + 1]
        length_B = end_B - first_B
        pos_T = torch.arange(int(length_B.max()))
        is_there_BT = pos_T < length_B[:, None]
        place_BT = (first_B[:, None] + pos_T).clamp(max=len(self._token_X) - 1)
        token_BT = self._token_X[place_BT].long() * is_there_BT
        return Batch(token_BT.to(device), self._start_N[chosen_B].to(device), length_B.to(device))
