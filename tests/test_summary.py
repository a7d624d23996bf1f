"""The summary of a run: the plans that served, the most used first, and what chose them."""

from __future__ import annotations

import re
from typing import cast

import pytest
from fake import FakeDecoder, FakeOptions

from ddbatch.core import EngineStats, ShapePlan
from ddbatch.jobs.generating.decoder import Decoder
from ddbatch.jobs.generating.summary import print_summary
from ddbatch.jobs.generating.tally import Tally

PLAIN = ShapePlan(rows=64, nodes=1, block=1, draft_depth=0, topk=0)
TREE = ShapePlan(rows=16, nodes=9, block=16, draft_depth=8, topk=8)
LONE = ShapePlan(rows=1, nodes=1, block=1, draft_depth=0, topk=0)
OTHERS = [ShapePlan(rows=rows, nodes=5, block=5, draft_depth=4, topk=4) for rows in (8, 4, 2)]


class Made(FakeDecoder):
    """An engine that had these rounds."""

    def __init__(self, counts: dict[ShapePlan, int], choice: str | None) -> None:
        super().__init__(FakeOptions())
        self.counts, self.choice = counts, choice

    @property
    def rounds(self) -> dict[ShapePlan, int]:
        return self.counts

    @property
    def figures(self) -> EngineStats:
        row_rounds = sum(plan.rows * count for plan, count in self.counts.items())
        return EngineStats(sum(self.counts.values()), row_rounds, row_rounds // 4)


def summary(
    capsys: pytest.CaptureFixture[str], counts: dict[ShapePlan, int], choice: str | None = None
) -> dict[str, str]:
    """What is said of each name; long lines are joined."""
    print_summary("out", Tally(0), cast(Decoder, Made(counts, choice)), 1.0, [])
    text = re.sub(r"\n +", " ", capsys.readouterr().out)
    return dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({PLAIN: 1234}, "64 rows x 1 node in 1,234 rounds"),
        ({TREE: 1}, "16 rows x 9 nodes in 1 round"),
        ({LONE: 4}, "1 row x 1 node in 4 rounds"),
        ({TREE: 8, PLAIN: 1000}, "64 rows x 1 node in 1,000 rounds, 16 x 9 in 8"),
        (
            dict.fromkeys(OTHERS, 1000) | {LONE: 7, PLAIN: 2000, TREE: 8},
            "64 rows x 1 node in 2,000 rounds, 8 x 5 in 1,000, 4 x 5 in 1,000, 2 x 5 in 1,000, "
            "2 more in 15",
        ),
    ],
)
def test_plans_are_told_by_their_rounds(
    capsys: pytest.CaptureFixture[str], counts: dict[ShapePlan, int], expected: str
) -> None:
    said = summary(capsys, counts)["plan"]
    assert re.fullmatch(re.escape(expected) + r", 2[45].\d% of row-rounds useful", said)


def test_what_chose_the_plans_is_told_where_there_was_a_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    why = "plain decoding, 64 rows: 1.00 tokens a round at 3.2 ms"
    assert summary(capsys, {PLAIN: 9, TREE: 3}, why)["chosen last"] == why
    assert "chosen last" not in summary(capsys, {PLAIN: 9, TREE: 3})
    assert not {"plan", "chosen last"} & summary(capsys, {}, why).keys()
