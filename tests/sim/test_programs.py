"""Large random programs on workers, in every order: a fixed minute of them is clean, and wide; mistakes are seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from headrace.cli.random_programs import HANGS, Tally, make_smaller
from headrace.sim.cases import CaseVerdict, Judge, draw_case, shrink
from headrace.sim.mutants import PROGRAM_MUTANTS, Mutant, caught_by, look_of, planted
from headrace.sim.schedules import SCHEDULES

CASES = range(int(900 * float(os.environ.get("HEADRACE_EXAMPLES", "1"))))


@pytest.fixture(scope="module")
def verdicts() -> list[CaseVerdict]:
    judge = Judge()
    return [judge.judge(draw_case(seed)) for seed in CASES]


def test_a_fixed_minute_of_programs_gives_what_the_loop_gives(verdicts: list[CaseVerdict]) -> None:
    assert {verdict.seed: verdict.violations for verdict in verdicts if verdict.violations} == {}


def test_work_is_bounded(verdicts: list[CaseVerdict]) -> None:
    """The bounds of decision 0022 hold in each case; these are what the fixed minute comes to."""
    usual = [verdict for verdict in verdicts if verdict.is_usual]
    calls = sum(verdict.calls for verdict in usual)
    assert sum(verdict.runs for verdict in usual) < 2.5 * calls
    assert sum(verdict.messages for verdict in usual) < 2 * calls
    large = [verdict for verdict in usual if verdict.calls >= 100]
    assert max(verdict.runs_per_call for verdict in large) < 12
    assert max(verdict.messages_per_call for verdict in large) < 8


def test_the_minute_is_wide(verdicts: list[CaseVerdict]) -> None:
    """A narrow generator would show here."""
    drawn: Counter[str] = Counter()
    for verdict in verdicts:
        drawn.update(verdict.drawn)
    expected = {f"{workers} workers" for workers in range(2, 7)} | {f"depth {depth}" for depth in range(6)}
    expected |= {f"schedule {name}" for name in SCHEDULES} | {"0% awaited", "50% awaited", "90% awaited"}
    expected |= {"2-9 roots", "10-60 roots", "61-300 roots", "301+ roots", "1 keys", "2-9 keys", "10-60 keys"}
    expected |= {"aborted", "equal puts", "missing state", "self-calls", "delete", "merge", "losses", "rescalings"}
    expected |= {"several epochs in flight", "repairs", "waits", "gathered", "predicted", "lone"}
    expected |= {"mixed programs", "tangled programs", "relayed programs", "twins relayed", "relayed bare"}
    expected |= {"calls call", "calls send", "calls skip", "calls guard"}
    assert expected - set(drawn) == set()
    assert sum(verdict.transactions for verdict in verdicts) > 50 * len(verdicts)


@pytest.mark.parametrize("mutant", PROGRAM_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_mistake_is_caught(mutant: Mutant) -> None:
    seed = caught_by(mutant, CASES)
    assert seed is not None
    assert look_of(mutant)(seed) == [], "it is the mistake that shows, nothing else"


def test_a_case_that_fails_is_made_smaller() -> None:
    mutant = next(mutant for mutant in PROGRAM_MUTANTS if mutant.name == "an abort is told twice")
    judge, case = Judge(), draw_case(mutant.hint)
    with planted(mutant):
        smaller, verdict = shrink(judge, case)
    assert verdict.violations
    assert len(smaller.roots) < len(case.roots)
    assert judge.judge(smaller).violations == []


def test_what_was_found_is_told_with_a_smaller_case_unless_it_hangs() -> None:
    mutant = next(mutant for mutant in PROGRAM_MUTANTS if mutant.name == "an abort is told twice")
    tally = Tally()
    with planted(mutant):
        verdict = Judge().judge(draw_case(mutant.hint))
        verdict.violations.append("and another one")
        tally.add(verdict)
        tally.add(CaseVerdict(mutant.hint + 1, [f"{HANGS}: it took more than a while"]))
        make_smaller(tally.found)
    told = tally.summary(1.0)
    assert told["violations"] == len(told["found"]) == len(verdict.violations) + 1
    (smaller,) = [each["shrunk"] for each in told["found"] if "shrunk" in each]
    assert smaller["violations"]
    assert len(smaller["roots"]) < verdict.transactions


def test_a_case_follows_from_its_seed_alone() -> None:
    assert draw_case(11) == draw_case(11)
    judge = Judge()
    assert judge.judge(draw_case(11)) == judge.judge(draw_case(11)) == Judge().judge(draw_case(11))


def command(*args: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "headrace.cli", "sim", "--programs", *args]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


def test_the_command_tells_it_all_in_one_line() -> None:
    done = command("--seconds", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["violations"] == 0
    assert told["transactions"] > 0
    assert {"runs_per_call_max", "messages_per_call_max", "drawn", "seconds", "found"} <= set(told)


def test_the_command_tells_of_one_case_in_full() -> None:
    done = command("--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("seed", "workers", "schedule", "bodies", "roots", "verdict"):
        assert f"\n{word} " in "\n" + done.stdout
