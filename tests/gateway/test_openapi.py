"""The OpenAPI file is valid, and true: what it shows as an example is taken, and what it forbids is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import validate

from headrace.gateway.statuses import table
from tests.gateway import shop, test_json_ways
from tests.gateway.served import ServedApp, ask, ask_for_all, served_app


@pytest.fixture(scope="module", params=[shop.app, test_json_ways.app], ids=lambda app: str(app.name))
def served(request: pytest.FixtureRequest) -> Iterator[ServedApp]:
    with served_app(request.param) as found:
        yield found


@pytest.fixture
def openapi(served: ServedApp) -> dict[str, Any]:
    status, answer = ask(served.address, "GET", "/v1/openapi.json")
    assert status == 200
    found: dict[str, Any] = answer
    return found


def call_examples(openapi: dict[str, Any]) -> dict[str, Any]:
    body = openapi["paths"]["/v1/call"]["post"]["requestBody"]["content"]["application/json"]
    found: dict[str, Any] = body["examples"]
    return found


def fits(call: Any, openapi: dict[str, Any]) -> bool:
    name = f"call.{call['function']}"
    schema = {"$ref": f"#/components/schemas/{name}", "components": openapi["components"]}
    return bool(jsonschema.Draft202012Validator(schema).is_valid(call))


def test_the_file_is_valid_and_has_every_route(openapi: dict[str, Any]) -> None:
    validate(openapi)
    routes = {"/v1/call", "/v1/batch", "/v1/state/{operator}", "/v1/rescale", "/v1/snapshot", "/v1/app"}
    assert routes | {"/metrics", "/health"} == set(openapi["paths"])
    assert {"200", "503"} == set(openapi["paths"]["/health"]["get"]["responses"])


def test_every_function_is_described_with_its_parameters(served: ServedApp, openapi: dict[str, Any]) -> None:
    schemas = openapi["components"]["schemas"]
    for function in served.runtime.app.functions:
        described = schemas[f"call.{function.full_name}"]
        signature = served.runtime.engine.program.functions[function].signature
        by_name, by_position = described["properties"]["args"]["anyOf"]
        assert list(by_name["properties"]) == signature.names
        assert len(by_position.get("prefixItems", ())) == signature.most
        assert described["title"] == str(signature)
    if served.runtime.app is shop.app:
        deposit = schemas["call.account.deposit"]
        assert deposit["description"] == "Add to an account.\n\nA negative amount takes from it.\n\nReturns int."
        assert deposit["properties"]["args"]["anyOf"][0]["properties"] == {"amount": {"type": "integer"}}


def test_every_example_fits_its_schema_and_is_taken(served: ServedApp, openapi: dict[str, Any]) -> None:
    examples = call_examples(openapi)
    assert len(examples) == len(list(served.runtime.app.functions))
    for name, example in examples.items():
        assert fits(example["value"], openapi), name
        status, answer = ask(served.address, "POST", "/v1/call", example["value"])
        if name != "box.even":  # a condition in a __post_init__ has no schema
            assert answer["status"] != "refused", (name, answer)
        described = openapi["paths"]["/v1/call"]["post"]["responses"][str(status)]
        assert described["content"]["application/json"]["schema"]
    body = openapi["paths"]["/v1/batch"]["post"]["requestBody"]["content"]["application/json"]["examples"]
    assert ask(served.address, "POST", "/v1/batch", body["batch"]["value"])[0] == 200


def test_what_json_may_be_is_what_the_schemas_say(served: ServedApp, openapi: dict[str, Any]) -> None:
    """What fits is taken. (What does not fit is refused, but some conditions have no schema: two digits at most.)"""
    if served.runtime.app is shop.app:
        return
    for function, argument, _ in test_json_ways.SAME:
        if "e400" not in argument:
            call = json.loads(test_json_ways.call_of(function, argument, True))
            assert fits(call, openapi), (function, argument)
    unchecked = ("cents", "time", "day", "even", "decimal", "by_number", "by_data")
    for function, argument, code, _ in test_json_ways.REFUSED:
        no_schema = any(text in argument for text in ("cheap", "5.0", "e400"))  # 5.0 is an integer there
        if code == "bad_arguments" and function not in unchecked and not no_schema:
            call = json.loads(test_json_ways.call_of(function, argument, True))
            assert not fits(call, openapi), (function, argument)


def test_every_outcome_is_in_the_file(openapi: dict[str, Any]) -> None:
    described = openapi["paths"]["/v1/call"]["post"]["responses"]
    for outcome in table():
        text = described[str(outcome.http_status)]["description"]
        assert f"{outcome.status} {outcome.code}: {outcome.meaning}" in text


def test_the_page_for_people_is_there(served: ServedApp) -> None:
    status, headers, page = ask_for_all(served.address, "GET", "/docs")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/html")
    assert b"/v1/openapi.json" in page
