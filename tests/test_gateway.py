"""The HTTP gateway and the remote client, against a real server on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import Abort, Aborted, App, Context
from headrace.errors import (
    AnswerTooLarge,
    BadArguments,
    BadMessage,
    BadRequest,
    HeadraceError,
    RequestIdReused,
    UnknownFunction,
    Unreachable,
)
from headrace.runtime.remote import RemoteClient, connect
from headrace.wire import codec
from headrace.wire.hints import Hints, Unsupported
from headrace.wire.messages import Calls, Refusal
from headrace.wire.values import Values
from tests.core.carried import shape
from tests.core.declared import DrawnTypes, has_type
from tests.gateway.served import ask, served_app

app = App("shop")
account = app.operator("account")
cart = app.operator("cart")


@dataclasses.dataclass
class Line:
    sku: str
    size: tuple[int, int]


@account.register
def deposit(ctx: Context, amount: int) -> int:
    balance: int = ctx.get(0) + amount
    if balance < 0:
        raise Abort(f"{ctx.key} lacks {-balance}")
    ctx.put(balance)
    return balance


@cart.register
def add(ctx: Context, line: Line) -> list[Line]:
    lines: list[Line] = [*ctx.get([]), line]
    ctx.put(lines)
    return lines


@cart.register
def pack(ctx: Context, line: Line, count: int = 1, *, wrap: bool = False) -> tuple[Line, int, bool]:
    return line, count, wrap


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with served(app) as found:
        yield found


@contextlib.contextmanager
def served(app: App) -> Iterator[tuple[str, int]]:
    with served_app(app) as found:
        yield found.address


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[RemoteClient]:
    with connect(f"http://{address[0]}:{address[1]}", app) as made:
        yield made


def test_a_call_over_http_gets_its_result(address: tuple[str, int]) -> None:
    call = {"function": "account.deposit", "key": "http", "args": [5], "request_id": "first"}
    status, answer = ask(address, "POST", "/v1/call", call)
    assert (status, answer["status"], answer["result"]) == (200, "ok", 5)
    assert ask(address, "POST", "/v1/call", call) == (200, answer)  # asked again: the same, and nothing ran
    assert ask(address, "GET", "/v1/state/account/http") == (200, {"state": 5, "exists": True})
    assert ask(address, "GET", "/v1/state/account/nobody") == (200, {"state": None, "exists": False})


def test_json_becomes_the_annotated_types(address: tuple[str, int]) -> None:
    call = {"function": "cart.add", "key": 7, "args": [{"sku": "pen", "size": [1, 2]}]}
    status, answer = ask(address, "POST", "/v1/call", call)
    assert (status, answer["result"]) == (200, [{"sku": "pen", "size": [1, 2]}])


def test_an_abort_is_told_apart_from_a_result_and_from_a_refusal(address: tuple[str, int]) -> None:
    status, answer = ask(address, "POST", "/v1/call", {"function": "account.deposit", "key": "poor", "args": [-1]})
    assert (status, answer["status"], answer["type"], answer["error"]) == (409, "aborted", "Abort", "poor lacks 1")
    assert answer["raised_in"] == {"function": "account.deposit", "key": "poor"}
    for body, expected, code in (
        ({"function": "account.nope", "key": "a"}, 404, "unknown_function"),
        ({"function": "account.deposit", "key": "a", "args": ["x"]}, 400, "bad_arguments"),
        ({"function": "account.deposit", "key": "a" * 600, "args": [1]}, 400, "bad_key"),
        ({"function": "account.deposit", "key": "a", "args": [1], "more": 1}, 400, "bad_message"),
        (b"{", 400, "bad_message"),
        (b"\xff", 400, "bad_message"),
    ):
        status, answer = ask(address, "POST", "/v1/call", body)
        assert (status, answer["status"], answer["code"]) == (expected, "refused", code)


def test_json_gives_arguments_by_name_and_leaves_out_defaults(address: tuple[str, int]) -> None:
    ink = {"sku": "ink", "size": [3, 4]}
    for args, expected in (
        ({"line": ink}, [ink, 1, False]),
        ({"count": 5, "line": ink}, [ink, 5, False]),
        ({"wrap": True, "line": ink}, [ink, 1, True]),
        ([ink, 2], [ink, 2, False]),
        ([ink, 2, True], [ink, 2, True]),
    ):
        status, answer = ask(address, "POST", "/v1/call", {"function": "cart.pack", "key": "k", "args": args})
        assert (status, answer["result"]) == (200, expected)
    signature = "cart.pack(line: Line, count: int, wrap: bool)"
    for args, message in (
        ({"line": ink, "colour": 1}, f"{signature} has no parameter 'colour'"),
        ({"count": 1}, f"{signature} needs 'line'"),
        ({}, f"{signature} needs 'line'"),
        ({"line": ink, "count": "1"}, f"{signature}: 'count': wanted int, found '1' (str)"),
        ({"line": ink, "request_id": "x"}, "client.options(request_id=...)"),
    ):
        status, answer = ask(address, "POST", "/v1/call", {"function": "cart.pack", "key": "k", "args": args})
        assert (status, answer["code"]) == (400, "bad_arguments")
        assert message in answer["error"]


def test_a_remote_client_gives_arguments_by_name(client: RemoteClient, address: tuple[str, int]) -> None:
    ink = Line("ink", (3, 4))
    assert client.call(pack, "k", ink, wrap=True) == (ink, 1, True)
    assert client.call("cart.pack", "k", line=ink, count=2) == (ink, 2, False)
    assert asyncio.run(client.acall(pack, "k", count=2, line=ink, wrap=True)) == (ink, 2, True)
    for wrong, message in (
        ({"lines": ink}, "has no parameter 'lines'"),
        ({"count": 1}, "needs 'line'"),
        ({"line": ink, "request_id": "x"}, r"client\.options\(request_id=\.\.\.\)"),
    ):
        with pytest.raises(BadArguments, match=rf"cart\.pack\(line: Line, count: int, wrap: bool\) .*{message}"):
            client.call("cart.pack", "k", **wrong)
    with pytest.raises(BadArguments, match="got 'line' twice"):
        client.call("cart.pack", "k", ink, line=ink)
    with connect(f"http://{address[0]}:{address[1]}") as stranger:  # it does not know the app
        assert stranger.call("account.deposit", "by name", amount=5) == 5


def test_the_options_of_a_remote_client_are_a_view_of_it(client: RemoteClient) -> None:
    mine = client.options(request_id="wire-2")
    assert [mine.call(deposit, "view", amount=3) for _ in range(2)] == [3, 3]
    assert mine.batch([(deposit, "view", 1)])[0].request_id == "wire-2/0"
    assert client.call(deposit, "view", 0) == 4
    with pytest.raises(BadRequest, match="a client has no option 'timeout'"):
        client.options(timeout=5)  # type: ignore[arg-type]


def test_web_pages_of_other_sites_and_other_names_are_turned_away(address: tuple[str, int]) -> None:
    call = json.dumps({"function": "account.deposit", "key": "guarded", "args": [5]})
    own = f"http://{address[0]}:{address[1]}"
    for headers, expected in (
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Origin": own}, 200),
        ({"Host": f"localhost:{address[1]}"}, 200),
    ):
        connection = http.client.HTTPConnection(*address, timeout=30)
        connection.request("POST", "/v1/call", call, headers)
        assert connection.getresponse().status == expected, headers
        connection.close()
    assert ask(address, "GET", "/v1/state/account/guarded")[1]["state"] == 10
    assert ask(address, "GET", "/v1/state/account/guarded?int_key=true")[1]["code"] == "bad_key"


def test_the_app_its_metrics_and_its_health_can_be_asked_for(address: tuple[str, int]) -> None:
    status, answer = ask(address, "GET", "/v1/app")
    assert (status, answer["operators"]["account"]) == (200, ["account.deposit(amount: int)"])
    assert ask(address, "GET", "/metrics")[1]["mode"] == "serial"
    assert ask(address, "GET", "/health") == (200, {"status": "ok"})


def test_a_remote_client_does_what_a_local_one_does(client: RemoteClient) -> None:
    assert client.call(deposit, "remote", 5) == 5
    assert client.call("account.deposit", "remote", 5) == 10
    with pytest.raises(Aborted, match="remote lacks 90"):
        client.call(deposit, "remote", -100)
    with pytest.raises(UnknownFunction):
        client.call("account.nope", "remote")
    with pytest.raises(BadArguments):
        client.call(deposit, "remote", 1.5)
    replies = client.batch([(deposit, "remote", 1), (deposit, "remote", "x"), (deposit, "remote", -99)])
    assert [reply.status for reply in replies] == ["ok", "refused", "aborted"]
    assert asyncio.run(client.acall(deposit, "remote", 1)) == 12


def test_what_a_remote_client_cannot_send_is_refused_and_the_rest_is_sent(client: RemoteClient) -> None:
    calls = [
        (deposit, "kept", 1),
        (deposit, 1 << 70, 1),
        (deposit, object(), 1),
        (len, "kept"),
        "no call",
        (add, "k", {1}),
    ]
    replies = client.batch([*calls, (deposit, "kept", 2)])
    assert [reply.status for reply in replies] == ["ok", *["refused"] * 5, "ok"]
    codes = [reply.failure.code for reply in replies if reply.failure]
    assert codes == ["bad_key", "bad_key", "unknown_function", "bad_request", "bad_value"]
    assert replies[6].request_id.endswith("/6")


def test_a_connection_that_the_server_closed_is_opened_anew(client: RemoteClient) -> None:
    assert client.call(deposit, "idle", 1) == 1
    for local in [client._local]:
        client._pool.submit(lambda local=local: local.connection.sock.shutdown(socket.SHUT_RDWR)).result()
    assert client.call(deposit, "idle", 1) == 2


def test_answers_too_large_for_a_message_are_said_to_have_run(
    client: RemoteClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec.encode, "__defaults__", (2_000,))
    with pytest.raises(AnswerTooLarge, match="the calls ran"):
        client.batch([(add, "large", Line("x" * 1_000, (1, 2))), (add, "large", Line("y", (1, 2)))])
    monkeypatch.undo()
    assert len(client.call(add, "large", Line("z", (1, 2)))) == 3


def test_typed_values_arrive_unchanged_over_the_wire(client: RemoteClient) -> None:
    assert client.call(add, "typed", Line("ink", (3, 4))) == [Line("ink", (3, 4))]


def test_values_of_random_declared_types_arrive_unchanged_over_the_wire_and_wrong_ones_are_refused() -> None:
    types = DrawnTypes(15)
    echoes, rows = App("echoes"), []
    box = echoes.operator("box")
    for n in range(60):
        hint = types.draw()
        try:
            Hints().type_of(hint)
        except Unsupported:  # a union that msgspec cannot tell apart
            continue

        def echo(ctx: Context, value: Any) -> Any:
            return value

        echo.__name__ = f"echo{n}"
        echo.__annotations__ |= {"value": hint, "return": hint}
        box.register(echo)
        for value in (types.value(hint), types.spoiled(types.value(hint))):
            rows.append((f"box.echo{n}", value, has_type(value, hint)))
    for record in types.records:
        echoes.record(record)
    values, right = Values(types.records), 0
    with served(echoes) as (host, port), connect(f"http://{host}:{port}", echoes) as client:
        for name, value, fits in rows:
            try:
                values.seal(value)
            except HeadraceError:
                fits = False
            if fits:
                right += 1
                assert shape(client.call(name, "k", value)) == shape(value)
            else:
                with pytest.raises(BadRequest):
                    client.call(name, "k", value)
    assert min(right, len(rows) - right) > 20


def test_a_request_id_asked_again_over_the_wire_runs_once(client: RemoteClient) -> None:
    assert client.options(request_id="wire-1").call(deposit, "once", 3) == 3
    assert client.options(request_id="wire-1").call(deposit, "once", 3) == 3
    with pytest.raises(RequestIdReused):
        client.options(request_id="wire-1").call(deposit, "once", 4)
    assert client.call(deposit, "once", 0) == 3


def test_bytes_that_are_no_message_are_refused_and_the_server_goes_on(
    address: tuple[str, int], client: RemoteClient
) -> None:
    good = codec.encode(Calls("x", ["account.deposit"], ["a"], [client._values.encode((1,))]))
    ragged = codec.encode(Calls("x", ["account.deposit"], ["a", "b"], []))
    no_tuple = codec.encode(Calls("x", ["account.deposit"], ["a"], [client._values.encode("ab")]))
    one = client._values.encode((1,))
    twice = codec.encode(Calls("x", ["account.deposit"], ["a"], [client._values.encode((1, 2))], [["amount"] * 2]))
    too_many = codec.encode(Calls("x", ["account.deposit"], ["a"], [one], [["amount", "other"]]))
    uneven = codec.encode(Calls("x", ["account.deposit"], ["a"], [one], [["amount"], []]))
    for body in (
        b"",
        b"\xc1",
        good[:-3],
        ragged,
        no_tuple,
        twice,
        too_many,
        uneven,
        codec.encode(Refusal(failure=FAILURE)),
    ):
        connection = http.client.HTTPConnection(*address, timeout=30)
        connection.request("POST", "/v1/calls", body, {"Content-Type": "application/msgpack"})
        response = connection.getresponse()
        answer = codec.decode(response.read())
        connection.close()
        assert response.status == BadMessage.http_status
        assert isinstance(answer, Refusal)
        assert answer.failure.code == "bad_message"
    assert client.call(deposit, "after", 1) == 1


FAILURE = codec.decode(b"\x82\xa4type\xa7refusal\xa7failure\x83\xa4code\xa1c\xa4type\xa1t\xa7message\xa1m").failure  # type: ignore[union-attr]


def test_an_address_where_nobody_listens_is_unreachable() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with connect(f"http://127.0.0.1:{port}") as client, pytest.raises(Unreachable, match="no answer"):
        client.call("account.deposit", "a", 1)
    with pytest.raises(BadRequest):
        connect("ftp://example")
