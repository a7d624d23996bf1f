"""Where drafted tokens are accepted, and where they are not: by row, prefix length and rounds since
refill.

Output is right whatever a drafter proposes, so a pair that does not fit, or a drafter whose context
went wrong in some cells of the batch, shows in speed alone. Knows nothing about tensors or text.

Accepted tokens a round, SmolLM2-135M with a DFlash drafter of block 16 (8 prompts) and the embedded
demo pair (24), temperature 0 and 1, float32:

                          SmolLM2, budget 16     chain       demo, budget 16     chain
    sound                    2.42  1.57       1.82  0.95       2.26  1.39      1.48  0.82
    another mask token       0.42  0.33       0.07  0.06       1.98  1.28      1.27  0.73
    mask token 0             0.48  0.33       0.07  0.06       0.32  0.23      0.06  0.05
    rope theta / 10,000      0.47  0.38       0.21  0.15       0.21  0.21      0.04  0.04
    rope theta x 100         1.66  1.24       0.96  0.65       1.22  0.85      0.60  0.41
    each tap a layer off     2.30  1.38       1.79  0.94       1.77  1.14      1.10  0.66
    taps of other layers     0.44  0.34

So the alarm sees what fits as little as chance does, and no mild misfit (a rope theta 100 times too
large costs a third to a half): harder text does as much to a sound pair, and the drafter's own
probabilities fall as acceptance does. Hot or improbable text looks like a misfit: sound pairs
accept 0.02 (SmolLM2) and 0.21 at temperature 2, 0.08 and 0.40 after random prompts at 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ddbatch.core import ShapePlan

Ints = NDArray[np.int64]

# What says nothing: rounds of rows, and the sequences that they belong to. Rounds of one sequence
# are alike, so that sequences count.
MIN_ROUNDS, MIN_SEQUENCES = 1000, 8
# A row departs if its sequences accept under half of what the others' do, by so many standard
# errors: which prompts a row gets is chance. Other cells differ by nature: only a near-total loss
# is one.
ROW_LOSS, ROW_ERRORS = 0.5, 6.0
CELL_LOSS, MIN_CELL_SEQUENCES = 0.2, 32
_NUM_DECILES = 10
_FIRST_ROUNDS = 16  # each is a cell of its own; later ones share cells by powers of two


class AcceptanceTable:
    """Counts of one plan's rounds. max_len: tokens that a sequence may have."""

    def __init__(self, plan: ShapePlan, max_len: int) -> None:
        self._plan, self._max_len = plan, max_len
        round_number = np.arange(max_len + 1)
        octave = np.log2(np.maximum(round_number, _FIRST_ROUNDS) / _FIRST_ROUNDS).astype(np.int64)
        self._cell_of_round = _NUM_DECILES + np.minimum(round_number, _FIRST_ROUNDS + octave)
        self._cells = _Cells(int(self._cell_of_round[-1]) + 1, plan.rows)
        self._rows = _Rows(plan.rows)
        self._told: set[str] = set()

    def add(self, rows: Ints, prefix_lens: Ints, rounds_since_refill: Ints, accepted: Ints) -> None:
        """One round's live rows, each once: accepted drafted tokens of each, its committed tokens
        before the round, and the rounds that its sequence had before this one.

        Leave out rows that end in this round (what they accept is cut) and rows that draw at a
        temperature above 1 (they accept little by nature).
        """
        if self._plan.nodes == 1:
            return  # nothing is drafted
        is_first = rounds_since_refill == 0
        self._rows.add(rows, is_first, accepted)
        deciles = np.minimum(prefix_lens * _NUM_DECILES // self._max_len, _NUM_DECILES - 1)
        cells = np.concatenate((deciles, self._cell_of_round[rounds_since_refill]))
        self._cells.add(cells, rows, is_first, accepted)

    def notes(self) -> list[str]:
        """What a person should know and was not told before: the alarm, or what departs."""
        found = {place: note for place, note in self._findings() if place not in self._told}
        self._told.update(found)
        return list(found.values())

    def _findings(self) -> Iterator[tuple[str, str]]:
        """Where something is wrong, and what."""
        rounds, sequences = self._rows.num_rounds, self._rows.num_sequences
        if rounds < MIN_ROUNDS or sequences < MIN_SEQUENCES:
            return
        mean = self._rows.num_accepted / rounds
        if mean < chance(self._plan):
            yield "everywhere", _alarm(self._plan, mean, rounds)
            return
        for cell, low in self._cells.departing(mean):
            place = self._named(cell)
            yield place, _departure(place, low, f"{mean:.2f} overall")
        rows = self._rows.departing()
        if rows:
            row, low, high = min(rows, key=lambda told: told[1])
            more = f" (and in {len(rows) - 1} more)" if len(rows) > 1 else ""
            place = f"in row {row} of the batch{more}"
            yield "rows", _departure(place, low, f"{high:.2f} in the others")

    def _named(self, cell: int) -> str:
        if cell < _NUM_DECILES:
            low, high = (-(-self._max_len * at // _NUM_DECILES) for at in (cell, cell + 1))
            return f"after {low} to {high - 1} tokens"
        low, high = np.flatnonzero(self._cell_of_round == cell)[[0, -1]].tolist()
        span = f"{low} to {high}" if low < high else low
        return f"after {span} rounds of a sequence"


def chance(plan: ShapePlan) -> float:
    """Accepted tokens a round below which a drafter may as well know nothing of the text: at most
    six tenths of what sound pairs accept at temperature 1, and more than misfits do."""
    return 0.25 + 0.1 * math.log2(max(1, plan.topk))


def _alarm(plan: ShapePlan, mean: float, rounds: int) -> str:
    return (
        f"acceptance is stuck near 1: {1 + mean:.2f} tokens a round over {rounds:,} rounds of "
        f"rows, where a drafter that fits gives more than {1 + chance(plan):.2f}. The output is "
        "right, and slow. Usual causes: a rope theta, mask token or tap layers in the drafter's "
        "config.json that it was not trained with, or another chat mode than in its training "
        "(data.chat_template_kwargs); text that the target itself finds improbable does it too"
    )


def _departure(place: str, low: float, high: str) -> str:
    return (
        f"acceptance {place} is {low:.2f} drafted tokens a round, and {high}; the output is right, "
        "the drafter's share of the engine may not be: please report it"
    )


class _Cells:
    """Of each cell of two axes: rounds, what they accepted, and how often a sequence entered it."""

    def __init__(self, num_cells: int, rows: int) -> None:
        self._rounds = np.zeros(num_cells, np.int64)
        self._accepted = np.zeros(num_cells)
        self._sequences = np.zeros(num_cells, np.int64)
        self._cell_2B = np.full((2, rows), -1)  # where each row was last

    def add(self, cells: Ints, rows: Ints, is_first: NDArray[np.bool_], accepted: Ints) -> None:
        """cells: all of the one axis, then all of the other."""
        num_cells = len(self._rounds)
        self._rounds += np.bincount(cells, minlength=num_cells)
        twice = np.concatenate((accepted, accepted))
        self._accepted += np.bincount(cells, weights=twice, minlength=num_cells)
        cell_2R = cells.reshape(2, -1)
        is_new_2R = (self._cell_2B[:, rows] != cell_2R) | is_first
        self._sequences += np.bincount(cell_2R[is_new_2R], minlength=num_cells)
        self._cell_2B[:, rows] = cell_2R

    def departing(self, mean: float) -> list[tuple[int, float]]:
        """Cells that lose nearly everything, and what they accept."""
        low = self._accepted / np.maximum(self._rounds, 1)
        is_lost = (low < CELL_LOSS * mean) & (self._sequences >= MIN_CELL_SEQUENCES)
        return [(cell, float(low[cell])) for cell in np.flatnonzero(is_lost).tolist()]


class _Rows:
    """Of each row: its sequences, and the sum and sum of squares of their means a round."""

    def __init__(self, rows: int) -> None:
        self._sequences, self._sum, self._squares = (np.zeros(rows) for _ in range(3))
        self._rounds, self._accepted = np.zeros(rows), np.zeros(rows)  # of the sequence in flight
        self.num_rounds = self.num_accepted = self.num_sequences = 0

    def add(self, rows: Ints, is_first: NDArray[np.bool_], accepted: Ints) -> None:
        ended = rows[is_first]
        if len(ended):
            self.num_sequences += len(ended)
            ended = ended[self._rounds[ended] > 0]
            mean = self._accepted[ended] / self._rounds[ended]
            self._sequences[ended] += 1
            self._sum[ended] += mean
            self._squares[ended] += mean**2
            self._rounds[ended] = self._accepted[ended] = 0
        self._rounds[rows] += 1
        self._accepted[rows] += accepted
        self.num_rounds += len(rows)
        self.num_accepted += int(accepted.sum())

    def departing(self) -> list[tuple[int, float, float]]:
        """Rows whose sequences are not like those of the others; their mean and the others'."""
        own = np.maximum(self._sequences, 1)
        others = np.maximum(self._sequences.sum() - self._sequences, 1)
        low = self._sum / own
        high = (self._sum.sum() - self._sum) / others
        variance = (self._squares.sum() - self._squares) / others - high**2
        error = np.sqrt(np.maximum(variance, 0) * (1 / own + 1 / others))
        is_told = np.minimum(own, others) >= MIN_SEQUENCES
        is_lost = is_told & (low < ROW_LOSS * high) & (high - low > ROW_ERRORS * error)
        return [
            (row, float(low[row]), float(high[row])) for row in np.flatnonzero(is_lost).tolist()
        ]
