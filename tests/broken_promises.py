"""Promises broken on purpose: a test that proves a promise fails when it is not kept.

For each row of two sections of `docs/guarantees.md` there is one mistake here. It is planted in a copy, and the test
that the row names is run there. (Where it names several, one of them has to notice.)

    python tests/broken_promises.py           # all of them
    python tests/broken_promises.py abort     # those with one of these words

A line for each; the last line is one JSON object. The exit code is 1 if a test did not notice. It takes some minutes,
so it is no part of `make test`; `test_broken_promises.py` sees to it that the list stays whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GUARANTEES = "docs/guarantees.md"
SECTIONS = ("Transactions", "Several workers")
NEEDED = ("headrace", "tests", "examples", "docs", "pyproject.toml", "README.md")
TIMEOUT_S = 600
NO_SHRINKING = """
from hypothesis import Phase

settings.register_profile("broken", settings.get_profile("headrace"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("broken")
"""  # what fails is not made smaller: that takes long, and nobody looks at it


class Mistake(NamedTuple):
    promise: str
    file: str
    old: str  # stands in the file once
    new: str
    besides: tuple[tuple[str, str], ...] = ()  # where a promise is kept twice

    @property
    def changes(self) -> tuple[tuple[str, str], ...]:
        return ((self.old, self.new), *self.besides)


MISTAKES = (
    # --- Transactions ---
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
        "self.transaction.undo.append((context._entry, key, before))",
        "pass",
    ),
    Mistake(
        "An abort in a one-way call undoes the caller too.",
        "headrace/core/serial.py",
        "if first is not NOWHERE and root.find(root_key) is not first:",
        "if first is NOWHERE:",
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
        "self.raised_in = (context._entry, key)",
        "self.raised_in = None",
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
    # --- Several workers ---
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
        "self.backlog.extendleft(reversed(",
        "self.backlog.extendleft(list(",
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


def promises() -> dict[str, list[str]]:
    """Of those sections: each promise, and the tests that prove it."""
    found = {}
    for section in (ROOT / GUARANTEES).read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        if title in SECTIONS:
            for promise, proofs in re.findall(r"^\| (.+?) \| `headrace/.+?` \| (.+?) \|$", text, re.MULTILINE):
                found[promise] = re.findall(r"`(tests/.+?)`", proofs)
    return found


def main(words: list[str]) -> int:
    tests = promises()
    chosen = [mistake for mistake in MISTAKES if not words or any(word in mistake.promise for word in words)]
    missed = []
    with tempfile.TemporaryDirectory(prefix="broken-") as folder:
        copy = Path(folder)
        for name in NEEDED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy)
        with (copy / "tests" / "conftest.py").open("a") as conftest:
            conftest.write(NO_SHRINKING)
        sound = run_tests(copy, sorted({test for mistake in chosen for test in tests[mistake.promise]}))
        print(f"without mistakes: {sound}", flush=True)
        if sound != "passed":
            return 2
        for mistake in chosen:
            begin_s = time.monotonic()
            outcome = judge(copy, mistake, tests[mistake.promise])
            if outcome not in ("failed", "did not end"):
                missed.append(mistake.promise)
            verdict = "missed" if outcome not in ("failed", "did not end") else "seen  "
            print(f"{verdict} {mistake.promise} ({outcome}, {time.monotonic() - begin_s:.0f} s)", flush=True)
    print(json.dumps({"promises": len(chosen), "seen": len(chosen) - len(missed), "missed": missed}))
    return 1 if missed else 0


def judge(copy: Path, mistake: Mistake, tests: list[str]) -> str:
    file = copy / mistake.file
    right = file.read_text()
    try:
        wrong = right
        for old, new in mistake.changes:
            assert wrong.count(old) == 1, f"{mistake.file}: {old}"
            wrong = wrong.replace(old, new)
        file.write_text(wrong)
        return run_tests(copy, tests)
    finally:
        file.write_text(right)


def run_tests(copy: Path, tests: list[str]) -> str:
    """What became of them. What they leave running is stopped."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    output = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=copy, env=environment, stdout=output, stderr=output)
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "did not end"
    finally:
        process.kill()
        process.wait()
        for pid in left_running(copy):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return {0: "passed", 1: "failed"}.get(code, f"pytest ended with {code}")


def left_running(copy: Path) -> list[int]:
    """Processes that import from the copy."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"PYTHONPATH={copy}".encode() in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
