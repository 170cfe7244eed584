"""Mistakes that break the promises of the section "Time and the outside world"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "Time, random numbers, ids and external calls are the same in every mode, with any number of workers, and "
        "whenever they are run again.",
        "headrace/core/order.py",
        "            _, at = read_number(place, at)\n    return path\n",
        "            worker, at = read_number(place, at)\n            path += number(worker)\n    return path\n",
    ),
    Mistake(
        "`ctx.now` is the time of the epoch, in UTC.",
        "headrace/core/contexts.py",
        "START = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)",
        "START = datetime.datetime(1970, 1, 1)",
    ),
    Mistake(
        "Random numbers are the same in every mode, and different in every call.",
        "headrace/model/chance.py",
        'f"{seed}/{tid}/{path.hex()}"',
        'f"{seed}/{path.hex()}"',
    ),
    Mistake(
        "A function that catches every exception draws the same random numbers.",
        "headrace/core/contexts.py",
        "transaction.needs = transaction.needs or needs",
        "transaction.needs = None",
    ),
    Mistake(
        "An external call waits until all before it is final.",
        "headrace/core/coordinator.py",
        "self._note_results(flight, epoch.tids.index(need.tid))",
        "pass",
    ),
    Mistake(
        "A failed external call raises in the function, which may catch it.",
        "headrace/core/contexts.py",
        "raise ExternalFailed(response.failure)",
        "raise self.doomed(ExternalFailed(response.failure))",
    ),
    Mistake(
        "A message brings its response as a transaction of its own.",
        "headrace/core/later/builtin.py",
        "    if function is not None:\n",
        "    if function is not None and kind != SEND:\n",
    ),
    Mistake(
        "Headrace's own functions cannot be called from outside.",
        "headrace/core/admission.py",
        "if entry.operator.name == RESERVED:",
        "if entry.name == RESERVED:",
        (("headrace/core/program.py", " and function.operator is not BUILT_IN:", ":"),),
    ),
    Mistake(
        "Timers, messages and external calls happen once, wherever the process dies.",
        "headrace/core/later/builtin.py",
        "    ctx.delete()\n    kind, _, _, args",
        "    kind, _, _, args",
    ),
    Mistake(
        "An external call is made when its intent is durable, and not before.",
        "headrace/core/engine.py",
        "self.journal.covers(asking.position)",
        "self.journal.covers(asking.epoch.position)",
    ),
    Mistake(
        "A reply waits for the responses that it depends on to be durable.",
        "headrace/core/journal.py",
        "self.floor = max(self.floor, self.append(record))",
        "self.append(record)",
    ),
    Mistake(
        "An external call that was answered is not made again; the others are made again with the same key.",
        "headrace/core/restore.py",
        "epoch.responses[record.tid, record.call] = record",
        "pass",
    ),
    Mistake(
        "A replay repeats a failed external call as a failure, even if it would succeed now.",
        "headrace/core/engine.py",
        "        self.journal.note(response)\n",
        "        if event.failure is None:\n            self.journal.note(response)\n",
    ),
    Mistake(
        "A message leaves when its transaction is durable, and only if it commits.",
        "headrace/core/later/deferred.py",
        "ready = [key for position, key in self.unsent if is_durable(position)]",
        "ready = [key for position, key in self.unsent]",
    ),
    Mistake(
        "A timer fires once, even if the process was not running when it was due.",
        "headrace/core/later/deferred.py",
        "        self.note(state.tables[BUILT_IN.name].items(), 0)\n",
        "",
    ),
    Mistake(
        "The loss of a worker changes none of this.",
        "headrace/core/coordinator.py",
        "elif self.engine.asking is None or self.engine.asking.need.call != need.call:",
        "else:",
    ),
    Mistake(
        "A timer of a transaction that aborts was never set.",
        "headrace/core/later/deferring.py",
        "self.call_async(builtin.set, timer, builtin.TIMER, due_us, None, args, name, key)",
        "state = self._program.values.seal((builtin.TIMER, due_us, None, args, name, key))\n"
        "        self._functions[builtin.set].table.put(timer, state)",
    ),
    Mistake(
        "A timer fires when it is due, and not before.",
        "headrace/core/later/deferred.py",
        "while self.heap and self.heap[0][0] <= now_us and len(rows)",
        "while self.heap and len(rows)",
    ),
    Mistake(
        "If its transaction aborts, it is not tried again.",
        "headrace/core/later/deferred.py",
        "                self.spent[key] = 0\n",
        "                self.timers[key] += 1_000_000\n"
        "                heapq.heappush(self.heap, (self.timers[key], key))\n",
    ),
    Mistake(
        "A timer that is cancelled earlier in the log does nothing, even if it is due before the cancellation has run.",
        "headrace/core/later/deferring.py",
        "        self.call_async(builtin.drop, timer)\n",
        "        self.call_later(0, builtin.drop, timer)\n",
    ),
    Mistake(
        "A timer that is due runs before every call that has a later logged time and was sent after the timer was set "
        "for good.",
        "headrace/core/engine.py",
        "            self.defer(now_us)\n            self._sequence_unfinished(now_us)\n"
        "            self._take_waiting(now_us, effects)\n",
        "            self._sequence_unfinished(now_us)\n            self._take_waiting(now_us, effects)\n"
        "            self.defer(now_us)\n",
    ),
    Mistake(
        "A call that waits in an open epoch when a timer is due is logged with a time that is not later.",
        "headrace/core/engine.py",
        "                self.close(min(now_us, due.first_us))\n",
        "                pass\n",
    ),
    Mistake(
        "After a restart, timers that were due run before new calls.",
        "headrace/core/engine.py",
        "self.replayed = max((epoch.number for epoch in epochs), default=0)",
        "self.replayed = max((epoch.number for epoch in epochs if epoch.is_inherited), default=0)",
    ),
    Mistake(
        "Timers and schedules that are due run in the order of their times.",
        "headrace/core/later/deferred.py",
        "        timed.sort(key=itemgetter(0))\n",
        "",
    ),
    Mistake(
        "A later call that could not run is refused when the timer is set.",
        "headrace/core/later/deferring.py",
        "        if not entry.fits(args):\n            entry.admit(args)\n",
        "",
    ),
    Mistake(
        "A timer that is cancelled does not fire.",
        "headrace/core/later/builtin.py",
        "    is_there = ctx.get() is not None\n    ctx.delete()\n",
        "    is_there = ctx.get() is not None\n",
    ),
    Mistake(
        "A schedule is called once for all the times that it missed.",
        "headrace/core/later/deferred.py",
        "schedule.when.before(now_us, last_us)\n",
        "schedule.when.before(min(now_us, schedule.when.after(last_us)), last_us)\n",
    ),
    Mistake(
        "Schedules are due by the clock, and continue after an abort.",
        "headrace/core/later/deferred.py",
        "                self.spent[key] = args[0] if type(args[0]) is int else self.values.decode(args[0])[0]\n",
        "                self.fired[key] += 1\n",
    ),
    Mistake(
        "An entity with a time to live disappears that long after it was last written.",
        "headrace/core/later/expiring.py",
        "self._state = wrap(self._seal(value), self._now_us)",
        "self._state = wrap(self._seal(value), written_us(self._state) if self._is_there() else self._now_us)",
    ),
    Mistake(
        "A call whose answer got lost is made again with the same idempotency key.",
        "headrace/runtime/externals.py",
        'f"{self.name}/{effect.call}"',
        'f"{self.name}/{effect.call}/{attempt}"',
    ),
)
