"""What must hold for all replies, checked from outside when the faults are over.

*Lost*: it was acknowledged, and its effect is not there. *Duplicated*: its effect is there twice, or its id was
answered with other bytes. *Violations*: money that appeared or disappeared, a history that no serial order explains, an
order that contradicts the clock, a reply that a loop over the log would not have given.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.chaos import tested_app
from headrace.chaos.traffic import ACCOUNTS, SentRequest
from headrace.runtime.inprocess import Runtime
from headrace.sim import elle

TRANSFERS = (tested_app.transfer, tested_app.transfer_awaited)
AT_ONCE = 500


class ChaosVerdict:
    """Collects descriptions of what is wrong; of lost and duplicated ones, one per request."""

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        self.duplicated: dict[str, str] = {}
        self.violations: list[str] = []

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicated or self.violations)

    def found(self) -> list[str]:
        return [*self.lost.values(), *self.duplicated.values(), *self.violations]


def judge(history: list[SentRequest], receipts: dict[str, list[int]], lists: dict[str, list[int]]) -> ChaosVerdict:
    """`receipts` and `lists` are the state at the end."""
    verdict = ChaosVerdict()
    answered = [asked for asked in history if asked.answered]
    for asked in history:
        if not asked.answered:
            verdict.violations.append(f"{asked.request_id} was never answered")
    judge_effects(verdict, answered, expected_receipts, receipts, "receipt")
    judge_effects(verdict, answered, expected_appends, lists, "list")
    verdict.violations += judge_bank(answered)
    verdict.violations += judge_order(answered)
    verdict.violations += judge_lists(answered)
    verdict.violations += judge_replies(answered)
    return verdict


def expected_receipts(asked: SentRequest) -> Iterator[tuple[str, int]]:
    if asked.call[0] in TRANSFERS:
        yield tested_app.page_of(asked.call[4], asked.number), asked.number


def expected_appends(asked: SentRequest) -> Iterator[tuple[str, int]]:
    if asked.call[0] in (tested_app.run_all, tested_app.send_all):
        for kind, key, value in asked.call[2]:
            if kind == tested_app.APPEND:
                yield key, value


def judge_effects(
    verdict: ChaosVerdict, history: list[SentRequest], expected: Any, found: dict[str, list[int]], what: str
) -> None:
    """Each committed effect must be there once, no aborted one, and nothing else."""
    counts = {(key, value): count for key, values in found.items() for value, count in Counter(values).items()}
    for asked in history:
        for place in expected(asked):
            count = counts.pop(place, 0)
            if asked.is_ok and count == 0:
                verdict.lost[asked.request_id] = (
                    f"{asked.request_id} was acknowledged, but its {what} {place} is missing"
                )
            elif count > 1:
                verdict.duplicated[asked.request_id] = f"{asked.request_id} left its {what} {place} {count} times"
            elif not asked.is_ok and count:
                verdict.violations.append(f"{asked.request_id} aborted, but its {what} {place} is there")
    verdict.violations += [f"{what} {place} is there, but no request left it" for place in counts]


def judge_bank(history: Iterable[SentRequest]) -> Iterator[str]:
    total = tested_app.START * len(ACCOUNTS)
    for asked in history:
        if asked.call[0] is tested_app.audit and asked.result != total:
            yield f"bank: {asked.request_id} (TID {asked.tid}) counted {asked.result}, not {total}"
        elif asked.call[0] is tested_app.transfer and asked.is_ok and asked.result < 0:
            yield f"bank: {asked.request_id} (TID {asked.tid}) left a balance of {asked.result}"


def judge_order(history: list[SentRequest]) -> Iterator[str]:
    """A TID belongs to one request; and a request that was answered before another was sent has the smaller TID."""
    log = sorted(history, key=lambda asked: asked.tid or 0)
    for asked, after in itertools.pairwise(log):
        if asked.tid == after.tid:
            yield f"{asked.request_id} and {after.request_id} both have TID {asked.tid}"
    first_answer = 1 << 62
    for asked in reversed(log):
        if first_answer < asked.sent:
            yield f"{asked.request_id} (TID {asked.tid}) was sent after one with a larger TID had its answer"
        first_answer = min(first_answer, asked.answered)


def judge_lists(history: list[SentRequest]) -> Iterator[str]:
    rows = [
        elle.ElleTransaction(number, list(ops_of(asked)), elle.OK, asked.sent, asked.answered)
        for number, asked in enumerate(history)
        if asked.call[0] in (tested_app.run_all, tested_app.send_all) and asked.is_ok
    ]
    for anomaly in elle.check(rows):
        yield f"lists: {anomaly.name}: {anomaly.explanation}"


def ops_of(asked: SentRequest) -> Iterator[elle.Op]:
    seen = iter(asked.result)
    for kind, key, value in asked.call[2]:
        yield (elle.APPEND, key, value) if kind == tested_app.APPEND else (elle.READ, key, next(seen, None))


def judge_replies(history: list[SentRequest]) -> Iterator[str]:
    """The log is the serial order: run one after the other, in the order of TIDs, requests give the same replies."""
    log = sorted(history, key=lambda asked: asked.tid or 0)
    with Runtime(tested_app.app) as runtime:
        for at in range(0, len(log), AT_ONCE):
            part = log[at : at + AT_ONCE]
            for asked, reply in zip(part, runtime.client.batch([asked.call for asked in part]), strict=True):
                if (reply.result, reply.failure) != (asked.result, asked.failure):
                    told = asked.failure or asked.result
                    right = reply.failure or reply.result
                    yield (
                        f"{asked.request_id} (TID {asked.tid}) was answered {told!r}; "
                        f"a loop over the log gives {right!r}"
                    )
