"""What is measured: a way of decoding at a number of rows, and how both are written.

Knows the words METHOD[:BUDGET[/BLOCK]] and nothing about engines. Imports no torch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ddbatch.checks import RULES

if TYPE_CHECKING:
    from ddbatch.engine.plan import Method

FORMS = "autoregressive, chain[:BUDGET[/BLOCK]] or ddtree[:BUDGET[/BLOCK]]"
MOST_BUDGET = int(RULES["engine.budget"].high)


class Arm(NamedTuple):
    """One way of decoding; budget: None where the method has none of its own; block: of a draft,
    None for the drafter's own."""

    method: Method
    budget: int | None
    rows: int
    block: int | None = None

    @property
    def name(self) -> str:
        """As people read it."""
        name = self.method if self.budget is None else f"{self.method} {self.budget}"
        return name if self.block is None else f"{name}, block {self.block}"

    @property
    def has_drafts(self) -> bool:
        """Whether it needs a drafter."""
        return self.method != "autoregressive"


class Tree(NamedTuple):
    """Budget and block of a draft, as text BUDGET or BUDGET/BLOCK."""

    budget: int
    block: int | None = None

    @classmethod
    def parse(cls, text: str) -> Tree:
        """ValueError where it is none."""
        budget, _, block = text.partition("/")
        return cls(int(budget), int(block) if block else None)


def parse_arm(text: str, rows: int) -> Arm:
    """METHOD, METHOD:BUDGET or METHOD:BUDGET/BLOCK; ValueError where it is none of them."""
    found = re.fullmatch(r"(autoregressive|chain|ddtree)(?::(\d+(?:/\d+)?))?", text)
    if found is None:
        raise ValueError(f"expected {FORMS}")
    names: dict[str, Method] = {
        "autoregressive": "autoregressive",
        "chain": "chain",
        "ddtree": "ddtree",
    }
    method = names[found[1]]
    if found[2] is None:
        return Arm(method, None, rows)
    budget, block = Tree.parse(found[2])
    if method == "autoregressive":
        raise ValueError("autoregressive has no budget; allowed: autoregressive alone")
    if not 1 <= budget <= MOST_BUDGET:
        raise ValueError(f"BUDGET {budget}: expected an integer in [1, {MOST_BUDGET}]")
    if block is not None and block < 2:
        raise ValueError(f"BLOCK {block}: expected an integer >= 2")
    return Arm(method, budget, rows, block)
