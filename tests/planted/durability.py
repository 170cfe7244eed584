"""Mistakes that break the promises of the section "Durability"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "Everything that was answered is there after a restart, and nothing runs twice, wherever the process dies.",
        "headrace/core/journal.py",
        "return self.durable >= position and self.durable >= self.floor",
        "return self.durable >= self.floor",
    ),
    Mistake(
        "The same holds if it dies at any single operation of the store,",
        "headrace/durability/log/log.py",
        "        self.store.sync(file)\n        self._size += len(data)",
        "        self._size += len(data)",
    ),
    Mistake(
        "and at any operation of a recovery.",
        "headrace/durability/log/takeover.py",
        "term = max(highest_term(store, name), *(",
        "term = max(0, *(",
    ),
    Mistake(
        "The same holds with real processes that are killed repeatedly,",
        "headrace/durability/store.py",
        "            _write(self._file(name), data)\n",
        "            self._held[name] = self._held.get(name, b'') + data\n"
        "            if len(self._held[name]) >= 8192:\n"
        "                _write(self._file(name), self._held.pop(name))\n",
        (("        self._count = 0\n", "        self._count = 0\n        self._held: dict[str, bytes] = {}\n"),),
    ),
    Mistake(
        "and with servers and workers that are killed, paused and superseded under load.",
        "headrace/durability/recovery.py",
        "            found.append(logged)\n        return found\n",
        "            found.append(logged)\n        return found[1:]\n",
    ),
    Mistake(
        "A reply leaves when its record is durable, and not before.",
        "headrace/core/journal.py",
        "        return self.last\n",
        "        return self.last - 1\n",
    ),
    Mistake(
        "Execution does not wait for the disk; only replies do.",
        "headrace/durability/keeper.py",
        "self._records.put(self.store_work.encode(effect))",
        "list(map(self._tell, self.store_work.append([self.store_work.encode(effect)])))",
    ),
    Mistake(
        "Two failures in a row lose nothing.",
        "headrace/durability/log/takeover.py",
        'end.ref.name if end.ref else ""',
        'end.ref.name if end.ref and end.loose else ""',
    ),
    Mistake(
        "A worker lost in the middle of an epoch, and then the coordinator, lose nothing.",
        "headrace/core/coordinator.py",
        "ahead = sum(isinstance(item, Epoch) for item in self.backlog)",
        "ahead = 0",
    ),
    Mistake(
        "A request id asked again after a restart gets the same bytes.",
        "headrace/durability/recovery.py",
        "kept = [each for each in replies if each.number <= epoch]",
        "kept = [each for each in replies if each.number < epoch]",
    ),
    Mistake(
        "The same holds when its segment of the log has been deleted, until its retention ends.",
        "headrace/durability/recovery.py",
        "self.replies.retire(min(below, keep.metadata.ledger.oldest - self.epoch0))",
        "self.replies.retire(keep.epoch - self.epoch0)",
    ),
    Mistake(
        "A source's batch runs once, wherever a crash cuts it.",
        "headrace/core/restore.py",
        "done[piece.position] = piece.start + piece.size",
        "done[piece.position] = piece.size",
    ),
    Mistake(
        "A replay under other limits gives the same bytes.",
        "headrace/durability/log/records.py",
        "return LoggedRecord(number, epoch, header.limits, header.fingerprint)",
        "return LoggedRecord(number, epoch, self.limits, header.fingerprint)",
    ),
    Mistake(
        "A store moves between one process and any number of workers.",
        "headrace/core/coordinator.py",
        "self.shards = before if max(before.owners) == self.workers else before.rescaled(self.workers)",
        "self.shards = before",
    ),
    Mistake(
        "A function that gives a different result when it is run again stops the recovery, and the error names it.",
        "headrace/core/outcome.py",
        "same_outcome(new, old) and same_renewed(before.results[row], now.results[row], values)",
        "same_outcome(new, old)",
    ),
    Mistake(
        "That error says whether the logged reply can stand, and names the ways out.",
        "headrace/core/outcome.py",
        "ADVICE[writes].format(",
        "ADVICE[UNKNOWN].format(",
    ),
    Mistake(
        "A replay that writes something else is refused, also if it gives the same replies, and whatever the options "
        "say.",
        "headrace/core/outcome.py",
        "    if writes == OTHER:\n",
        "    if writes == OTHER and found:\n",
    ),
    Mistake(
        "With `accept_logged`, a replay that writes the same goes on, with the logged replies and the state of the "
        "first run.",
        "headrace/core/local.py",
        "            epoch.results, epoch.failures = before.results, before.failures\n",
        "",
    ),
    Mistake(
        "What was accepted is in the log, and later starts need no option.",
        "headrace/core/restore.py",
        "                    epoch.accepted[epoch.tids.index(tid)] = text\n",
        "                    pass\n",
    ),
    Mistake(
        "Digests do not depend on the number of workers,",
        "headrace/core/digests.py",
        "            if not same(before, after):\n",
        "            if before is not after:\n",
    ),
    Mistake(
        "on the way a row runs,",
        "headrace/core/state.py",
        "self.news.append(state if is_other else UNCHANGED)",
        "self.news.append(state)",
    ),
    Mistake(
        "or on which object holds a value.",
        "headrace/core/serial.py",
        "\n                            news.append(state if ",
        "\n                            news.append(state if True or ",
    ),
    Mistake(
        "A check changes no reply, no state and no digest of deterministic functions,",
        "headrace/core/checked.py",
        "                self.below.change(key, self.below.get(key), state)\n        for key",
        "                pass\n        for key",
    ),
    Mistake(
        "names those that are not deterministic, with entity and both values,",
        "headrace/core/checked.py",
        '("put", context._state), ',
        "",
    ),
    Mistake(
        "and logs their aborts, which a start repeats with or without a check.",
        "headrace/core/engine.py",
        "frozenset((Poisoned.code, NotDeterministic.code))",
        "frozenset((Poisoned.code,))",
    ),
    Mistake(
        "A replay that differs answers no client.",
        "headrace/core/outcome.py",
        "if is_same or row in epoch.decreed:",
        "if is_same or row in epoch.decreed or epoch.limits is not None:",
        (("    if writes == OTHER:\n", "    if writes == OTHER and epoch.limits is None:\n"),),
    ),
    Mistake(
        "A transaction that aborted by decree stays aborted, whatever it would do now.",
        "headrace/core/journal.py",
        "self.floor = max(self.floor, self.append(record))",
        "self.floor = max(self.floor, self.last)",
    ),
    Mistake(
        "Values of all types come back exactly.",
        "headrace/durability/columns.py",
        "return value if value and value[0] not in FIRST_BYTES else ESCAPE + value",
        "return value if value else ESCAPE + value",
    ),
    Mistake(
        "The time of epochs never goes back, even when the clock does.",
        "headrace/core/sequencing.py",
        "self.last_us = max(now_us, self.last_us, self.least_us)",
        "self.last_us = now_us",
    ),
)
