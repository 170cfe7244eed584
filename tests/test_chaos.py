"""`headrace chaos`: its judge sees what is wrong, its processes end, and a short run of it is clean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import Runtime
from headrace.chaos import tested_app
from headrace.chaos.campaign import CLIENTS
from headrace.chaos.servers import Process, children_of
from headrace.chaos.traffic import ACCOUNTS, SentRequest
from headrace.chaos.verdict import ChaosVerdict, expected_appends, expected_receipts, judge
from tests.waiting import eventually

ROOT = Path(__file__).parent.parent
There = tuple[dict[str, list[int]], dict[str, list[int]]]


# --- the judge --------------------------------------------------------------------------------------------------------


def a_good_run() -> tuple[list[SentRequest], There]:
    """A history with a bit of everything, as a well-behaved engine makes it, and what is there at its end."""
    calls: list[tuple[Any, ...]] = []
    for number in range(1, 40, 4):
        first, second = ACCOUNTS[number % 5], ACCOUNTS[number % 7]
        calls.append((tested_app.transfer, first, second, 30, "c", number))
        calls.append((tested_app.transfer_awaited, second, first, 90, "c", number + 1))
        calls.append(
            (
                tested_app.run_all,
                "x",
                [[tested_app.APPEND, "x", (number + 2) * 10], [tested_app.READ, "x", 0], [tested_app.READ, "y", 0]],
            )
        )
        calls.append((tested_app.send_all, "y", [[tested_app.APPEND, "y", (number + 3) * 10]]))
    calls.append((tested_app.audit, "a", ACCOUNTS))
    history = [SentRequest(f"c-{number}", call, number) for number, call in enumerate(calls, start=1)]
    with Runtime(tested_app.app) as runtime:
        for at, asked in enumerate(history):
            asked.sent = 10 * at + 1
            asked.take(runtime.client.batch([asked.call]), 0)
            asked.answered = 10 * at + 5
        there = runtime.state(tested_app.receipts), runtime.state(tested_app.lists)
    assert any(asked.failure for asked in history)
    return history, there


def judged(spoil: Callable[[list[SentRequest], There], None]) -> ChaosVerdict:
    history, there = a_good_run()
    spoil(history, there)
    return judge(history, *there)


def named(history: list[SentRequest], function: Any, is_ok: bool = True) -> SentRequest:
    return next(asked for asked in history if asked.call[0] is function and asked.is_ok == is_ok)


def test_a_good_run_is_clean() -> None:
    assert judged(lambda history, there: None).is_clean


def test_an_acknowledged_transfer_without_its_receipt_is_lost() -> None:
    def spoil(history: list[SentRequest], there: There) -> None:
        page, number = next(expected_receipts(named(history, tested_app.transfer)))
        there[0][page].remove(number)

    verdict = judged(spoil)
    assert (len(verdict.lost), len(verdict.duplicated), verdict.violations) == (1, 0, [])


def test_an_append_that_is_not_there_is_lost() -> None:
    def spoil(history: list[SentRequest], there: There) -> None:
        key, value = next(expected_appends(history[-2]))
        there[1][key].remove(value)

    assert len(judged(spoil).lost) == 1


def test_what_is_there_twice_ran_twice() -> None:
    def spoil(history: list[SentRequest], there: There) -> None:
        page, number = next(expected_receipts(named(history, tested_app.transfer)))
        there[0][page].append(number)
        key, value = next(expected_appends(history[-2]))
        there[1][key].append(value)

    assert len(judged(spoil).duplicated) == 2


def test_an_abort_leaves_nothing() -> None:
    def spoil(history: list[SentRequest], there: There) -> None:
        page, number = next(expected_receipts(named(history, tested_app.transfer_awaited, is_ok=False)))
        there[0].setdefault(page, []).append(number)

    assert any("aborted" in text for text in judged(spoil).violations)


def test_an_effect_that_nobody_asked_for_is_a_violation() -> None:
    assert judged(lambda history, there: there[0].setdefault("c/0", []).append(77_777)).violations


def test_money_that_is_not_there_is_a_violation() -> None:
    def spoil(history: list[SentRequest], there: There) -> None:
        named(history, tested_app.audit).result -= 1

    assert any(text.startswith("bank") for text in judged(spoil).violations)


def test_a_reply_that_no_loop_over_the_log_gives_is_a_violation() -> None:
    def spoil(history: list[SentRequest], there: There) -> None:
        named(history, tested_app.transfer).result += 1

    assert any("a loop over the log" in text for text in judged(spoil).violations)


def test_one_place_in_the_log_is_not_for_two() -> None:
    def spoil(history: list[SentRequest], there: There) -> None:
        history[3].tid = history[4].tid

    assert any("both have TID" in text for text in judged(spoil).violations)


def test_an_order_against_the_clock_is_a_violation() -> None:
    def spoil(history: list[SentRequest], there: There) -> None:
        history[0].sent, history[0].answered = 10_000, 10_001

    assert any("larger TID" in text for text in judged(spoil).violations)


def test_a_read_that_misses_what_was_there_is_found_in_the_lists() -> None:
    def spoil(history: list[SentRequest], there: There) -> None:
        last = [asked for asked in history if asked.call[0] is tested_app.run_all][-1]
        last.result[1] = last.result[1][:-2]

    assert any(text.startswith("lists") for text in judged(spoil).violations)


def test_what_was_never_answered_is_a_violation() -> None:
    def spoil(history: list[SentRequest], there: There) -> None:
        history[-1].answered = 0

    assert any("never answered" in text for text in judged(spoil).violations)


def test_an_answer_that_differs_from_the_first_is_seen() -> None:
    with Runtime(tested_app.app) as one, Runtime(tested_app.app) as other:
        asked = SentRequest("c-1", (tested_app.transfer, "a", "b", 1, "c", 1), 1)
        assert asked.take(one.client.options(request_id="x").batch([asked.call]), 0)
        assert asked.take(one.client.options(request_id="x").batch([asked.call]), 0)
        other.client.call(tested_app.deposit, "a", 5)
        assert not asked.take(other.client.options(request_id="x").batch([asked.call]), 0)


# --- the real thing ---------------------------------------------------------------------------------------------------


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace.cli", "chaos", *words]
    environment = os.environ | {"TMPDIR": str(folder)}  # what a kill leaves behind goes with the test
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_short_run_is_clean(tmp_path: Path) -> None:
    said, complaints = started(tmp_path, "--seconds", "8", "--seed", "5", "--json").communicate(timeout=600)
    assert said, complaints
    figures = json.loads(said.splitlines()[-1])
    assert (figures["lost"], figures["duplicated"], figures["violations"]) == (0, 0, 0), figures["found"]
    assert figures["acknowledged"] >= len(CLIENTS)  # each of them, however busy the machine
    assert figures["coordinator_kills"] >= 1, "the first fault of this seed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_over_however_it_ends(number: int, tmp_path: Path) -> None:
    chaos = started(tmp_path, "--seconds", "60", "--json")
    try:
        family = family_of(chaos)
        os.kill(chaos.pid, number)
        chaos.communicate(timeout=120)
    finally:
        chaos.kill()
        chaos.communicate()
    eventually(lambda: not any(process.is_alive() for process in family), what="the end of all processes", pause_s=0.02)
    assert [process for process in family if process.is_alive()] == []


def family_of(chaos: subprocess.Popen[str]) -> list[Process]:
    """Its coordinator and two workers, once they are there."""

    def family() -> list[Process]:
        assert chaos.poll() is None, "no workers were started"
        coordinators = children_of(chaos.pid)
        workers = [worker for coordinator in coordinators for worker in children_of(coordinator.pid)]
        return [*coordinators, *workers] if len(workers) >= 2 else []

    found: list[Process] = eventually(family, what="the start of two workers", pause_s=0.02)
    return found
