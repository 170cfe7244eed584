"""How the benchmarks send: batches with a few in flight at a time, or each at its due time whatever has returned."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from headrace.core.origin import FromClient
from headrace.model.operator import Function
from headrace.runtime import gc_settings
from headrace.runtime.driver import Driver
from headrace.wire.messages import Answers

BATCH = 10_000
AT_ONCE = 3  # batches in flight
AT_ONCE_DURABLE = 6  # if they wait for a log

Parts = list[tuple[list[int], list[tuple[Any, ...]]]]  # keys and arguments of each batch


class Stopwatch:
    def __init__(self) -> None:
        self.laps_s: list[float] = []

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.laps_s.append(time.perf_counter() - self._began)

    def percentile_ms(self, percent: int) -> float:
        ordered = sorted(self.laps_s)
        return 1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def cut(pairs: list[tuple[int, int]], size: int, *more: int) -> Parts:
    parts = [pairs[at : at + size] for at in range(0, len(pairs), size)]
    return [([debtor for debtor, _ in part], [(creditor, *more) for _, creditor in part]) for part in parts]


def send(
    runtime: Driver, function: Function, parts: Parts, at_once: int = AT_ONCE
) -> tuple[list[Answers], float, Stopwatch]:
    """Send all batches in order, a few in flight at a time. Returns the answers, the time, and each batch's time."""
    batches = Stopwatch()
    pending: deque[tuple[float, Future[Answers]]] = deque()
    answers = []

    def take() -> None:
        handed_over, future = pending.popleft()
        answers.append(future.result())
        batches.laps_s.append(time.perf_counter() - handed_over)

    gc_settings.freeze_gc()  # as `headrace run` does
    began = time.perf_counter()
    for keys, args in parts:
        if len(pending) >= at_once:
            take()
        future = hand_over(runtime, function, keys, args)
        pending.append((time.perf_counter(), future))
    while pending:
        take()
    return answers, time.perf_counter() - began, batches


def hand_over(runtime: Driver, function: Function, keys: list[int], args: list[tuple[Any, ...]]) -> Future[Answers]:
    """Like `client.map`, without waiting for the answers."""
    return runtime.submit(runtime.admission.admit_columns(FromClient(runtime.client.new_id()), function, keys, args))


def send_on_time(count: int, per_s: float, submit: Callable[[int], Future[Any]]) -> Stopwatch:
    """Requests 0, 1 and so on, evenly spaced. The time of each runs from when it was due, even if it was sent late."""
    laps_s = [0.0] * count
    futures = []

    def watch(number: int, due: float) -> None:
        def note(_: Future[Any]) -> None:
            laps_s[number] = time.perf_counter() - due

        futures.append(submit(number))
        futures[-1].add_done_callback(note)

    gc_settings.freeze_gc()  # as `headrace run` does
    began = time.perf_counter()
    for number in range(count):
        due = began + number / per_s
        early = due - time.perf_counter()
        if early > 0:
            time.sleep(early)
        watch(number, due)
    for future in futures:
        future.result()
    stopwatch = Stopwatch()
    stopwatch.laps_s = laps_s
    return stopwatch


def send_calls_on_time(runtime: Driver, function: Function, pairs: list[tuple[int, int]], per_s: float) -> Stopwatch:
    """Send calls one by one, as many clients would."""
    client = runtime.client

    def submit(number: int) -> Future[Any]:
        debtor, creditor = pairs[number]
        return client.submit([client.new_id()], [(function, debtor, creditor)], wait=True)

    return send_on_time(len(pairs), per_s, submit)


def send_batches_on_time(runtime: Driver, function: Function, parts: Parts, per_s: float) -> Stopwatch:
    return send_on_time(len(parts), per_s, lambda number: hand_over(runtime, function, *parts[number]))
