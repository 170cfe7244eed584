"""Mistakes that break the promises of the section "Testing"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "In the test kit, every timer and schedule runs at its own time, also those that are set on the way.",
        "headrace/testing/virtual_runtime.py",
        "self._now_us = max(self._now_us, self._timer_us)",
        "self._now_us = until_us",
    ),
    Mistake(
        "No crash in the test kit changes a reply or the state.",
        "headrace/testing/virtual_runtime.py",
        "seed=opened.seed",
        "seed=self.crashes",
    ),
    Mistake(
        "A crash in the test kit finds a function that is not deterministic.",
        "headrace/testing/virtual_runtime.py",
        "                work.keep([epoch])\n",
        "",
    ),
    Mistake(
        "A test calls no external function: its fake is asked, and records each try.",
        "headrace/testing/fakes.py",
        "return self._attempt(external, fake, key, args)",
        "return self._attempt(external, external.function, key, args)",
    ),
    Mistake(
        "In the simulator, a broken invariant of a user's app is found, and printed as a test that fails.",
        "headrace/sim/check.py",
        "        wrong += workload.check_state(oracle, row.tid or 0)\n",
        "",
    ),
    Mistake(
        "A user's app runs there under all faults, against a loop over its log.",
        "headrace/sim/user_app.py",
        "faults=dataclasses.replace(drawn.faults, misbehaviour=False, new_limits=False)",
        "faults=type(drawn.faults)()",
    ),
    Mistake(
        "What is printed has as few calls as break the invariant, and the time that has to pass.",
        "headrace/testing/shrunk_history.py",
        "            yield steps[:at] + steps[at + size :]\n",
        "            yield steps[at : at + size]\n",
    ),
)
