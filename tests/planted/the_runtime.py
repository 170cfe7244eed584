"""Mistakes that break the promises of the section "The runtime"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "A client gets the replies of a loop over the log.",
        "headrace/core/egress.py",
        "at, found = len(tids) - start, epoch.failures",
        "at, found = -start, epoch.failures",
    ),
    Mistake(
        "Threads that call at the same time lose nothing and duplicate nothing.",
        "headrace/runtime/client.py",
        "{os.getpid()}-{next(self._numbers)}",
        "{os.getpid()}-{os.times().elapsed}",
    ),
    Mistake(
        "`close` finishes what was handed over; later calls raise `Stopped`.",
        "headrace/runtime/driver.py",
        "            while self._serve_once():\n",
        "            while not self._closed and self._serve_once():\n",
    ),
    Mistake(
        "When too many transactions are pending, a task gets an error and a thread waits.",
        "headrace/runtime/driver.py",
        "while self._pending + rows > limit:",
        "while self._pending > limit:",
    ),
    Mistake(
        "A cancelled task neither breaks the runtime nor cancels its call.",
        "headrace/runtime/driver.py",
        "        future.set_running_or_notify_cancel()  # it cannot be cancelled\n",
        "",
        (
            (
                "        replies.set_running_or_notify_cancel()  # a submitted call cannot be cancelled\n",
                "",
            ),
            (
                "        self._runtime.submit(batch, wait).add_done_callback(answer)\n",
                "        submitted = self._runtime.submit(batch, wait)\n"
                "        submitted.add_done_callback(answer)\n"
                "        replies.add_done_callback(lambda _: submitted.cancel())\n",
            ),
            (
                "            if item[0] is not None:\n                self._unanswered[item[0]] = None\n",
                "            if item[0] is not None and item[0].cancelled():\n"
                "                return batches, None, True\n"
                "            if item[0] is not None:\n                self._unanswered[item[0]] = None\n",
            ),
        ),
    ),
    Mistake(
        "A function that never returns is interrupted, and its transaction aborts by decree, even if it catches that.",
        "headrace/core/serial.py",
        "        transaction.doom = Doom(Poisoned(DECREE), root, epoch.keys[row])\n",
        "",
    ),
    Mistake(
        "The decree that aborts it is in the log before its answer leaves.",
        "headrace/core/engine.py",
        "        if poisoned.keys() - epoch.decreed.keys():\n",
        "        if False:\n",
    ),
    Mistake(
        "What cannot be interrupted ends the runtime, and the next start goes on after it.",
        "headrace/runtime/inprocess.py",
        "lost = keeper.close_with(Decree({tid: decree(epoch, row)}))",
        "lost = keeper.close()  # type: ignore[func-returns-value]",
    ),
    Mistake(
        "Then `headrace run` starts itself again, in the same process.",
        "headrace/cli/serve.py",
        "        start_again(spare, stuck)\n",
        "        raise\n",
    ),
    Mistake(
        "A loop that is in the log without its decree is stopped in the replay.",
        "headrace/core/decrees.py",
        "    return REPLAY_CHANCES if epoch.is_replayed else 1\n",
        "    return 1 << 62 if epoch.is_replayed else 1\n",
    ),
    Mistake(
        "Health tells that a function is stuck, and that the runtime has stopped.",
        "headrace/runtime/inprocess.py",
        "running is None or self._watchdog.ran_s <= self._watchdog.limit_s:",
        "running is not None or self._watchdog.ran_s <= self._watchdog.limit_s:",
    ),
    Mistake(
        "A signal ends `headrace run` within seconds while a function loops.",
        "headrace/cli/serve.py",
        "stack.callback(runtime.close, CLOSE_PATIENCE_S)",
        "stack.callback(runtime.close)",
    ),
    Mistake(
        "A broken invariant stops the runtime, and every waiting caller gets an error.",
        "headrace/runtime/driver.py",
        "rest: list[Future[Any]] = list(self._unanswered)",
        "rest: list[Future[Any]] = []",
    ),
)
