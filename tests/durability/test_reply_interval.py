"""When replies are written: at once where it is quiet, together where it is busy, and always before a snapshot."""

from __future__ import annotations

import time
from pathlib import Path

from headrace import App, Config, Context, Runtime
from headrace.durability.log.log import bounds
from headrace.durability.store import DirectoryStore
from tests.waiting import eventually

app = App("counting")
counter = app.operator("counter")


@counter.register
def add(ctx: Context, amount: int) -> int:
    ctx.put((ctx.get() or 0) + amount)
    return int(ctx.get())


def kept(where: Path) -> int:
    return bounds(DirectoryStore(where), "replies")[1]


def wait_until_kept(where: Path, count: int) -> None:
    eventually(lambda: kept(where) >= count, pause_s=0.001)


def test_the_first_replies_are_written_at_once_and_the_next_not_before_their_time(tmp_path: Path) -> None:
    hour_us = 3_600_000_000
    with Runtime(app, Config(reply_interval_us=hour_us), store=tmp_path) as runtime:
        runtime.client.call(add, "k", 1)
        wait_until_kept(tmp_path, 1)
        for _ in range(5):
            runtime.client.call(add, "k", 1)
        time.sleep(0.2)
        assert kept(tmp_path) == 1
        runtime.snapshot()
        assert kept(tmp_path) == 6
        for last in (7, 8, 9):
            runtime.client.call(add, "k", 1)
            time.sleep(0.2)
            if kept(tmp_path) < last:  # what the snapshot has made needless is deleted soon, and that does not wait
                break
        else:
            raise AssertionError("nothing waits")
    assert kept(tmp_path) == last


def test_replies_wait_no_longer_than_the_interval(tmp_path: Path) -> None:
    with Runtime(app, Config(reply_interval_us=100_000), store=tmp_path) as runtime:
        for number in range(1, 6):
            runtime.client.call(add, "k", 1)
            wait_until_kept(tmp_path, number)


def test_without_an_interval_nothing_waits(tmp_path: Path) -> None:
    with Runtime(app, Config(reply_interval_us=0), store=tmp_path) as runtime:
        for number in range(1, 20):
            runtime.client.call(add, "k", 1)
            wait_until_kept(tmp_path, number)


def test_an_interval_beyond_all_clocks_is_a_long_one(tmp_path: Path) -> None:
    with Runtime(app, Config(reply_interval_us=(1 << 62) - 1), store=tmp_path) as runtime:
        for _ in range(3):
            runtime.client.call(add, "k", 1)
    assert kept(tmp_path) == 3
