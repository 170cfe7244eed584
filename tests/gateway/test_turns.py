"""What arrives in one turn of the event loop is handed over as one, and each request gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import Config, Runtime
from headrace.gateway.server import gateway
from tests.gateway import shop
from tests.gateway.asked import ask_at_once, ask_front


class Watched(Runtime):
    """Notes how many calls, and how many reads, come at a time."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(shop.app, config)
        self.batches: list[int] = []
        self.reads: list[int] = []

    def submit(self, batch: Any, wait: bool = True) -> Any:
        future = super().submit(batch, wait)
        self.batches.append(len(batch))
        return future

    def read(self, places: Any) -> Any:
        self.reads.append(len(places))
        return super().read(places)


@pytest.fixture
def runtime() -> Iterator[Watched]:
    with Watched() as made:
        yield made


def deposit(key: str, amount: Any, request_id: str | None = None) -> dict[str, Any]:
    return {"function": "account.deposit", "key": key, "args": [amount], "request_id": request_id}


def test_calls_of_one_turn_are_one_batch_and_each_has_its_own_answer(runtime: Watched) -> None:
    calls = [deposit(f"k{number % 3}", number) for number in range(20)]
    asked = asyncio.run(ask_at_once(gateway(runtime), *calls))
    balances: dict[str, int] = {}
    for call, answer in zip(calls, asked, strict=True):  # the serial loop
        balances[call["key"]] = balances.get(call["key"], 0) + call["args"][0]
        assert (answer.status, answer.body["status"], answer.body["result"]) == (200, "ok", balances[call["key"]])
    assert runtime.batches == [20]
    assert runtime.state("account") == balances


def test_a_refusal_and_an_abort_stay_with_their_own_requests(runtime: Watched) -> None:
    calls = [
        deposit("a", 5, "first"),
        deposit("a", "five"),
        deposit("a", -100),
        {"function": "account.rob", "key": "a"},
        deposit("a", 1, "x" * 1_000),
        deposit("a", 5, "first"),  # asked twice in one turn: it runs once
        deposit("a", 6, "first"),
        {"function": "thing.fail", "key": "a", "args": ["bug"]},
        deposit("a", 1),
    ]
    asked = asyncio.run(ask_at_once(gateway(runtime), *calls))
    assert [answer.status for answer in asked] == [200, 400, 409, 404, 413, 200, 409, 500, 200]
    assert [answer.body["status"] for answer in asked] == [
        "ok",
        "refused",
        "aborted",
        "refused",
        "refused",
        "ok",
        "refused",
        "aborted",
        "ok",
    ]
    assert asked[0].body == asked[5].body
    assert asked[6].body["code"] == "request_id_reused"
    assert asked[8].body["result"] == 6


def test_without_room_for_all_calls_of_a_turn_those_that_fit_are_taken() -> None:
    shop.GATE.clear()
    with Watched(Config(pending_transactions_max=2)) as runtime:
        front = gateway(runtime)
        call = {"function": "thing.wait_at_the_gate", "key": "a"}

        async def ask() -> list[Any]:
            asking = [asyncio.ensure_future(ask_front(front, "POST", "/v1/call", call)) for _ in range(5)]
            done: set[Any] = set()
            while len(done) < 3:  # the others wait at the gate
                done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                asking_still = [each for each in asking if each not in done]
                await asyncio.sleep(0)
            assert len(asking_still) == 2
            shop.GATE.set()
            return await asyncio.gather(*asking)

        try:
            asked = asyncio.run(ask())
        finally:
            shop.GATE.set()
        assert sorted(answer.status for answer in asked) == [200, 200, 503, 503, 503]
        refused = [answer for answer in asked if answer.status == 503]
        assert {answer.body["code"] for answer in refused} == {"overloaded"}
        assert all(answer.body["retry"] and answer.headers["retry-after"] for answer in refused)
        assert runtime.batches == [1, 1]


def test_reads_of_one_turn_are_one_read_between_two_epochs(runtime: Watched) -> None:
    front = gateway(runtime)

    async def ask() -> list[Any]:
        await ask_at_once(front, *(deposit(f"k{number}", number + 1) for number in range(5)))
        paths = [("/v1/state/account", f"key=k{number % 6}") for number in range(12)]
        return await asyncio.gather(*(ask_front(front, "GET", path, query=query) for path, query in paths))

    asked = asyncio.run(ask())
    states = [{"state": n + 1, "exists": True} for n in range(5)] + [{"state": None, "exists": False}]
    assert [answer.body for answer in asked] == states * 2
    assert runtime.reads == [6]


def test_reads_of_one_turn_close_no_epoch_each() -> None:
    """Calls and reads that arrive together: the reads share one moment, and the calls are not torn apart."""
    with Watched() as runtime:
        front = gateway(runtime)

        async def ask() -> None:
            calls = [ask_front(front, "POST", "/v1/call", deposit("a", 1)) for _ in range(10)]
            reads = [ask_front(front, "GET", "/v1/state/account", query="key=a") for _ in range(10)]
            mixed = [each for pair in zip(calls, reads, strict=True) for each in pair]
            asked = await asyncio.gather(*mixed)
            seen = {str(answer.body) for answer in asked[1::2]}
            assert len(seen) == 1, "they were read at different moments"

        asyncio.run(ask())
        assert (runtime.batches, runtime.reads) == ([10], [1])
        assert runtime.metrics()["epochs"] == 1


def test_when_the_runtime_stops_each_request_is_told() -> None:
    runtime = Watched()
    front = gateway(runtime)
    runtime.close()

    async def ask() -> list[Any]:
        calls = (ask_front(front, "POST", "/v1/call", deposit("a", 1)) for _ in range(3))
        read = ask_front(front, "GET", "/v1/state/account", query="key=a")
        return await asyncio.gather(*calls, read)

    asked = asyncio.run(ask())
    assert [(answer.status, answer.body["code"]) for answer in asked] == [(503, "stopped")] * 4
