"""`POST /v1/batch`: many calls in one request, each as if it came alone."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from headrace import Config, Runtime
from headrace.gateway.server import gateway
from tests.gateway import shop
from tests.gateway.asked import Asked, ask_front

ALONE = {"tid", "epoch", "request_id"}  # what differs between two runs

CALLS: list[dict[str, Any]] = [
    {"function": "account.deposit", "key": "a", "args": [5]},
    {"function": "account.deposit", "key": "a", "args": {"amount": 7}, "request_id": "mine"},
    {"function": "account.deposit", "key": "b", "args": [-1]},
    {"function": "account.deposit", "key": "b", "args": ["1"]},
    {"function": "account.rob", "key": "b"},
    {"function": "nobody.at_all", "key": "b"},
    {"function": "thing.fail", "key": "b", "args": ["bug"]},
    {"function": "account.deposit", "key": 7, "args": [1]},
    {"function": "account.deposit", "args": [1]},
    {"function": "account.deposit", "key": "a", "args": [1], "request_id": ""},
    {"function": "account.deposit", "key": "a", "args": [1], "request_id": "x" * 1_000},
    {"function": "account.deposit", "key": "a", "args": [7], "request_id": "mine"},
    {"function": "account.deposit", "key": "a", "args": [8], "request_id": "mine"},
    {"function": "thing.keep", "key": "a", "args": [{"deep": [1.5, None]}]},
]
NO_CALLS: list[Any] = [
    {"function": "account.deposit", "key": "a", "args": [1], "more": 1},
    {"key": "a"},
    5,
    {"function": "account.deposit", "key": 1.5},
]


def ask(runtime: Runtime, path: str, body: Any) -> Asked:
    return asyncio.run(ask_front(gateway(runtime), "POST", path, body))


def plain(reply: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name not in ALONE}


@pytest.mark.parametrize("calls", [CALLS, CALLS + NO_CALLS, NO_CALLS])
def test_the_calls_of_a_batch_are_answered_as_if_each_came_alone(calls: list[Any]) -> None:
    rng = random.Random(1)
    mixed = calls + rng.sample(calls, len(calls))
    with Runtime(shop.app) as one, Runtime(shop.app) as other:
        answer = ask(one, "/v1/batch", {"calls": mixed})
        assert answer.status == 200
        alone = [ask(other, "/v1/call", call) for call in mixed]
        assert [plain(reply) for reply in answer.body["replies"]] == [plain(each.body) for each in alone]
        assert [one.state(name) for name in ("account", "thing")] == [
            other.state(name) for name in ("account", "thing")
        ]


def test_a_batch_sent_again_runs_once() -> None:
    calls = [{"function": "account.deposit", "key": "a", "args": [n], "request_id": f"r{n}"} for n in range(5)]
    with Runtime(shop.app) as runtime:
        first, again = (ask(runtime, "/v1/batch", {"calls": calls}) for _ in range(2))
        assert first.body == again.body
        assert runtime.get("account", "a") == 10


def test_an_empty_batch_has_no_replies() -> None:
    with Runtime(shop.app) as runtime:
        assert ask(runtime, "/v1/batch", {"calls": []}).body == {"replies": []}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"calls": 5}', b'{"calls": [], "more": 1}', b"\xff"])
def test_what_is_no_batch_is_refused(body: bytes) -> None:
    with Runtime(shop.app) as runtime:
        answer = ask(runtime, "/v1/batch", body)
        assert (answer.status, answer.body["status"], answer.body["code"]) == (400, "refused", "bad_message")


def test_a_batch_that_is_too_large_is_refused_as_a_whole() -> None:
    calls = [CALLS[0]] * 3
    with Runtime(shop.app, Config(pending_transactions_max=2)) as runtime:
        answer = ask(runtime, "/v1/batch", {"calls": calls})
        assert (answer.status, answer.body["code"]) == (413, "too_large")
        assert runtime.state("account") == {}


def test_answers_too_large_for_one_message_are_said_to_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.wire.codec.MESSAGE_BYTES_MAX", 1_000)
    call = {"function": "thing.keep", "key": "a", "args": ["x" * 300]}
    with Runtime(shop.app) as runtime:
        for _ in range(3):
            assert ask(runtime, "/v1/call", call).status == 200
        short = {"function": "account.deposit", "key": "b", "args": [1]}
        answer = ask(runtime, "/v1/batch", {"calls": [short] * 13})
        assert (answer.status, answer.body["code"]) == (500, "answer_too_large")
        assert "the calls ran" in answer.body["error"]
        assert runtime.get("account", "b") == 13
