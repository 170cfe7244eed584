"""Mistakes that break the promises of the section "Several workers"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "With 1 to 5 workers, in either mode and under any interleaving, replies and state are those of a loop over the"
        " log.",
        "headrace/core/ordered/chains.py",
        "if writer == tid or writer not in aborted:",
        "if writer:",
    ),
    Mistake(
        "The same holds with 2 to 6 workers and up to a thousand transactions in an epoch, calls five deep, and "
        "workers that are lost or added.",
        "headrace/core/ordered/repair.py",
        "frame = call.frame = AwaitFrame(self._new_attempt())",
        "frame = call.frame = AwaitFrame(PREDICTED)",
    ),
    Mistake(
        "An epoch's work is bounded, whatever its transactions do to each other.",
        "headrace/core/ordered/exchange.py",
        "        if is_few and part.vain <=",
        "        if is_few or part.vain >=",
    ),
    Mistake(
        "A worker that has nothing to do waits.",
        "headrace/core/worker.py",
        "if now_us >= progress.report_at_us or not part.waiting:\n            progress.report_at_us = None\n",
        "if now_us >= progress.report_at_us or not part.waiting:\n",
    ),
    Mistake(
        "A cluster that says it is up is up.",
        "headrace/core/channel.py",
        "return [frame for frame in frames if frame.term == self.term]",
        "return []",
    ),
    Mistake(
        "Limits are reached where a serial run reaches them, with the same failure.",
        "headrace/core/ordered/exchange.py",
        "if count * self.workers > self.calls_max:",
        "if count > self.calls_max:",
    ),
    Mistake(
        "A call graph of any depth, with cycles, over workers, is discovered by running it.",
        "headrace/core/ordered/chains.py",
        "type(one[2]) is type(other[2]) and one[2] == other[2]",
        "type(one[2]) is type(other[2])",
    ),
    Mistake(
        "Conflicts are resolved within the epoch, even if the entities that a transaction touches change twice.",
        "headrace/core/ordered/exchange.py",
        "self.tell(part, worker, Cancelled(tid, at))",
        "pass",
    ),
    Mistake(
        "This also holds on workers that do not own the root.",
        "headrace/core/ordered/repair.py",
        "tid, chain = record.order[0], chain_of(call)\n        at = locate(chain, record.order)\n",
        "tid, chain = record.order[0], chain_of(call)\n        if part.owner(tid) != self.me:\n            return\n"
        "        at = locate(chain, record.order)\n",
    ),
    Mistake(
        "A late sibling of a call that failed never commits.",
        "headrace/core/coordinator.py",
        "if report.sent[other] != reported.received[worker]:",
        "if report.sent[other] < 0:",
    ),
    Mistake(
        "A transaction is never done while one of its calls is under way.",
        "headrace/core/shares.py",
        "return shares == {0}",
        "return bool(shares)",
    ),
    Mistake(
        "A wrong prediction never changes a result.",
        "headrace/core/ordered/prediction.py",
        "source < 0 or args[source] is not target:",
        "source < 0:",
    ),
    Mistake(
        "When no call crosses workers, they settle an epoch with two messages each.",
        "headrace/core/coordinator.py",
        "for worker in flight.idle:\n            effects.append(",
        "for worker in [*flight.idle] * 2:\n            effects.append(",
    ),
    Mistake(
        "Transactions below one that must be gathered are answered before it.",
        "headrace/core/coordinator.py",
        "self._note_results(flight, start)",
        "pass",
    ),
    Mistake(
        "The next epoch starts while the last one settles.",
        "headrace/core/coordinator.py",
        "if len(self.flights) >= self.config.epochs_in_flight_max or not",
        "if self.flights or not",
    ),
    Mistake(
        "A worker lost at any moment loses and repeats nothing.",
        "headrace/core/coordinator.py",
        "reversed(self.log[: len(self.log) - ahead])",
        "reversed(self.log[1 : len(self.log) - ahead])",
    ),
    Mistake(
        "The same holds with real processes that are killed.",
        "headrace/core/coordinator.py",
        "self.log[: len(self.log) - ahead]",
        "self.log[1 : len(self.log) - ahead]",
    ),
    Mistake(
        "A function that never returns is aborted by decree, and the other transactions continue.",
        "headrace/runtime/cluster.py",
        "elif heartbeat.running and heartbeat.running_us > self.config.wall_limit_us:",
        "elif heartbeat.running_us < 0:",
    ),
    Mistake(
        "Rescaling under load changes no reply.",
        "headrace/core/placement.py",
        "        return ShardMap(owners, self.version + 1)",
        "        moved = ShardMap(owners, self.version + 1)\n        moved._cache = self._cache\n        return moved",
    ),
    Mistake(
        "Values and keys keep their types across workers, recovery and rescaling.",
        "headrace/wire/values.py",
        "return tuple(self._decode(data))",
        "return self._decode(data)",
    ),
    Mistake(
        "Frames of an old term change nothing.",
        "headrace/core/channel.py",
        "if frame.term != self.term or frame.to != self.me:",
        "if frame.to != self.me:",
    ),
    Mistake(
        "A frame cut at any byte is refused, and the channel stays in step.",
        "headrace/wire/codec.py",
        "except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:",
        "except (UnicodeDecodeError, RecursionError) as error:",
    ),
    Mistake(
        "A peer without the right key cannot connect, and nothing that it sends is received.",
        "headrace/runtime/sockets.py",
        "is_known = key in self._nodes\n",
        "is_known = True\n",
    ),
    Mistake(
        "No worker outlives a parent process that is killed.",
        "headrace/runtime/worker_process.py",
        "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)",
        "pass",
        (("while not hang_up.poll(self._interval_s * 1e3) and not self._pipe.is_dead:", "while True:"),),
    ),
)
