"""Every outcome has its status, in one table: what is answered, what the docs say, and what the OpenAPI file says."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest

from headrace import App, Config, Runtime, errors
from headrace.errors import REFUSALS, HeadraceError
from headrace.gateway.server import gateway
from headrace.gateway.statuses import ABORTED, status_of_abort, table
from tests.gateway import shop
from tests.gateway.asked import Asked, ask_front

# Errors that no request is answered with: they end the app, or a command, or are raised by clients.
NOT_ANSWERED = {
    *("headrace_error", "bad_model", "unreachable", "java_missing", "connector_missing", "bad_stream"),
    *("store_error", "object_missing", "store_full", "wrong_store", "log_broken", "snapshot_broken"),
    *("fenced", "app_changed", "not_deterministic", "stuck"),
}


def all_codes() -> set[str]:
    found = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, HeadraceError)]
    return {each.code for each in found}


def test_every_code_has_a_status() -> None:
    listed = {outcome.code for outcome in ABORTED} | set(REFUSALS)
    assert listed & NOT_ANSWERED == set()
    in_functions = {"bad_call"}  # the function used its context incorrectly: "any other"
    assert listed | in_functions | NOT_ANSWERED == all_codes()
    assert status_of_abort("bad_call") == 500
    assert all(400 <= outcome.http_status < 600 for outcome in table()[1:])


def test_the_docs_show_the_table() -> None:
    from tests.test_docs import table_rows

    rows = [tuple(cell.replace("`", "") for cell in row) for row in table_rows("docs/http.md") if len(row) == 4]
    expected = [(str(each.http_status), each.status, each.code, each.meaning.replace("`", "")) for each in table()]
    assert rows[1:] == expected


def ask(runtime: Runtime, body: Any) -> Asked:
    return asyncio.run(ask_front(gateway(runtime), "POST", "/v1/call", body))


@pytest.mark.parametrize(
    ("function", "args", "status", "code", "kind"),
    [
        ("account.deposit", [5], 200, None, None),
        ("account.give_up", [], 409, "aborted", "Abort"),
        ("account.deposit", [-5], 409, "aborted", "TooPoor"),
        ("thing.fail", ["bug"], 500, "function_failed", "KeyError"),
        ("thing.fail", ["bad value"], 500, "bad_value", "BadValue"),
        ("thing.not_awaited", [], 500, "bad_call", "BadCall"),
        ("thing.fail", ["no memory"], 422, "poisoned", "Poisoned"),
        ("thing.fail", ["large"], 422, "too_large", "TooLarge"),
        ("thing.fail", ["endless"], 422, "limit_reached", "LimitReached"),
        ("thing.buy", [5], 424, "external_failed", "ExternalFailed"),
    ],
)
def test_each_outcome_of_a_call_has_its_own_status(
    function: str, args: list[Any], status: int, code: str | None, kind: str | None
) -> None:
    with Runtime(shop.app, Config(calls_max=1_000)) as runtime:
        answer = ask(runtime, {"function": function, "key": "a", "args": args})
        assert (answer.status, answer.body.get("code"), answer.body.get("type")) == (status, code, kind)
        assert answer.body["status"] == ("ok" if status == 200 else "aborted")
        if status != 200:
            where = answer.body["raised_in"].pop("where", None)
            assert answer.body["raised_in"] == {"function": function, "key": "a"}
            assert where is None if code == "aborted" else is_in(runtime.app, function, where)


def is_in(app: App, function: str, where: str) -> bool:
    """Whether this is a file and a line of the function."""
    operator, _, name = function.partition(".")
    lines, first = inspect.getsourcelines(app.operators[operator].functions[name].body)
    file, _, line = where.partition(":")
    return file == "tests/gateway/shop.py" and first <= int(line) < first + len(lines)


def test_health_is_503_unless_requests_are_answered() -> None:
    with Runtime(shop.app) as runtime:
        front = gateway(runtime)
        answer = asyncio.run(ask_front(front, "GET", "/health"))
        assert (answer.status, answer.body) == (200, {"status": "ok"})
    answer = asyncio.run(ask_front(front, "GET", "/health"))
    assert (answer.status, answer.body) == (503, {"status": "closing"})


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"function": "account.rob", "key": "a"}, 404, "unknown_function"),
        ({"function": "account.deposit", "key": "a", "args": ["x"]}, 400, "bad_arguments"),
        ({"function": "account.deposit", "key": None, "args": [1]}, 400, "bad_key"),
        ({"function": "thing.keep", "key": "a", "args": ["x" * (2 << 20)]}, 413, "too_large"),
        ({"function": "thing.keep", "key": "a", "args": [1 << 70]}, 400, "bad_value"),
        (b"{", 400, "bad_message"),
    ],
)
def test_each_refusal_has_its_own_status(body: Any, status: int, code: str) -> None:
    with Runtime(shop.app) as runtime:
        answer = ask(runtime, body)
        assert (answer.status, answer.body["status"], answer.body["code"]) == (status, "refused", code)
        assert answer.body["retry"] is False
        assert runtime.metrics()["committed"] + runtime.metrics()["aborted"] == 0


def test_a_bug_that_an_older_version_called_an_abort_is_the_same_outcome() -> None:
    """A log written before bugs had a code of their own is replayed, and compared with its replies."""
    from headrace.core.outcome import same_outcome
    from headrace.wire.messages import Failure

    old, new = (Failure(code, "KeyError", "x", "thing.fail", "a") for code in ("aborted", "function_failed"))
    other = Failure("limit_reached", "KeyError", "x", "thing.fail", "a")
    assert same_outcome(old, new)
    assert not same_outcome(old, other)
    assert json.dumps(old.code) != json.dumps(new.code)
