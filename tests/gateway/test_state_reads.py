"""`GET /v1/state/{operator}?key=`: any key can be read, and what is not a key is refused."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace import Cluster
from tests.gateway import shop
from tests.gateway.served import Address, ServedApp, ask, served_app

STATE = "/v1/state/thing"


@pytest.fixture(scope="module")
def served() -> Iterator[ServedApp]:
    with served_app(shop.app) as found:
        yield found


def read(address: Address, **query: Any) -> Any:
    return ask(address, "GET", f"{STATE}?{urllib.parse.urlencode(query)}")


@settings(max_examples=60, deadline=None)
@given(key=st.text(max_size=30) | st.integers(-(1 << 63), (1 << 64) - 1))
@example(key="a/b")
@example(key="/")
@example(key="a//../b?x=1&y#z%2F+ ")
@example(key="")
@example(key="7")
@example(key=7)
@example(key="ключ 😀")
def test_every_key_can_be_read_whatever_is_in_it(served: ServedApp, key: str | int) -> None:
    try:
        f"{key}".encode()
    except UnicodeEncodeError:
        return
    call = {"function": "thing.keep", "key": key, "args": [["mine", key]]}
    assert ask(served.address, "POST", "/v1/call", call)[0] == 200
    query = {"key": key, "int_key": "true"} if isinstance(key, int) else {"key": key}
    assert read(served.address, **query) == (200, {"state": ["mine", key], "exists": True})


def test_a_text_and_an_int_that_look_alike_are_two_keys(served: ServedApp) -> None:
    for key, value in (("12", "text"), (12, "int")):
        ask(served.address, "POST", "/v1/call", {"function": "thing.keep", "key": key, "args": [value]})
    assert read(served.address, key="12")[1]["state"] == "text"
    assert read(served.address, key="12", int_key="true")[1]["state"] == "int"
    assert ask(served.address, "GET", f"{STATE}/12")[1]["state"] == "text"
    assert ask(served.address, "GET", f"{STATE}/12?int_key=true")[1]["state"] == "int"
    assert read(served.address, key="13") == (200, {"state": None, "exists": False})


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (STATE, 400, "bad_request"),
        (f"{STATE}?kay=1", 400, "bad_request"),
        (f"{STATE}?key=1&key=2", 400, "bad_request"),
        (f"{STATE}/a?key=a", 400, "bad_request"),
        (f"{STATE}?key=%ff", 400, "bad_request"),
        (f"{STATE}?key=a&int_key=maybe", 400, "bad_request"),
        (f"{STATE}?key=a&int_key=true", 400, "bad_key"),
        (f"{STATE}?key=--1&int_key=true", 400, "bad_key"),
        (f"{STATE}?key=99999999999999999999&int_key=true", 400, "bad_key"),
        (f"{STATE}?key=18446744073709551616&int_key=true", 400, "bad_key"),
        (f"{STATE}?key={'x' * 600}", 400, "bad_key"),
        ("/v1/state/nothing?key=a", 404, "unknown_function"),
        ("/v1/state/headrace?key=a", 404, "unknown_function"),
        ("/v1/state/?key=a", 404, "unknown_function"),
    ],
)
def test_what_is_no_place_is_refused(served: ServedApp, path: str, status: int, code: str) -> None:
    found, answer = ask(served.address, "GET", path)
    assert (found, answer["status"], answer["code"]) == (status, "refused", code)


def test_state_is_read_from_workers_too() -> None:
    with served_app(shop.app, runtime=Cluster("tests.gateway.shop:app", workers=2)) as served:
        for number in range(6):
            call = {"function": "account.deposit", "key": f"k/{number}", "args": [number]}
            assert ask(served.address, "POST", "/v1/call", call)[0] == 200
        for number in range(6):
            path = f"/v1/state/account?key=k%2F{number}"
            assert ask(served.address, "GET", path) == (200, {"state": number, "exists": True})
        future = served.runtime.read([("account", f"k/{number}") for number in range(8)])
        assert sorted(future.result()) == [("account", f"k/{number}", number) for number in range(6)]
