"""Mistakes that break the promises of the section "Transactions"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "Replies and state are those of a loop over the log in TID order.",
        "headrace/core/serial.py",
        "in reversed(transaction.undo):",
        "in transaction.undo:",
    ),
    Mistake(
        "Where an epoch or a batch ends never changes a result.",
        "headrace/core/sequencing.py",
        "epoch.args += batch.args[start:stop]",
        "epoch.args += batch.args[: stop - start]",
    ),
    Mistake(
        "TIDs grow without gaps, and epochs hold them in order.",
        "headrace/core/sequencing.py",
        "self.lc += count",
        "self.lc += count + 1",
    ),
    Mistake(
        "Any exception that a function does not catch aborts the transaction, and all of it is undone.",
        "headrace/core/serial.py",
        "except BaseException as error:\n                is_void",
        "except Exception as error:\n                is_void",
    ),
    Mistake(
        "An abort undoes the writes of every operator, in whichever function it was raised.",
        "headrace/core/serial.py",
        "self.transaction.undo.append((context._binding, key, before))",
        "pass",
    ),
    Mistake(
        "An abort in a one-way call undoes the caller too.",
        "headrace/core/serial.py",
        "        if is_stored:\n            root.table.take_back(root_key, first)\n        elif",
        "        if is_stored:\n            pass\n        elif",
    ),
    Mistake(
        "Of several aborts, the first in the order in which the calls were made is the reply.",
        "headrace/core/serial.py",
        "for call in queue:",
        "for call in reversed(queue):",
    ),
    Mistake(
        "An abort names the function and the entity where it was raised.",
        "headrace/core/serial.py",
        "self.raised_in = (context._binding, key)",
        "self.raised_in = None",
    ),
    Mistake(
        "A reply names the file and the line of the app's code that failed, relative to the app's folder.",
        "headrace/core/raised.py",
        "            file, line = its, raised.tb_lineno\n",
        "            file, line = its, code.co_firstlineno\n",
    ),
    Mistake(
        "The traceback of a failure is reported when it is final, once; runs that are repaired are silent.",
        "headrace/core/coordinator.py",
        "        flight.idle[worker] = idle\n",
        "        flight.idle[worker] = idle\n"
        "        from headrace.core.events import FailedRun\n\n"
        "        self.engine.failed += [FailedRun('', tid, idle.epoch, why) for tid, why in idle.failures.items()]\n",
    ),
    Mistake(
        "A replay reports no failure again.",
        "headrace/core/engine.py",
        "            if epoch.is_replayed:\n                continue\n",
        "",
    ),
    Mistake(
        "A context, or a method of it, that is used after its call raises.",
        "headrace/core/lent.py",
        "            return body(lent, *args)\n        finally:\n            lent._context = None\n",
        "            return body(lent, *args)\n        finally:\n            pass\n",
    ),
    Mistake(
        "A caller can neither catch what a callee raised, nor write after it.",
        "headrace/core/serial.py",
        "            raise\n\n    def _break_off(",
        "            return before, None\n\n    def _break_off(",
    ),
    Mistake(
        "A call that was made with `ctx.call` and not awaited aborts the transaction.",
        "headrace/core/contexts.py",
        "for call in self.unawaited:",
        "for call in ():",
    ),
    Mistake(
        "A value that is only moved is neither lost nor duplicated.",
        "headrace/core/serial.py",
        "                queue.clear()\n                if undo:",
        "                if undo:",
    ),
)
