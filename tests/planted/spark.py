"""Mistakes that break the promises of the section "Spark"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "Every row of a stream is one transaction, with one reply.",
        "headrace/spark/transact.py",
        "rows = df.select(*columns_of(df, wanted), *carried(carry))",
        "rows = df.select(*columns_of(df, wanted), *carried(carry)).dropDuplicates()",
    ),
    Mistake(
        "The rows of a Spark partition keep their order.",
        "headrace/spark/transact.py",
        "rows = df.select(*columns_of(df, wanted), *carried(carry))",
        "rows = df.select(*columns_of(df, wanted), *carried(carry)).repartition(4)",
    ),
    Mistake(
        "A micro-batch that Spark repeats runs once, even if it is partitioned differently.",
        "headrace/spark/sources/calls.py",
        "        closed = self._close(messages, batchId)\n",
        "        store = store_of(self.options)\n"
        "        query = next(each.query for each in messages if isinstance(each, TaskCommit))\n"
        "        known = [number for name, number in waiting(store) if name == query]\n"
        "        batchId = 1 + max([last_finished(store, query), *known])\n"
        "        closed = self._close(messages, batchId)\n",
        (("    await_finished,\n", "    await_finished,\n    last_finished,\n    waiting,\n"),),
    ),
    Mistake(
        "Killed and started again at any time, a stream gives byte-equal state, and each reply once.",
        "headrace/spark/sources/epoch_streams.py",
        'return str(identity["cluster"])',
        "return f\"{identity['cluster']}/{highest_term(store)}\"",
        (
            (
                "from headrace.durability.log.log import bounds, read_log\n",
                "from headrace.durability.log.log import bounds, highest_term, read_log\n",
            ),
        ),
    ),
    Mistake(
        "Each row runs once, whichever process dies, is late, or gets an error from the store.",
        "headrace/runtime/intake.py",
        "        future = self._submit(admitted)\n",
        "        future = self._submit(admitted)\n        mark_finished(self.store, batch)\n",
    ),
    Mistake(
        "An engine that was replaced does not refuse what its successor would take.",
        "headrace/runtime/intake.py",
        "            self._submitted.pop(batch.source, None)\n            self._check()\n",
        "            self._submitted.pop(batch.source, None)\n",
    ),
    Mistake(
        "A batch that cannot be read is blocked, and taken when it is repaired.",
        "headrace/runtime/intake.py",
        "        hold(self.store, batch, ",
        "        refuse(self.store, batch, ",
    ),
    Mistake(
        "Whatever is in a row, it runs or it becomes a dead letter.",
        "headrace/core/json_calls.py",
        "UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)",
        "UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)",
    ),
    Mistake(
        "A query continues after a restart of the app.",
        "headrace/core/source_batches.py",
        "            last[source] = SourceMetadata(",
        "            if not submission.is_final():\n                last[source] = SourceMetadata(",
    ),
    Mistake(
        "A checkpoint of another run is refused.",
        "headrace/durability/inbox/inbox.py",
        "        if number > finished + 1:\n            raise gap(source, number, finished)\n",
        "",
        (
            (
                "headrace/core/source_batches.py",
                "if number != last + 1 or number <= origin.after:",
                "if number <= origin.after:",
            ),
        ),
    ),
    Mistake(
        "A row that cannot be a call becomes a dead letter, and the stream continues.",
        "headrace/runtime/intake.py",
        "            write_dead_letters(self.store, closed, admitted, batch in self._first_listing)\n",
        "",
    ),
    Mistake(
        "When a table has been written, its calls have run; with a name they run once.",
        "headrace/spark/sources/calls.py",
        "await_finished(store_of(self.options), self._close(messages, 0).batch_id, self.patience_s)",
        "self._close(messages, 0)",
    ),
    Mistake(
        "Batches handed over while no engine runs are taken when one does.",
        "headrace/spark/sources/calls.py",
        "if len(written) < len(messages):",
        "if written:",
    ),
    Mistake(
        "Workers read the rows of a source from the store; the coordinator sends only their names.",
        "headrace/core/coordinator.py",
        "msgspec.structs.replace(run, functions=0, keys=[], args=[], stored=stored)",
        "msgspec.structs.replace(run, stored=stored)",
    ),
    Mistake(
        "What was put comes back equal in the columns of a table, whatever its declared type and form.",
        "headrace/durability/reading/record_rows.py",
        "        return ZONELESS if type.tz is None else datetime.datetime\n",
        "        return str\n",
        (
            (
                "    except DOES_NOT_FIT:\n        return None\n",
                "    except DOES_NOT_FIT:\n        return [pa.nulls(len(cells), each.type) for each in columns]\n",
            ),
        ),
    ),
    Mistake(
        "Records of numbers are read without decoding them one by one, and equal.",
        "headrace/durability/reading/number_records.py",
        "IS_SIGNED[0xD0:0xD4] = True",
        "IS_SIGNED[0xD1:0xD4] = True",
    ),
    Mistake(
        "A value that does not fit its column is never rounded or shifted: it is named.",
        "headrace/durability/reading/fitting.py",
        "    checked(value, made == value, type)\n",
        "",
    ),
    Mistake(
        "One bad entity is named, and with `badRows` it does not stop the scan.",
        "headrace/durability/reading/shape_guess.py",
        "key=lambda at: (self.kinds[at].count, -at)",
        "key=lambda at: -at",
    ),
    Mistake(
        "A row that does not have the declared type is refused before anything is loaded.",
        "headrace/durability/snapshots/bulk.py",
        "seal, hint = self.codec.seal if self.hint is not None else self.values.seal, self.hint",
        "seal, hint = self.values.seal, self.hint",
    ),
    Mistake(
        "Changes say of which types their keys have been.",
        "headrace/durability/log/changelog.py",
        "self.key_types[name] = newest.header.key_types[name]",
        "self.key_types[name] = []",
    ),
    Mistake(
        "A reply names the function and the key that were called, and has the columns that its row carries along, also "
        "if a crash has lost it.",
        "headrace/durability/log/records.py",
        "epoch.carried[number] = None if known.carried is None else known.carried[piece.start : stop]",
        "pass",
    ),
    Mistake(
        "An option that a source does not have is refused.",
        "headrace/spark/sources/state_table.py",
        "        check_names(options, OPTIONS)\n",
        "",
    ),
    Mistake(
        "Who waits for an app that does not run is warned, and loses nothing.",
        "headrace/durability/inbox/sign_of_life.py",
        "if found is None or found == self._first:",
        "if found is None:",
    ),
)
