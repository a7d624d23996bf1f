"""The gemm limit: the most tokens of a round that are known to work, and where that is known from.

A limit belongs to an op on a GPU. Knows nothing about tensors, nor how a limit is found.
"""

from __future__ import annotations

from dataclasses import dataclass

OPTION = "engine.gemm_limit"


@dataclass(frozen=True)
class GemmLimit:
    """tokens: rows x nodes of a round, at most. source: who says so, for people."""

    tokens: int
    source: str

    def __str__(self) -> str:
        if self.source == OPTION:
            return f"{OPTION}={self.tokens}"
        return f"{OPTION}=auto, which is {self.tokens} here ({self.source})"


@dataclass(frozen=True)
class ProbeAnswer:
    """What job=probe found. tokens: the limit, None where no round up to `tried` tokens failed.
    device: its name; date: of the probe, ISO."""

    tokens: int | None
    tried: int
    device: str
    date: str

    def stands_beside(self, later: ProbeAnswer) -> bool:
        """Whether a later probe tells nothing of what this one found: it tried less, and none of
        that failed."""
        if later.tokens is not None:
            return False
        return later.tried <= self.tried if self.tokens is not None else later.tried < self.tried


@dataclass(frozen=True)
class _Known:
    """A limit of an op on GPUs of one compute capability."""

    capability: tuple[int, int]
    op: str
    needs_mla: bool
    tokens: int


# Strided batched products of the MLA absorb step died on B300 at some 1,200 tokens.
_KNOWN = (_Known((10, 3), "MLA absorb", needs_mla=True, tokens=1152),)


def known_limit(capability: tuple[int, int] | None, *, has_mla: bool) -> GemmLimit | None:
    """What the table says of a GPU (None: a CPU) and a model with or without an MLA absorb step."""
    found = [
        known
        for known in _KNOWN
        if known.capability == capability and (has_mla or not known.needs_mla)
    ]
    if not found:
        return None
    least = min(found, key=lambda known: known.tokens)
    name = "".join(map(str, least.capability))
    return GemmLimit(least.tokens, f"the table of known limits: {least.op} on sm_{name}")


def resolve_limit(
    option: int | str | None,
    answer: ProbeAnswer | None,
    capability: tuple[int, int] | None,
    *,
    has_mla: bool,
) -> GemmLimit | None:
    """What engine.gemm_limit means here: its own number; of auto a probe's answer, else the
    table's; None is no limit."""
    if option is None:
        return None
    if isinstance(option, int):
        return GemmLimit(option, OPTION)
    assert option == "auto", option
    if answer is None:
        return known_limit(capability, has_mla=has_mla)
    if answer.tokens is None:
        return None
    return GemmLimit(answer.tokens, f"job=probe on {answer.device}, {answer.date}")
