"""Source batches: a batch is taken once, however often its source repeats it.

Rule: the batches of a query are numbered without gaps, and the last one of each query is remembered.

Never here: where their rows are stored.
"""

from __future__ import annotations

from headrace.config import Config
from headrace.core.egress import Submission
from headrace.core.epoch import Batch, Epoch
from headrace.core.snapshot_metadata import SourceMetadata, SourcesMetadata
from headrace.errors import ReplyExpired, StreamError
from headrace.wire.messages import Failure

ONCE = "write-"  # prefix of one-batch queries, which are not repeated once they ran


class SourceBatches:
    """The last batch of each streaming query."""

    def __init__(self, config: Config) -> None:
        self.queries_max = config.queries_max
        self.last: dict[str, tuple[int, Submission]] = {}  # the longest idle query comes first
        self.has_forgotten = False  # whether any query was ever forgotten

    def last_of(self, query: str) -> int:
        """The number of its last batch; -1 if there was none, or the query is forgotten."""
        known = self.last.get(query)  # other threads call this too
        return -1 if known is None else known[0]

    def take(self, source: tuple[str, int], submission: Submission, rows: int, after: int = -1) -> Submission | None:
        """Take a batch of so many rows. Returns None if it is new, else the submission that ran. `after` is the last
        batch that ran, according to the source: it counts if this query may have been forgotten. A source that knows
        that the batch ran does not send its rows, so it is never new."""
        query, batch = source
        forgotten = after if self.has_forgotten else -1
        last, ran = self.last.get(query, (forgotten, None))
        if batch == last and ran is not None:
            return ran
        if batch <= last:  # its name was still in the inbox, or the query went back too far
            past = Submission(None, submission.ids, submission.refused)
            past.refuse(EXPIRED, rows)
            return past
        if batch != last + 1 or batch <= after:
            raise gap(query, batch, last)
        self.last.pop(query, None)
        self._keep(query, batch, submission)
        return None

    def again(self, batch: Batch) -> Submission:
        """Take a batch from the log. Returns where its rows went, as far as that is known by now."""
        assert batch.source is not None
        query, number = batch.source
        known, submission = self.last.pop(query, (-1, None))  # the longest idle query comes first
        if submission is None or known != number:
            submission = Submission.of(None, batch)
        self._keep(query, number, submission)
        return submission

    def _keep(self, query: str, batch: int, submission: Submission) -> None:
        self.last[query] = (batch, submission)
        if len(self.last) > self.queries_max:
            self.has_forgotten = True
            final = [each for each, (_, ran) in self.last.items() if ran.is_final()]
            del self.last[next((each for each in final if each.startswith(ONCE)), (final or list(self.last))[0])]

    def describe(self, first: int) -> SourcesMetadata:
        """What a snapshot keeps: each query's last batch, and the places of its rows in epochs before number `first`.
        Later rows are read from the log."""
        last = {}
        for query, (batch, submission) in self.last.items():
            stretches = [
                (epoch.number if isinstance(epoch, Epoch) else 0, start, stop)
                for epoch, start, stop in submission.stretches
                if isinstance(epoch, Failure) or epoch.number < first
            ]
            last[query] = SourceMetadata(batch, submission.ids, submission.refused, stretches)
        return SourcesMetadata(last, self.has_forgotten)

    def restore(self, metadata: SourcesMetadata, epochs: dict[int, Epoch]) -> None:
        """`epochs` are those whose replies are still kept; rows of others get a failure."""
        self.has_forgotten = metadata.has_forgotten
        for query, last in metadata.last.items():
            submission = Submission(None, last.ids, last.refused)
            for number, start, stop in last.stretches:
                if number in epochs:
                    submission.add(epochs[number], start, stop)
                else:
                    submission.refuse(EXPIRED, stop - start)
            self.last[query] = (last.number, submission)


def gap(query: str, batch: int, last: int) -> StreamError:
    return StreamError(
        f"query {query} sent batch {batch}, but {last + 1} was expected: its checkpoint belongs to another run of this "
        "app, whose state is gone. Start the query with a new checkpoint location"
    )


EXPIRED = Failure(
    ReplyExpired.code, ReplyExpired.__name__, "the batch ran, but its replies are no longer kept (reply_retention_us)"
)
