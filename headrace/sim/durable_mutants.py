"""Planted mistakes in durability: the journal, the log and its fence, snapshots, recovery. See mutants.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.core import (
    coordinator,
    engine,
    epoch,
    events,
    journal,
    log_records,
    outcome,
    restore,
    sequencing,
    source_batches,
    state,
)
from headrace.core.later import deferred
from headrace.core.ordered import executor
from headrace.durability import keeper, migration, recovery
from headrace.durability.log import changelog, frames, log, records, segments, takeover
from headrace.durability.snapshots import layers, manifests, snapshots
from headrace.model import cron
from headrace.sim.mutants import Mutant
from headrace.sim.writers import simulate_writers
from headrace.wire.values import same

# --- the journal ------------------------------------------------------------------------------------------------------


def answers_at_once(right: Any) -> Any:
    return lambda self, position: True


def forgets_decrees(right: Any) -> Any:
    """A reply waits for its epoch, but not for the notes that were logged while it ran."""
    return lambda self, position: self.durable >= position


def notes_nothing(right: Any) -> Any:
    def note(self: journal.Journal, record: Any) -> None:
        if not isinstance(record, log_records.Decree):
            right(self, record)

    return note


def keeps_at_once(right: Any) -> Any:
    def keep(self: journal.Journal) -> None:
        while self.unkept:
            self.effects.append(events.Keep(self.unkept.popleft()))

    return keep


def saves_at_once(right: Any) -> Any:
    def save(self: journal.Journal) -> None:
        self.follows_from, unkept = 0, self.unkept
        self.unkept = deque()
        right(self)
        self.unkept = unkept

    return save


def drops_failed_snapshots(right: Any) -> Any:
    def failed(self: journal.Journal) -> Any:
        promised = right(self)
        self.carried = []
        return promised

    return failed


def reads_unchecked(right: Any) -> Any:
    return lambda self, ticket: True


class Alias(dict[str, Any]):
    """Changes whose states are read when they are written, not when they were made."""

    def __init__(self, changed: dict[str, Any], tables: Any) -> None:
        super().__init__(changed)
        self.tables = tables

    def items(self) -> Any:
        return [(name, {key: self.tables[name].get(key) for key in delta}) for name, delta in super().items()]


def aliases_the_snapshot(right: Any) -> Any:
    def take_snapshot(self: Any, now_us: int, changed: Any) -> None:
        right(self, now_us, Alias(changed, self.state.tables) if isinstance(changed, dict) else changed)

    return take_snapshot


def reads_on_too_late(right: Any) -> Any:
    """A recovery starts reading one record too late."""

    def take(self: journal.Journal, now_us: int, changed: Any, epoch: int, position: int, metadata: Any) -> None:
        right(self, now_us, changed, epoch, position + 1, metadata)

    return take


# --- what a snapshot holds, and how it is restored --------------------------------------------------------------------


def leaves_out(name: str, instead: Any) -> Any:
    def plant(right: Any) -> Any:
        return lambda self, *given: msgspec.structs.replace(right(self, *given), **{name: instead})

    return plant


def knows_no_replies(right: Any) -> Any:
    return lambda self, *given: []


def restores_no_timers(right: Any) -> Any:
    return lambda self, described: None


def forgets_last_moments(right: Any) -> Any:
    def restore_(self: deferred.Deferred, described: dict[str, Any]) -> None:
        right(self, described)
        self.cursors.clear()

    return restore_


def makes_up_for_all(right: Any) -> Any:
    """A schedule fires for each time that was missed, not only for the last."""

    def before(self: cron.Interval, at_us: int, since_us: int) -> int | None:
        return cron.Interval.after(self, since_us) if right(self, at_us, since_us) is not None else None

    return before


def counts_from_the_start(right: Any) -> Any:
    return lambda self, tid: -1


def uses_todays_limits(right: Any) -> Any:
    def decode(self: Any, number: int, data: bytes, batches: Any) -> Any:
        logged = right(self, number, data, batches)
        if hasattr(logged.record, "limits"):
            logged.record.limits = None
        return logged._replace(limits=self.limits if logged.limits is not None else None)

    return decode


def believes_in_replies(right: Any) -> Any:
    """Epochs with recorded replies are not run again: their state is missing."""

    def replay(given: Any, left: restore.Restored) -> None:
        known = {number for number in left.recorded if number <= max(left.recorded) - 1}
        kept = [each for each in left.records if getattr(each.record, "number", None) not in known]
        right(given, left._replace(records=kept))

    return replay


def begins_at_term_nought(right: Any) -> Any:
    def init(self: Any, *given: Any, term: int = 0, **named: Any) -> None:
        right(self, *given, term=0, **named)

    return init


# --- the log and its fence --------------------------------------------------------------------------------------------


def never_looks(right: Any) -> Any:
    return lambda self: None


def checks_then_appends(right: Any) -> Any:
    def append(self: Any, payloads: list[bytes]) -> int:
        self._check_fence()
        self._check_fence = lambda: None
        try:
            return int(right(self, payloads))
        finally:
            del self._check_fence

    return append


def reads_then_announces(right: Any) -> Any:
    """The end of the log is found before the new term is announced."""

    def announce(store: Any, name: str, owner: str) -> int:
        refs = segments.refs_in(store, name)
        term = max(takeover.highest_term(store, name), *(ref.term for ref in refs), 0) + 1
        found = segments.find_chain_with_retry(store, name)
        end = takeover.find_end(store, name, found)
        made = right(store, name, owner)
        if made == term:
            store.stale = name, found, end
        return int(made)

    return announce


def uses_what_was_read(right: Any) -> Any:
    def find_end(store: Any, folder: str, found: Any) -> Any:
        stale = getattr(store, "stale", None)
        if stale is not None and stale[0] == folder:
            found.refs[:] = stale[1].refs
            return stale[2]
        return right(store, folder, found)

    return find_end


def never_syncs(right: Any) -> Any:
    def grow(self: Any, payloads: list[bytes]) -> None:
        sync, self.store.sync = self.store.sync, lambda name: None
        try:
            right(self, payloads)
        finally:
            self.store.sync = sync

    return grow


def trusts_the_cache(right: Any) -> Any:
    """Records found at the end of the log count as durable: nothing is written again."""

    def find_end(store: Any, folder: str, found: Any) -> Any:
        end = right(store, folder, found)
        return end._replace(end=end.loose[-1].end, last=end.loose[-1].number, loose=[]) if end.loose else end

    return find_end


def checks_no_sums(right: Any) -> Any:
    def decode_frame(seed: int, offset: int, raw: Any) -> Any:
        try:
            return right(seed, offset, raw)
        except frames.BadFrame as error:
            if "checksum" not in error.why:
                raise
        _, _, kind, _, length, number, term, synced = frames._HEAD.unpack_from(raw)
        end = frames.HEAD_BYTES + length
        return frames.LogFrame(kind, number, term, synced, bytes(raw[frames.HEAD_BYTES : end]), offset, offset + end)

    return decode_frame


# --- snapshots in the store -------------------------------------------------------------------------------------------


def folds_backwards(right: Any) -> Any:
    def fold_all(given: Sequence[Any], is_base: bool) -> Any:
        return right(given[::-1], is_base)

    return fold_all


def applies_backwards(right: Any) -> Any:
    def tables(self: Any, manifest: Any) -> Any:
        found: Any = {}
        for layer in reversed(manifest.layers):
            for stored in layer.objects:
                layers.apply(manifests.read_object(self.store, manifest.snapshot_id, stored), found)
        return {operator: table for operator, table in found.items() if table}

    return tables


def deletes_at_once(right: Any) -> Any:
    """What a snapshot makes unnecessary is deleted as soon as it is saved: before the log says so, and without a check
    of the fence."""

    def save(self: Any, snapshot: Any) -> Any:
        news, opened_store = right(self, snapshot), self.opened_store
        if isinstance(news[0], events.Saved):
            opened_store.log._check_fence = lambda: None
            try:
                opened_store.log.retire(snapshot.position)
            finally:
                del opened_store.log._check_fence
        return news

    return save


def writes_without_a_term(right: Any) -> Any:
    return lambda self: f"{self.epoch:016}-{0:08}-{self.number:04}"


def publishes_first(right: Any) -> Any:
    """The manifest is written before the objects it names."""

    def write_layer(self: Any, snapshot_id: Any, files: Any, sharding: str, written: list[str]) -> Any:
        store, later = self.store, []

        class Lazy:
            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            def put(self, name: str, data: bytes) -> None:
                later.append((name, data))

            def create(self, name: str, data: bytes) -> bool:
                if name.startswith(manifests.OBJECTS):
                    later.append((name, data))
                    return True
                is_made = bool(store.create(name, data))
                for each in later:
                    store.put(*each)
                later.clear()
                return is_made

        if not isinstance(store, Lazy) and type(store).__name__ != "Lazy":
            self.store = Lazy()
        return right(self, snapshot_id, files, sharding, written)

    return write_layer


# --- the changelog ----------------------------------------------------------------------------------------------------


def logs_what_aborted(right: Any) -> Any:
    def changes_of(self: Any, part: Any) -> Any:
        aborted, self.aborted = self.aborted, set()
        try:
            return right(self, part)
        finally:
            self.aborted = aborted

    return changes_of


def hears_one_less(right: Any) -> Any:
    """The changes of an epoch are kept before the last worker has sent its own."""

    def expect(self: Any, epoch: int, workers: Any) -> None:
        right(self, epoch, list(workers)[:1])

    return expect


def looks_too_late(right: Any) -> Any:
    """The state before an epoch is read after it was overwritten."""

    def take(self: Any) -> Any:
        found = right(self)
        return {
            name: changed._replace(befores=[self.tables[name].get(key) for key in changed.keys])
            for name, changed in found.items()
        }

    return take


def leaps_over_gaps(right: Any) -> Any:
    def start(self: Any, epoch: int, closed_us: int, operators: Any, loads: Any) -> None:
        if self._newest is not None and self.kept < epoch:
            self.kept = epoch
        right(self, epoch, closed_us, operators, loads)

    return start


# --- newer versions of the app ----------------------------------------------------------------------------------------


def compares_bytes(right: Any) -> Any:
    """A field that an older version did not have counts as a difference."""
    return lambda older, now, values: same(older, now)


def fills_in_nothing(right: Any) -> Any:
    """The state stays as the older version wrote it."""
    return lambda tables, *given: tables


def takes_calls_first(right: Any) -> Any:
    """Calls of a step come before the timers that are due."""
    return lambda self, now_us: None if self.incoming else right(self, now_us)


def sees_no_calls(right: Any) -> Any:
    """Calls that wait in the open epoch get the time at which it is full, or has room."""
    return lambda self: False


def takes_calls_in_a_replay(right: Any) -> Any:
    """Calls are logged before all timers of the log are known."""

    def inherit(self: engine.Engine) -> None:
        right(self)
        self.replayed = self.journal.earliest

    return inherit


DURABLE_MUTANTS = (
    Mutant("a reply leaves before its record is durable", journal.Journal, "covers", answers_at_once, 1),
    Mutant("a reply does not wait for decrees and responses", journal.Journal, "covers", forgets_decrees, 10),
    Mutant("decrees are not logged", journal.Journal, "note", notes_nothing, 33),
    Mutant("replies are kept before their records are durable", journal.Journal, "_keep", keeps_at_once, 1),
    Mutant("a snapshot is saved of what is not durable", journal.Journal, "_save", saves_at_once, 74),
    Mutant("a snapshot that failed is forgotten", journal.Journal, "failed", drops_failed_snapshots, 19),
    Mutant("state leaves without a look at the fence", journal.Journal, "has_checked", reads_unchecked, 119),
    Mutant("a snapshot is an alias of the state", engine.Engine, "take_snapshot", aliases_the_snapshot, 27),
    Mutant("a recovery begins one record late", journal.Journal, "take", reads_on_too_late, 9),
    Mutant("request ids are not in the snapshot", recovery.OpenedStore, "_replies", knows_no_replies),
    Mutant(
        "source batches are not in the snapshot", source_batches.SourceBatches, "describe", leaves_out("last", {}), 1
    ),
    Mutant("timers are not in the snapshot", deferred.Deferred, "restore", restores_no_timers, 35),
    Mutant("firings that aborted are not in the snapshot", deferred.Deferred, "describe", leaves_out("spent", {}), 24),
    Mutant("a schedule forgets when it was last due", deferred.Deferred, "restore", forgets_last_moments, 4),
    Mutant("a schedule makes up for every moment it missed", cron.Interval, "before", makes_up_for_all, 4),
    Mutant("calls come before timers that are due", engine.Engine, "defer", takes_calls_first, 259),
    Mutant("calls that wait are timed after a timer that is due", epoch.Epoch, "has_calls", sees_no_calls, 146),
    Mutant("calls are logged before the replay has ended", engine.Engine, "inherit", takes_calls_in_a_replay, 146),
    Mutant("the counter of TIDs is not in the snapshot", sequencing.Sequencing, "describe", leaves_out("lc", 0), 4),
    Mutant("the number of rows is not in the snapshot", sequencing.Sequencing, "describe", leaves_out("row", 0)),
    Mutant("TIDs begin again after a recovery", sequencing.Sequencer, "count_at", counts_from_the_start),
    Mutant("a replay uses today's limits", records.Records, "decode", uses_todays_limits, 0),
    Mutant("what was answered is not run again", restore, "replay", believes_in_replies, 2),
    Mutant(
        "workers of an earlier coordinator are heard", coordinator.Coordinator, "__init__", begins_at_term_nought, 14
    ),
    Mutant("the changelog holds what was undone", executor.OrderedExecutor, "changes_of", logs_what_aborted, 16),
    Mutant("changes are kept before all were told", coordinator.Coordinator, "_expect_changes", hears_one_less, 3),
    Mutant("changes begin with what they ended with", state.State, "take_changes", looks_too_late, 2),
    Mutant("a changelog hides that it was off", changelog.ChangeWriter, "start", leaps_over_gaps, 32),
    Mutant("a reply of an older version counts as another", outcome, "same_renewed", compares_bytes, 60),
    Mutant("a call of an older version counts as another", engine, "same_renewed", compares_bytes, 38),
    Mutant("a change of an older version counts as another", changelog, "same_renewed", compares_bytes, 260),
    Mutant("the state of an older version stays as it was", migration, "fill", fills_in_nothing, 451),
    Mutant("the log has no fence", log.Log, "_check_fence", never_looks, 4),
    Mutant("the log checks its fence, and then writes", log.Log, "append", checks_then_appends, 263),
    Mutant("the log is not synced", log.Log, "_grow", never_syncs),
    Mutant("who takes over trusts the page cache", takeover, "find_end", trusts_the_cache, 12),
    Mutant("checksums of the log are not compared", frames, "decode_frame", checks_no_sums, 12),
    Mutant("deltas are folded out of order", snapshots, "fold_all", folds_backwards, 9),
    Mutant("deltas are loaded out of order", snapshots.Snapshots, "_tables", applies_backwards, 4),
    Mutant("what is old is deleted before the log says so", keeper.StoreWork, "save", deletes_at_once, 1502),
    Mutant("objects of snapshots do not carry the term", manifests.SnapshotId, "_stem", writes_without_a_term),
    Mutant("a manifest is there before what it names", snapshots.Snapshots, "_write_layer", publishes_first, 348),
    Mutant(
        "who takes over reads, and then announces itself",
        takeover,
        "announce",
        reads_then_announces,
        10,
        simulate_writers,
        (Mutant("", takeover, "find_end", uses_what_was_read),),
    ),
)
