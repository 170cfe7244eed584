"""Source batches: a batch is taken once, however often its source repeats it.

Rule: the batches of a source are numbered without gaps, and the last one of each source is remembered.

Never here: where their rows are stored.
"""

from __future__ import annotations

from headrace.config import Config
from headrace.core.egress import Submission
from headrace.core.epoch import Batch, Epoch
from headrace.core.origin import FromSource
from headrace.core.snapshot_metadata import SourceMetadata, SourcesMetadata
from headrace.errors import ReplyExpired, StreamError
from headrace.wire.messages import Failure

ONCE = "write-"  # prefix of sources of one batch, which are not repeated once they ran


class SourceBatches:
    """The last batch of each source, such as a streaming query."""

    def __init__(self, config: Config) -> None:
        self.sources_max = config.sources_max
        self.last: dict[str, tuple[int, Submission]] = {}  # the longest idle source comes first
        self.has_forgotten = False  # whether any source was ever forgotten

    def last_of(self, source: str) -> int:
        """The number of its last batch; -1 if there was none, or the source is forgotten."""
        known = self.last.get(source)  # other threads call this too
        return -1 if known is None else known[0]

    def take(self, origin: FromSource, submission: Submission, rows: int) -> Submission | None:
        """Take a batch of `rows` rows. Returns None if it is new; otherwise returns the submission of its first run. If
        this engine may have forgotten the source, `origin.after` says which batch ran last. A source that knows that a
        batch ran does not send its rows, so such a batch is never new."""
        source, number = origin.batch_id
        forgotten = origin.after if self.has_forgotten else -1
        last, ran = self.last.get(source, (forgotten, None))
        if number == last and ran is not None:
            return ran
        if number <= last:  # its name was still in the inbox, or the source went back too far
            past = Submission(None, submission.ids, submission.refused)
            past.refuse(EXPIRED, rows)
            return past
        if number != last + 1 or number <= origin.after:
            raise gap(source, number, last)
        self.last.pop(source, None)
        self._keep(source, number, submission)
        return None

    def again(self, batch: Batch) -> Submission:
        """Take a batch from the log. Returns where its rows went, as far as that is known by now."""
        assert isinstance(batch.origin, FromSource)
        source, number = batch.origin.batch_id
        known, submission = self.last.pop(source, (-1, None))  # the longest idle source comes first
        if submission is None or known != number:
            submission = Submission.of(None, batch)
        self._keep(source, number, submission)
        return submission

    def _keep(self, source: str, number: int, submission: Submission) -> None:
        self.last[source] = (number, submission)
        if len(self.last) > self.sources_max:
            self.has_forgotten = True
            final = [each for each, (_, ran) in self.last.items() if ran.is_final()]
            del self.last[next((each for each in final if each.startswith(ONCE)), (final or list(self.last))[0])]

    def describe(self, first: int) -> SourcesMetadata:
        """What a snapshot keeps: each source's last batch, and the places of its rows in epochs before number `first`.
        Later rows are read from the log."""
        last = {}
        for source, (number, submission) in self.last.items():
            ranges = [
                (epoch.number if isinstance(epoch, Epoch) else 0, start, stop)
                for epoch, start, stop in submission.ranges
                if isinstance(epoch, Failure) or epoch.number < first
            ]
            last[source] = SourceMetadata(number, submission.ids, submission.refused, ranges)
        return SourcesMetadata(last, self.has_forgotten)

    def restore(self, metadata: SourcesMetadata, epochs: dict[int, Epoch]) -> None:
        """`epochs` are those whose replies are still kept; rows of others get a failure."""
        self.has_forgotten = metadata.has_forgotten
        for source, last in metadata.last.items():
            submission = Submission(None, last.ids, last.refused)
            for number, start, stop in last.stretches:
                if number in epochs:
                    submission.add(epochs[number], start, stop)
                else:
                    submission.refuse(EXPIRED, stop - start)
            self.last[source] = (last.number, submission)


def gap(source: str, number: int, last: int) -> StreamError:
    return StreamError(
        f"query {source} sent batch {number}, but {last + 1} was expected: its checkpoint belongs to another run of "
        "this app, whose state is gone. Start the query with a new checkpoint location"
    )


EXPIRED = Failure(
    ReplyExpired.code, ReplyExpired.__name__, "the batch ran, but its replies are no longer kept (reply_retention_us)"
)
