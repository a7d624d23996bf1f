"""One worker: takes shards, drives the engine, commits what finishes, until no shard is left.

Knows the order of things. How a row becomes a prompt is told by feed.py, how a part is committed by
the sink, what an engine is by decoder.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ddbatch.core import Completion, Rejected, RunError, Shard
from ddbatch.data.commits import Record, mark_finished, recover
from ddbatch.data.folder import RunFolder
from ddbatch.data.rounds import RoundsLog
from ddbatch.data.sink import Sink
from ddbatch.data.source.log import read_log
from ddbatch.jobs.generating.decoder import Decoder
from ddbatch.jobs.generating.feed import MAX_OPEN_SHARDS, Feed
from ddbatch.jobs.generating.progress import Progress
from ddbatch.jobs.generating.tally import Tally
from ddbatch.jobs.generating.units import Unit
from ddbatch.jobs.stopping import Stop

# So many rows in a row with scores that are not finite mean a broken engine or model.
MAX_NAN_ROWS = 8
# max_error_rate means something once so many rows are read.
MIN_ROWS_FOR_RATE = 1000
# Sequences start with this much room; it is doubled when a longer prompt comes.
_MIN_ROOM = 256


def units_done(
    folder: RunFolder, records: Sequence[Record], shard: Shard, samples: int
) -> NDArray[np.bool_]:
    """Which units are done, [rows, samples]; StateError where records contradict each other.

    Another start may have asked for more samples meanwhile: then others have theirs.
    """
    most = max(
        (block.first_sample + block.num_samples for record in records for block in record.keys),
        default=0,
    )
    known = samples if most <= samples else max(samples, read_log(folder).samples)
    return mark_finished(records, shard, known)[:, :samples]


class Worker:
    """All shards of a run, from `start` on, by one worker.

    Several workers may have the same shards: the first to commit a part keeps its shard, the others
    give it up and come back to it when nothing else is left.
    """

    def __init__(
        self,
        folder: RunFolder,
        shards: Sequence[Shard],
        samples: int,
        feed: Feed,
        decoder: Decoder,
        sink: Sink,
        rounds: RoundsLog,
        tally: Tally,
        progress: Progress,
        *,
        max_len: int,
        max_error_rate: float,
    ) -> None:
        self._folder, self._samples, self._feed, self._decoder = folder, samples, feed, decoder
        self._sink, self._rounds, self._tally, self._progress = sink, rounds, tally, progress
        self._max_len, self._max_error_rate = max_len, max_error_rate
        self._shards = {shard.index: shard for shard in shards}
        self._queue = deque(self._shards)
        self._lost: list[int] = []
        self._num_nan = 0  # in a row
        self._held: list[Unit] = []  # rejected for NaN: kept back until the engine proves sane

    def run(self, stop: Stop) -> None:
        """Work until nothing is left, a signal comes or too many rows are rejected.

        What is finished is committed in any case. RunError where the engine or the disk is broken.
        """
        try:
            while stop.signal_name is None and not self.has_too_many_rejected:
                if not self._turn():
                    self._decoder.finish()
                    break
        finally:
            for shard in self._sink.open_shards():
                self._commit(shard)
            self._rounds.close()

    @property
    def has_too_many_rejected(self) -> bool:
        """Whether output.max_error_rate is passed, of all rows that were read so far.

        Rows in flight count: a bad row is known as such long before its neighbours are finished.
        """
        num_read = self._tally.num_known + self._feed.num_waiting
        return num_read >= MIN_ROWS_FOR_RATE and (
            self._tally.num_rejected > self._max_error_rate * num_read
        )

    def _turn(self) -> bool:
        """One round of the engine and what surrounds it; False when nothing is left to do."""
        feed, decoder = self._feed, self._decoder
        self._open_shards()
        decoder.fill(feed.ready(decoder.max_len))
        is_alive = decoder.is_busy or self._prepare()
        if decoder.is_busy:
            decoder.step()
            for result in decoder.collect():
                self._take(result)
            self._log_round()
        self._settle(feed.take_whole())
        for shard in self._sink.due():
            self._commit(shard)
        self._progress.show(self._tally, decoder.figures.output_tokens)
        return is_alive or bool(self._lost)

    def _prepare(self) -> bool:
        """The engine is idle: get it something to do; False if there is nothing."""
        size = self._feed.next_size()
        if size is not None:
            self._grow(size)
        elif self._held:
            self._release()
        elif self._feed.has_rows or self._queue:
            pass  # a window without a row that can run; the next turn reads on
        elif self._lost:
            self._queue.extend(self._lost)
            self._lost.clear()
        else:
            return False
        return True

    def _log_round(self) -> None:
        plan, figures = self._decoder.plan, self._decoder.figures
        self._rounds.add(
            rows=plan.rows,
            nodes=plan.nodes,
            num_live=figures.live_row_rounds,
            num_emitted=figures.output_tokens,
        )

    def _open_shards(self) -> None:
        """Open the next shard once the open ones are read, up to a limit: refill never waits."""
        while not self._feed.has_rows and self._queue and self._feed.num_open < MAX_OPEN_SHARDS:
            shard = self._shards[self._queue.popleft()]
            records = recover(self._folder, shard.index)
            finished = units_done(self._folder, records, shard, self._samples)
            self._tally.see(records)
            if not finished.all():
                self._sink.open_shard(shard.index, len(records))
                self._feed.open_shard(shard, finished)

    def _take(self, result: Completion | Rejected) -> None:
        if isinstance(result, Rejected):
            self._num_nan += 1
            self._settle(self._feed.take_whole())
            self._feed.reject(result)
            self._held += self._feed.take_whole()
            if self._num_nan >= MAX_NAN_ROWS:
                raise RunError(
                    f"the last {MAX_NAN_ROWS} rows all had scores that are not finite; the model "
                    "or its dtype is at fault, not the rows: none of them is rejected for it"
                )
            return
        self._num_nan = 0
        self._release()
        self._feed.finish(result)

    def _release(self) -> None:
        """The engine works: rows held back for NaN scores are at fault themselves."""
        held, self._held = self._held, []
        self._settle(held)

    def _settle(self, units: Iterable[Unit]) -> None:
        """Put whole units into their shard's part; a shard without anything left is closed."""
        for unit in units:
            if unit.shard not in self._sink.open_shards():
                continue  # given up meanwhile
            self._sink.add(unit.shard, unit.results)
            self._tally.add(unit.shard, unit.results)
            self._feed.settle(unit)
            if self._feed.is_done(unit.shard) or self._sink.is_due(unit.shard):
                self._commit(unit.shard)

    def _commit(self, shard: int) -> None:
        """Commit a shard's part, and close the shard if it is done; give it up if that fails."""
        if not self._sink.has_rows(shard):
            return
        record = self._sink.commit_part(shard)
        if record is None:
            self._tally.forget(shard)
            self._feed.drop_shard(shard)
            self._lost.append(shard)
            return
        self._tally.commit(record)
        if self._feed.is_done(shard):
            self._sink.drop(shard)
            self._feed.close_shard(shard)

    def _grow(self, length: int) -> None:
        """Room for a longer sequence, doubled so that it happens a few times in a run at most: the
        engine drains for it."""
        room = max(_MIN_ROOM, 1 << (length - 1).bit_length())  # a power of two
        self._decoder.grow(max(self._decoder.max_len, min(room, self._max_len)))
