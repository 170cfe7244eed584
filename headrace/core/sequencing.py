"""Sequencing: which TID a transaction gets, and when an epoch closes.

Rules:
1. `tid = sid + lc * n_seq`: sequencer `sid` of `n_seq` counts by itself (Styx 5.1), and no two give the same TID.
2. With several sequencers, each moves up to the largest counter seen after each epoch, so that an idle one does not
   give out TIDs below those that others have used (Styx 5.1, balancing).
3. An epoch closes when it is full, in transactions or bytes, or `epoch_interval_us` after its first transaction. Its
   closing time is the time of all its transactions. It never goes back, even if the clock does.

Never here: what the transactions do.
"""

from __future__ import annotations

from headrace.config import Config
from headrace.core.epoch import CLOSED, Batch, Epoch
from headrace.core.origin import FromClient
from headrace.core.snapshot_metadata import SequencingMetadata

TID_MAX = (1 << 63) - 1


class Sequencer:
    """One of `n_seq` sequencers, which number transactions without communicating."""

    def __init__(self, sid: int = 1, n_seq: int = 1, lc: int = 0) -> None:
        if not 1 <= sid <= n_seq:
            raise ValueError(f"a sequencer's id is 1 to {n_seq}, not {sid}")
        self.sid, self.n_seq, self.lc = sid, n_seq, lc

    def take(self, count: int) -> range:
        """The next TIDs."""
        first = self.sid + self.lc * self.n_seq
        last = first + (count - 1) * self.n_seq
        if last > TID_MAX:
            raise OverflowError(f"TID {last} does not fit into 63 bits")
        self.lc += count
        return range(first, last + 1, self.n_seq)

    def count_at(self, tid: int) -> int:
        """The counter from which this TID was taken."""
        return (tid - self.sid) // self.n_seq

    def level(self, largest_lc: int) -> None:
        """After an epoch: continue from the largest counter of all sequencers."""
        self.lc = max(self.lc, largest_lc)

    @classmethod
    def above(cls, sid: int, n_seq: int, largest_tid: int) -> Sequencer:
        """A sequencer after their number changed: it starts above every TID given so far."""
        return cls(sid, n_seq, -(-largest_tid // n_seq))


class Sequencing:
    """Puts admitted transactions into epochs."""

    def __init__(self, config: Config, sequencer: Sequencer | None = None) -> None:
        self.transactions_max, self.interval_us = config.epoch_transactions_max, config.epoch_interval_us
        self.bytes_max = config.epoch_bytes_max
        self.sequencer = sequencer or Sequencer()
        self.open = Epoch(1, 0, 0)
        self.last_us = 0  # when the last epoch was closed
        self.least_us = 0  # the open one is not closed with an earlier time: some of its rows were due then

    def add(self, batch: Batch, start: int, now_us: int, position: int = 0) -> int:
        """Add rows of the batch, from `start`, to the open epoch; returns how many it had room for. `position` is that
        of the record of a source's batch."""
        epoch = self.open
        if not epoch.keys:
            epoch.opened_us = now_us
        stop = min(len(batch), start + self.transactions_max - len(epoch))
        if batch.sizes is not None:
            for at in range(start, stop):
                epoch.bytes += batch.sizes[at]
                if epoch.bytes >= self.bytes_max:
                    stop = at + 1
                    break
        epoch.has_ids |= isinstance(batch.origin, FromClient)
        epoch.stored.append(batch.origin.stored)
        epoch.carried.append(None if batch.carried is None else batch.carried[start:stop])
        epoch.entries += batch.entries[start:stop]
        epoch.keys += batch.keys[start:stop]
        epoch.args += batch.args[start:stop]
        epoch.pieces.append(batch.piece(start, stop, position))
        return stop - start

    def is_full(self) -> bool:
        return len(self.open) >= self.transactions_max or self.open.bytes >= self.bytes_max

    def is_due(self, now_us: int) -> bool:
        return len(self.open) > 0 and now_us >= self.open.opened_us + self.interval_us

    def close(self, now_us: int) -> Epoch:
        """Close the open epoch: its transactions get their TIDs. The next one opens."""
        epoch = self.open
        epoch.tids = self.sequencer.take(len(epoch))
        self.last_us = max(now_us, self.last_us, self.least_us)
        epoch.enter(CLOSED)
        epoch.closed_us = self.last_us
        self.open = Epoch(epoch.number + 1, epoch.first + len(epoch), now_us)
        return epoch

    # --- snapshots and replay ---

    def describe(self, following: Epoch, last: Epoch | None) -> SequencingMetadata:
        """For a snapshot between two epochs: the last that ran, if any did, and the one that follows."""
        is_open = following is self.open
        lc = self.sequencer.lc if is_open else self.sequencer.count_at(following.tids.start)
        return SequencingMetadata(following.first, lc, self.last_us if last is None else last.closed_us)

    def restore(self, metadata: SequencingMetadata, epoch: int) -> None:
        """Continue after this epoch."""
        self.sequencer.lc, self.last_us = metadata.lc, metadata.closed_us
        self.open = Epoch(epoch + 1, metadata.row, 0)

    def follow(self, epoch: Epoch) -> None:
        """Continue after an epoch of the log."""
        self.sequencer.lc = self.sequencer.count_at(epoch.tids[-1]) + 1
        self.last_us = epoch.closed_us
        self.open = Epoch(epoch.number + 1, epoch.first + len(epoch), epoch.closed_us)
